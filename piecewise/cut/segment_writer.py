"""Writes one segment as a graph of its own, and compiles it to `segment(num_rows, *inputs) -> tuple`.

The function makes sizes, views of outside tensors and autocast regions itself, so it computes the same for
any row count and caller. Nodes get canonical names: equal segments have equal source.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

import boundary_ops
from piecewise import torch_api
from piecewise.analysis.classify import Classifier, Verdict
from piecewise.ir.aten import function_of
from piecewise.ir.graph_key import code_key
from piecewise.ir.nodes import value_of
from piecewise.ir.plan import BoundaryCall, ComputedNumber, InputAt, PaddedRows, ValueSpec
from piecewise.ir.sizes import SizeFunctions, size_node
from piecewise.ir.tensors import bound_arguments, storage_of
from runners.state.state_check import StateRef


class CutContext:
    """Holds what is known of one classified trace during the cut: verdicts, and values by number."""

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier
        self.trace, self.facts, self.token = classifier.trace, classifier.facts, classifier.token
        self.graph = self.trace.graph.graph
        self.verdicts: dict[fx.Node, Verdict] = classifier.run()
        self.values: list[ValueSpec] = []
        self._index_of: dict[fx.Node | sympy.Symbol, int] = {}
        self._memory: dict[int, int] = {}
        self._placeholders = {placeholder.node: placeholder for placeholder in self.trace.placeholders}
        self._sizes = SizeFunctions(self.trace.shape_env, self.token.symbol)

    def is_eager(self, node: fx.Node) -> bool:
        return node in self.verdicts and self.verdicts[node].kind == "eager"

    def crosses(self, node: fx.Node) -> bool:
        """Whether the node's value can leave its segment: no size and no tuple."""
        value = value_of(node)
        is_tuple = isinstance(value, (tuple, list))
        return isinstance(value, torch.Tensor) or (self.is_eager(node) and not is_tuple)

    def memory_of(self, storage: int) -> int:
        """Returns the number of a memory, which all values in it share."""
        return self._memory.setdefault(storage, len(self._memory))

    def known_memories(self, storages: set[int]) -> set[int]:
        """Returns the numbers of the memories that hold a value."""
        return {self._memory[storage] for storage in storages if storage in self._memory}

    def value_of(self, node: fx.Node) -> int:
        if node not in self._index_of:
            self._index_of[node] = len(self.values)
            self.values.append(self._spec(node, len(self.values)))
        return self._index_of[node]

    def _spec(self, node: fx.Node, index: int) -> ValueSpec:
        fake, leaf, state = value_of(node), -1, None
        if node in self.verdicts:
            origin = self.verdicts[node].kind
        elif node.op == "get_attr":
            fake = getattr(self.trace.graph, str(node.target))
            origin, state = "state", StateRef({node.name: fake}, node.name, node.name)
        else:
            placeholder = self._placeholders[node]
            origin, leaf, state = placeholder.kind, placeholder.leaf, placeholder.state
        if not isinstance(fake, torch.Tensor):
            return ValueSpec(index, node.name, origin, leaf=leaf, state=state)
        sizes, strides = self._sizes.of(fake.shape), self._sizes.of(fake.stride())
        units = self.classifier.judge.sizes(fake.shape) or ()
        return ValueSpec(
            index, node.name, origin, fake.dtype, fake.device, sizes, strides, self._sizes.token_dims(fake),
            self.memory_of(storage_of(fake)), leaf=leaf, state=state,
            offset=self._sizes.of((fake.storage_offset(),)), geometry=self._sizes.text(fake),
            units=tuple(size.unit if size.constant is None else 1 for size in units),
            padded=self._padded(node) if origin == "graph" else PaddedRows(),
        )  # fmt: skip

    def _padded(self, node: fx.Node) -> PaddedRows:
        (rows,) = self.classifier.rows.rows_of(node)
        counts = self.classifier.judge.known.counts

        def bounds(num_rows: int) -> tuple[int | None, int | None]:
            at = int(counts.searchsorted(num_rows))
            low, high = (int(side.values[at]) if side is not None else None for side in rows.bounds[:2])
            return low, high

        return PaddedRows(rows.is_real, bounds, self.classifier.rows.is_prefix(node))

    def value_of_symbol(self, symbol: sympy.Symbol) -> int:
        """Returns the number of a symbol other than the token count: an int input, or a size of an input."""
        if symbol not in self._index_of:
            source = self.source_of(symbol)
            assert source is not None, f"symbol {symbol} belongs to no input"
            leaf, dim = source
            self._index_of[symbol] = len(self.values)
            self.values.append(ValueSpec(len(self.values), str(symbol), "symbol", leaf=leaf, dim=dim))
        return self._index_of[symbol]

    def source_of(self, symbol: sympy.Symbol) -> tuple[int, int] | None:
        """Finds (leaf, dim) of the input that gives the symbol its value; dim −1 for an int."""
        sizes = torch_api.symbolic_sizes(self.trace.shape_env)
        return next((place for place, expr in sizes.items() if expr == symbol), None)

    def result_value(self, item: Any) -> int | ComputedNumber:
        """Returns an output of the graph as the number of a value, or as a number computed from sizes."""
        value = value_of(item) if isinstance(item, fx.Node) else item
        if isinstance(item, fx.Node) and (isinstance(value, torch.Tensor) or self.is_eager(item)):
            return self.value_of(item)
        expr: Any = torch_api.expression(value, self.trace.shape_env)
        others = sorted(expr.free_symbols - {self.token.symbol}, key=str)
        compute = torch_api.compile_expressions([expr], [self.token.symbol, *others])
        return ComputedNumber(compute, tuple(map(self.value_of_symbol, others)))


class SegmentWriter:
    """Copies `nodes` of a graph into a new graph, with placeholders for values from outside.

    Attributes:
        inputs: placeholder → number of its value.
        input_nodes: the original nodes of the inputs, without symbols.
        copies: node → its copy in the new graph.
        modules: targets of the new graph's get_attr nodes.
    """

    def __init__(self, context: CutContext, kind: str, nodes: Sequence[fx.Node]) -> None:
        self.context, self.kind, self.nodes = context, kind, tuple(nodes)
        self.graph = fx.Graph()
        self.rows = self._last_placeholder = self.graph.placeholder("num_rows")
        self.input_nodes: list[fx.Node] = []
        self.copies: dict[fx.Node, Any] = {}
        self.inputs: dict[fx.Node, int] = {}
        self.modules: dict[str, Any] = {}
        self._scalars: dict[Any, Any] = {}
        self._symbols: dict[sympy.Symbol, fx.Node] = {context.token.symbol: self.rows}

    def write(self) -> SegmentWriter:
        """Copies the nodes; outputs are added by `finish`."""
        for region, nodes in itertools.groupby(self.nodes, lambda node: node.meta.get("autocast", ())):
            entered = [self.graph.call_function(torch_api.enter_autocast, arguments) for arguments in region]
            for node in nodes:
                self._copy(node)
            for opened in reversed(entered):
                self.graph.call_function(torch_api.exit_autocast, (opened,))
        return self

    def _copy(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._argument)
        self.copies[node] = self.graph.create_node(node.op, node.target, args, kwargs)

    def _argument(self, node: Any) -> Any:
        """Maps a leaf of the arguments to a copy, a placeholder, a number, or itself."""
        if not isinstance(node, fx.Node):
            return self._scalar(node) if isinstance(node, torch_api.SYMBOLIC) else node
        if node in self.copies:
            return self.copies[node]
        value = value_of(node)
        if node.op == "get_attr":
            value = getattr(self.context.trace.graph, str(node.target))
            if not isinstance(value, torch.Tensor):
                self.modules[str(node.target)] = value
                self.copies[node] = self.graph.create_node("get_attr", str(node.target))
                return self.copies[node]
        if self.context.classifier.is_floating(node):
            base, chain = self.context.classifier.view_chain(node)
            self._argument(base)
            for view in chain:
                if view not in self.copies:
                    self._copy(view)
            return self.copies[node]
        if not isinstance(value, torch.Tensor) and not self.context.is_eager(node):
            return self._scalar(value)
        self.copies[node] = self._placeholder(self.context.value_of(node))
        self.input_nodes.append(node)
        return self.copies[node]

    def _placeholder(self, value: int) -> fx.Node:
        with self.graph.inserting_after(self._last_placeholder):
            self._last_placeholder = self.graph.placeholder(f"v{len(self.inputs)}")
        self.inputs[self._last_placeholder] = value
        return self._last_placeholder

    def _scalar(self, value: Any) -> Any:
        """Writes a number as ops on `num_rows`; a tuple of sizes as a tuple of such numbers."""
        if isinstance(value, (tuple, list)):
            return tuple(map(self._scalar, value))
        expr: Any = torch_api.expression(value, self.context.trace.shape_env)
        if expr is None or not expr.free_symbols:
            if isinstance(value, torch_api.SYMBOLIC):
                return int(value) if isinstance(value, torch.SymInt) else value.node.pytype(value)
            return value
        if expr not in self._scalars:
            symbols = sorted(expr.free_symbols, key=str)
            for symbol in symbols:
                if symbol not in self._symbols:
                    self._symbols[symbol] = self._placeholder(self.context.value_of_symbol(symbol))
            self._scalars[expr] = size_node(self.graph, expr, {each: self._symbols[each] for each in symbols})
        return self._scalars[expr]

    def zero_fill(self, node: fx.Node) -> None:
        """Fills the memory of a copied `empty*` node with zeros."""
        copy = self.copies[node]
        twins: Any = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, "new_empty": "new_zeros"}
        if copy.target in twins:  # once functional, a fill of its own would be two kernels
            copy.target = twins[copy.target]
            return
        with self.graph.inserting_after(copy):
            self.graph.call_method("zero_", (copy,))

    def op_call(self) -> BoundaryCall | None:
        """Returns the segment's one call of a boundary op; None if the segment computes more."""
        op = boundary_ops.lookup(self.nodes[0].target)
        inside = [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]
        call = self.copies[self.nodes[0]]
        if op is None or inside != [call]:
            return None
        schema = op.overload._schema.arguments
        given = bound_arguments(op.overload, call.args, call.kwargs)
        places: dict[Any, Any] = {node: InputAt(at) for at, node in enumerate(self.inputs)}
        arguments = []
        for argument in schema:
            value = given[argument.name]
            if argument.kwarg_only or isinstance(value, (list, tuple)) or value is self.rows:
                return None
            arguments.append(places.get(value, value))
        # Drops trailing defaults as the dispatcher does, so that an implementation is called in one way.
        for argument, value in reversed(list(zip(schema, arguments, strict=True))):
            default = argument.default_value
            if not argument.has_default_value() or type(value) is not type(default) or value != default:
                break
            arguments.pop()
        return BoundaryCall(op.name, tuple(arguments))

    def finish(self, outputs: Sequence[fx.Node], functions: dict[Any, Any]) -> tuple[Any, str]:
        """Closes the graph and compiles it; equal sources share one function object through `functions`."""
        self.graph.output(tuple(self.copies[node] for node in outputs))
        code = self.graph.python_code("self")
        named = [*sorted(code.globals.items()), *sorted(self.modules.items())]
        key = code.src, tuple((name, id(value)) for name, value in named)
        if key not in functions:
            function = function_of(self.graph, self.modules)
            if any("below_torch_function" in node.meta for node in self.nodes):
                function = functools.partial(_below_torch_function, function)
            taken = {known for _, known in functions.values()}
            name = code_key(self.kind, code.src, code.globals, self.modules, taken)
            functions[key] = function, name
        return functions[key]


def _below_torch_function(function: Callable[..., tuple], *arguments: Any) -> tuple:
    """Runs ops below tensors' `__torch_function__`, where the trace found them."""
    with torch_api.below_torch_function():
        return function(*arguments)
