"""Compares two traces op by op: one at one token with a symbolic one, or a new one with an earlier one."""

from __future__ import annotations

import itertools
from typing import Any

import sympy
import torch
from torch import fx

from piecewise import torch_api
from piecewise.calls.structure import Structure
from piecewise.ir.effects import Facts
from piecewise.ir.graph_key import argument_key
from piecewise.ir.nodes import fakes_of, has_fakes, is_call, source_line, storages_of, target_name, value_of
from piecewise.ir.plan import ResultLeaf
from piecewise.ir.tensors import storage_of
from piecewise.trace.trace import Trace

_VIEW = "view of"


class Program:
    """Describes a graph as comparable lines: op, operands by position, numbers by value, result shapes.

    There is one line, and one entry of `nodes`, per op that makes or writes tensors, but for views, which
    their base names. `result` is the structure of the result, and which of its tensors share memory. Sizes
    are compared at `num_tokens` of `symbol`, which is None for a static trace.
    """

    def __init__(
        self, trace: Trace, facts: Facts, *, symbol: sympy.Symbol | None = None, num_tokens: int = 1
    ) -> None:
        self._trace, self._symbol, self._facts, self._num_tokens = trace, symbol, facts, num_tokens
        self._names: dict[fx.Node, Any] = {}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._holders: dict[int, list[fx.Node]] = {}
        self._known: dict[Any, Any] = {}
        graph = trace.graph.graph
        self._order = {node: position for position, node in enumerate(graph.nodes)}
        self._outputs: Any = graph.output_node().args[0]
        self.nodes: list[fx.Node] = []
        self.lines: list[Any] = []
        for placeholder in trace.placeholders:
            where = placeholder.state.path if placeholder.state is not None else placeholder.leaf
            self._name(placeholder.node, (placeholder.kind, where))
        for node in graph.nodes:
            # Sizes are compared where they are used, by value.
            is_size = node.target == "size" or target_name(node).startswith("aten::sym_")
            if (view := self._view(node)) is not None:
                self._name(node, view)
            elif is_call(node) and not is_size and has_fakes(node, *node.all_input_nodes):
                self._name(node, len(self.lines))
                self.nodes.append(node)
                shapes = [self._sizes(tensor.shape) for tensor in fakes_of([node])]
                arguments = self._argument((node.args, dict(node.kwargs)))
                what = node.op, str(node.target), node.meta.get("autocast", ())
                self.lines.append((*what, arguments, shapes, self._written(node)))
        seen = dict[int, int]()
        results = fakes_of(graph.output_node().all_input_nodes)
        aliases = [seen.setdefault(storage_of(tensor), len(seen)) for tensor in results]
        wrapped = [trace.result_leaves[part] for _, parts, _ in trace.wrapped for part in parts]
        self.result = self._result(trace.result), list(map(self._result_leaf, wrapped)), aliases

    def difference(self, now: Program) -> str | None:
        """Names the first op that differs, or writes other tensors, in a later program; None if none does."""
        for position, (seen, found) in enumerate(itertools.zip_longest(self.lines, now.lines)):
            if seen != found:
                node = (now if found is not None else self).nodes[position]
                was = target_name(self.nodes[position]) if seen is not None else "nothing"
                got = target_name(node) if found is not None else "nothing"
                where = f" at {source}" if (source := source_line(node)) else ""
                return f"op {position} was {was}, is {got}{' of other operands' if was == got else ''}{where}"
        return None if self.result == now.result else "the result is put together in another way"

    def _view(self, node: fx.Node) -> Any:
        """Names a view by base and geometry: on one row `slice` equals `alias`, `unsqueeze` maybe `view`."""
        fake, given = value_of(node), node.args[0] if node.args else None
        is_view = isinstance(node.target, torch_api.OpOverload) and node.target.is_view
        if not is_view or not isinstance(fake, torch.Tensor) or not isinstance(given, fx.Node):
            return None
        base = self._names[given]
        sizes, strides = self._sizes(fake.shape), self._sizes(fake.stride())
        steps = tuple(stride for size, stride in zip(sizes, strides, strict=True) if size != 1)
        # Packed weights lie at other places of one storage: offsets count from the base's.
        root = self._roots[node] = self._roots.get(given, given)
        offset = self._number(fake.storage_offset() - value_of(root).storage_offset())
        place = sizes, steps, offset, str(fake.dtype), fake.is_conj(), fake.is_neg()
        is_chain = isinstance(base, tuple) and base[0] == _VIEW
        return _VIEW, base[1] if is_chain else base, place

    def _name(self, node: fx.Node, name: Any) -> None:
        self._names[node] = name
        for memory in storages_of([node]):
            self._holders.setdefault(memory, []).append(node)

    def _written(self, node: fx.Node) -> Any:
        """Returns the written tensors that are read later; of one row `contiguous()` is no copy."""
        fact, order = self._facts.get(node), self._order
        if fact is None or not fact.writes:
            return ()
        written = storages_of(fact.writes)
        holders = dict.fromkeys(other for each in written for other in self._holders.get(each, ()))
        later = {other for other in holders if any(order[user] > order[node] for user in other.users)}
        return sorted(str(self._names[each]) for each in holders if each.op == "placeholder" or each in later)

    def _result(self, node: Structure) -> Any:
        if node.kind in ("tensor", "int"):
            return self._result_leaf(self._trace.result_leaves[node.index])
        if node.kind == "const":
            is_number = type(node.value) in (int, float)
            return ("number", self._number(node.value)) if is_number else ("const", node.value)
        return (node.kind, node.type, node.keys, node.spec, tuple(map(self._result, node.children)))

    def _result_leaf(self, leaf: ResultLeaf) -> Any:
        if leaf.kind == "input":
            return ("input", leaf.index)
        if leaf.kind == "state":
            return ("state", leaf.state.path if leaf.state is not None else "")
        if leaf.kind == "const":
            return ("number", self._number(leaf.value))
        item = self._outputs[leaf.index]
        value = value_of(item) if isinstance(item, fx.Node) else item
        if isinstance(value, torch.Tensor):
            return ("tensor", leaf.value, self._argument(item))
        return ("number", self._number(value))

    def _sizes(self, sizes: Any) -> tuple[Any, ...]:
        return tuple(map(self._number, sizes))

    def _number(self, value: Any) -> Any:
        if (expr := torch_api.expression(value, self._trace.shape_env)) is None:
            return repr(value)
        if expr not in self._known:
            taken = expr.subs(self._symbol, self._num_tokens) if self._symbol is not None else expr
            number = int(taken) if taken.is_Integer else float(taken) if taken.is_number else str(taken)
            self._known[expr] = number
        return self._known[expr]

    def _argument(self, value: Any) -> Any:
        return argument_key(value, node=self._operand, number=self._number)

    def _operand(self, node: fx.Node) -> Any:
        known = self._names.get(node)
        if node.op == "get_attr" or (known is not None and has_fakes(node)):
            return ("node", known)
        scalar = value_of(node)
        # A size of one trace is a number in the other.
        return ("tuple", *self._sizes(scalar)) if isinstance(scalar, torch.Size) else self._number(scalar)
