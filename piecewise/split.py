"""Cuts a classified graph into segments; pure: a graph and verdicts in, frozen data out.

Example, with `attn` a boundary op and `pick = x[-1:]` eager because it loses the token dim:

    before   embed · norm · linear · empty | attn | linear · add · norm | pick | lm_head
    after    graph 0                       | b. 1 | graph 2             | e. 3 | graph 4

`torch.fx`'s own `split_module` is not used: it reorders calls that return nothing, passes tuples and sizes
across borders, and renames nodes. Here a segment takes tensors and one row count; every size is computed
inside from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx

from piecewise import torch_internals as internals
from piecewise.aliases import NodeFacts, is_tuple_item, written_storages
from piecewise.analysis.rows.walk import makes_empty
from piecewise.classify import Classifier, Verdict
from piecewise.free_strides import with_free_strides
from piecewise.normalize import target_name
from piecewise.plan import (
    ComputedNumber,
    EagerReason,
    FillReport,
    InputRule,
    PaddedRows,
    Segment,
    SegmentPlan,
    TokenDim,
    ValueSpec,
)
from piecewise.segment_graph import SegmentWriter
from piecewise.sizes import SizeFunctions, holds
from piecewise.tensors import storage_of, tensors_in
from piecewise.token_dim import TokenSymbol
from piecewise.trace import Trace
from piecewise.zero_fills import ZeroFills
from runners.state_check import StateRef


class Splitter:
    """One cut of one trace. `cut()` returns the plan."""

    def __init__(
        self,
        trace: Trace,
        facts: Mapping[fx.Node, NodeFacts],
        token: TokenSymbol,
        *,
        classifier: Classifier,
        num_dead_ops: int,
        keeps_own: Mapping[fx.Node, str] = {},
    ) -> None:
        self.trace, self.facts, self.token, self.num_dead_ops = trace, facts, token, num_dead_ops
        self.graph, self.classifier = trace.graph.graph, classifier
        self.verdicts: dict[fx.Node, Verdict] = self.classifier.run()
        kinds = {node: verdict.kind for node, verdict in self.verdicts.items()}
        self.fills = ZeroFills(self.graph, facts, kinds)
        self.keeps_own = keeps_own
        self.writers: list[SegmentWriter] = []
        self.values: list[ValueSpec] = []
        self.index_of: dict[fx.Node, int] = {}
        self.symbol_index: dict[sympy.Symbol, int] = {}
        self._memory: dict[int, int] = {}
        self._sizes = SizeFunctions(trace.shape_env, token.symbol)

    def _value(self, node: fx.Node) -> int:
        known = self.index_of.get(node)
        if known is None:
            known = self.index_of[node] = len(self.values)
            self.values.append(self._spec(node, known))
        return known

    def _spec(self, node: fx.Node, index: int) -> ValueSpec:
        fake = node.meta.get("example_value")
        placeholder = next((p for p in self.trace.placeholders if p.node is node), None)
        origin = (
            placeholder.kind
            if placeholder is not None
            else self.verdicts[node].kind
            if node in self.verdicts
            else "state"
        )
        state = placeholder.state if placeholder is not None else None
        if node.op == "get_attr":
            tensor = getattr(self.trace.graph, str(node.target))
            fake, state = tensor, StateRef({node.name: tensor}, node.name, node.name)
        leaf = placeholder.leaf if placeholder is not None else -1
        if not isinstance(fake, torch.Tensor):
            return ValueSpec(index, node.name, origin, leaf=leaf, state=state)
        token_dims = self._sizes.token_dims(fake)
        memory = self._memory.setdefault(storage_of(fake), len(self._memory))
        sizes, strides = self._sizes.of(fake.shape), self._sizes.of(fake.stride())
        return ValueSpec(
            index, node.name, origin, fake.dtype, fake.device, sizes, strides, token_dims, memory,
            leaf=leaf, state=state, offset=self._sizes.of((fake.storage_offset(),)),
            geometry=self._sizes.text(fake), units=self._units(fake), padded=self._padded(node, origin),
        )  # fmt: skip

    def _units(self, fake: torch.Tensor) -> tuple[int, ...]:
        """How many elements of each dim are one row: what padding repeats."""
        sizes = self.classifier.judge.sizes(fake.shape)
        return tuple(size.unit if size.constant is None else 1 for size in sizes) if sizes is not None else ()

    def _padded(self, node: fx.Node, origin: str) -> PaddedRows:
        if origin != "graph":
            return PaddedRows()
        (rows,) = self.classifier.rows.rows_of(node)
        counts = self.classifier.judge.known.counts

        def bounds(num_rows: int) -> tuple[int | None, int | None]:
            at = int(np.searchsorted(counts, num_rows))
            low, high = (int(side.values[at]) if side is not None else None for side in rows.bounds[:2])
            return low, high

        return PaddedRows(rows.is_real, bounds, self.classifier.rows.is_prefix(node))

    def symbol_value(self, symbol: sympy.Symbol) -> int:
        """Value index of a symbol that is not the token count: an int input, or a size of an input."""
        if symbol not in self.symbol_index:
            source = self._symbol_source_for(symbol)
            assert source is not None, f"symbol {symbol} belongs to no input"
            leaf, dim = source
            index = self.symbol_index[symbol] = len(self.values)
            self.values.append(ValueSpec(index, str(symbol), "symbol", leaf=leaf, dim=dim))
        return self.symbol_index[symbol]

    def _symbol_source_for(self, symbol: sympy.Symbol) -> tuple[int, int] | None:
        """(leaf, dim) of the input that gives the symbol its value; dim −1 for an int."""
        for placeholder in self.trace.placeholders:
            value = placeholder.node.meta.get("example_value")
            if placeholder.kind != "input":
                continue
            if isinstance(value, torch.Tensor):
                for dim, expr in enumerate(self.trace.symbols_of_leaf(placeholder.leaf)):
                    if expr == symbol:
                        return placeholder.leaf, dim
            elif internals.expression(value, self.trace.shape_env) == symbol:
                return placeholder.leaf, -1
        return internals.symbol_source(self.trace.shape_env, symbol)  # an input that the graph does not read

    def groups(self) -> list[tuple[str, list[fx.Node]]]:
        """Consecutive nodes of one kind; a boundary op is a group of its own; scalars and floating views
        are in none."""
        found: list[tuple[str, list[fx.Node]]] = []
        for node in self.graph.nodes:
            verdict = self.verdicts.get(node)
            if verdict is None or verdict.kind == "scalar" or self.classifier.is_floating(node):
                continue
            if found and found[-1][0] == verdict.kind != "boundary":
                found[-1][1].append(node)
            else:
                found.append((verdict.kind, [node]))
        return found

    def cut(self) -> SegmentPlan:
        groups = self.groups()
        writers = self.writers = [SegmentWriter(self, kind, nodes).write() for kind, nodes in groups]
        used = [set(writer.input_nodes) for writer in writers]
        results = set(self.graph.output_node().all_input_nodes)
        segments = []
        functions: dict[str, Any] = {}
        for index, ((kind, nodes), writer) in enumerate(zip(groups, writers, strict=True)):
            later = set().union(*used[index + 1 :]) | results
            outputs = [node for node in nodes if node in later and self._crosses(node)]
            others = [used[position] for position in range(len(used)) if position != index]
            unwritten = self._fill_empty(nodes, writer, results.union(*others)) if kind == "graph" else ()
            function, key = writer.finish(outputs, functions)
            segments.append(self._segment(index, kind, nodes, writer, outputs, function, key, unwritten))
        return self._plan(tuple(segments))

    def _crosses(self, node: fx.Node) -> bool:
        value = node.meta.get("example_value")
        return isinstance(value, torch.Tensor) or (
            self.verdicts[node].kind == "eager" and not isinstance(value, (tuple, list))
        )

    def _fill_empty(
        self, nodes: Sequence[fx.Node], writer: SegmentWriter, outside: Iterable[fx.Node]
    ) -> tuple[int, ...]:
        """Zeroes the memory of `empty*` that needs it [I2]; the memories that leave unwritten."""
        leaving = {storage_of(t) for node in outside for t in tensors_in(node.meta.get("example_value"))}
        written = written_storages(self.facts[node] for node in nodes)
        unwritten: set[int] = set()
        for node in filter(makes_empty, nodes):
            if self.fills.needs(node, segment=nodes, leaving=leaving):
                writer.zero_fill(node)
            else:
                unwritten |= (self.facts[node].storages & leaving) - written
        return tuple(sorted(self._memory.setdefault(storage, len(self._memory)) for storage in unwritten))

    def _segment(
        self,
        index: int,
        kind: str,
        nodes: list[fx.Node],
        writer: SegmentWriter,
        outputs: list[fx.Node],
        function: Any,
        key: str,
        unwritten: tuple[int, ...],
    ) -> Segment:
        written = written_storages(self.facts[node] for node in nodes)
        inputs = tuple(writer.input_values())
        memories = {self._memory[storage] for storage in written if storage in self._memory}
        counted = [node for node in nodes if not is_tuple_item(node)]
        told = [node for node in counted if self.verdicts[node].code]
        reasons = tuple(self._reason(node) for node in told)
        return Segment(
            index, kind, function, key, inputs, tuple(self._value(node) for node in outputs),
            tuple(sorted(memories)), len(counted), tuple(map(target_name, counted)), _module_path(nodes),
            reasons,
            views_only=kind == "graph" and all(self.facts[node].is_view for node in nodes),
            op_call=writer.op_call() if kind == "boundary" else None,
            captured_ops=sum(kind == "graph" and self.facts[node].boundary is not None for node in nodes),
            unwritten=unwritten, own_function=function,
            keeps_own=next((self.keeps_own[node] for node in nodes if node in self.keeps_own), ""),
        )  # fmt: skip

    def _reason(self, node: fx.Node) -> EagerReason:
        verdict = self.verdicts[node]
        return EagerReason(
            verdict.code, target_name(node), verdict.detail, module_path(node), source_line(node)
        )

    def _plan(self, segments: tuple[Segment, ...]) -> SegmentPlan:
        result_values = []
        for item in self.graph.output_node().args[0]:  # type: ignore[union-attr]
            result_values.append(self._result_value(item))
        guards = internals.guard_expressions(self.trace.shape_env)
        others = sorted(
            {
                s
                for guard in guards
                for s in guard.free_symbols
                if s != self.token.symbol and not internals.is_unbacked(s)
            },
            key=str,
        )
        known = [symbol for symbol in others if self._symbol_source_for(symbol) is not None]
        usable = [g for g in guards if g.free_symbols <= {self.token.symbol, *known}]
        check = internals.compile_expressions(usable, [self.token.symbol, *known])
        symbols = tuple(self.symbol_value(symbol) for symbol in known)
        given = [source for source in result_values if isinstance(source, int)]
        values = with_free_strides(self.values, segments, given)
        return SegmentPlan(
            self._token_dim(), values, segments, self.trace.result, self.trace.result_leaves,
            tuple(result_values), holds(check), symbols, self.trace.state_facts,
            self._written_leaves(), self.num_dead_ops,
            FillReport(self.fills.num_needless, tuple(self.fills.kept)),
            step_memory=self._step_memory(), max_rows=self.classifier.rows.largest,
            metadata_leaves=frozenset(
                placeholder.leaf
                for placeholder in self.trace.placeholders
                if "is_metadata" in placeholder.node.meta
            ),
        )  # fmt: skip

    def _step_memory(self) -> frozenset[int]:
        """Memory that captured forms write, and no other op."""
        written: dict[bool, set[int]] = {True: set(), False: set()}
        for node, fact in self.facts.items():
            is_form = "is_captured_form" in node.meta
            written[is_form] |= written_storages([fact])
        return frozenset(self._memory[s] for s in written[True] - written[False] if s in self._memory)

    def _result_value(self, item: Any) -> Any:
        if isinstance(item, fx.Node):
            value = item.meta.get("example_value")
            verdict = self.verdicts.get(item)
            if isinstance(value, torch.Tensor) or (verdict is not None and verdict.kind == "eager"):
                return self._value(item)
            expr = internals.expression(value, self.trace.shape_env)
        else:
            expr = internals.expression(item, self.trace.shape_env)
        others = sorted(expr.free_symbols - {self.token.symbol}, key=str)  # type: ignore[union-attr]
        compute = internals.compile_expressions([expr], [self.token.symbol, *others])  # type: ignore[list-item]
        indices = tuple(self.symbol_value(symbol) for symbol in others)
        return ComputedNumber(compute, indices)

    def _token_dim(self) -> TokenDim:
        leaf, dim = self.token.anchor
        rules = []
        for carried in self.token.inputs:
            dims = {
                d: _single(internals.compile_expressions([expr], [self.token.symbol]))
                for d, expr in carried.dims.items()
            }
            anchor = next((d for d, expr in carried.dims.items() if expr == self.token.symbol), -1)
            rules.append(InputRule(carried.leaf, dims, anchor))
        return TokenDim(str(self.token.symbol), leaf, dim, tuple(rules))

    def _written_leaves(self) -> tuple[int, ...]:
        written = written_storages(self.facts.values())
        found = []
        for placeholder in self.trace.placeholders:
            held = {storage_of(t) for t in tensors_in(placeholder.node.meta.get("example_value"))}
            if placeholder.kind == "input" and held & written:
                found.append(placeholder.leaf)
        return tuple(found)


def _single(function: Any) -> Any:
    return lambda rows: function(rows)[0]


def module_path(node: fx.Node) -> str:
    """The innermost module that called this op, as a user writes it: ``layers.0.self_attn``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = path.replace("L['model']", "").replace("['", ".").replace("']", "")
    path = path.replace("._modules", "")
    # A forward wrapped by a bound method is reached through a private attribute of the same module.
    return re.sub(r"\._\w+(\.\w+)*?\.__self__", "", path).strip(".")


def _module_path(nodes: Sequence[fx.Node]) -> str:
    paths = [path for node in nodes if (path := module_path(node))]
    if not paths:
        return ""
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]} .. {paths[-1]}"


def source_line(node: fx.Node) -> str:
    """The user's line: ``modeling.py:42, in forward: x = x[-1:]``."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    places = [index for index, line in enumerate(lines) if line.strip().startswith("File ")]
    if not places:
        return ""
    index = places[-1]
    where = lines[index].strip().removeprefix("File ")
    code = lines[index + 1].strip() if index + 1 < len(lines) else ""
    return f"{where}: {code}" if code else where
