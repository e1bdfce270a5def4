"""Writes one segment as a graph of its own, and compiles it to `segment(num_rows, *inputs) -> tuple`.

The function makes sizes, views of outside tensors and autocast regions itself, so it computes the same for
any row count and caller. Nodes get canonical names: equal segments have equal source.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

import boundary_ops
from piecewise import torch_api
from piecewise.cut.context import CutContext
from piecewise.ir.aten import function_of
from piecewise.ir.graph_key import code_key
from piecewise.ir.nodes import value_of
from piecewise.ir.plan import BoundaryCall, InputAt
from piecewise.ir.sizes import size_node
from piecewise.ir.tensors import bound_arguments


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
        expr: Any = self.context.expression(value)
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
        twins: dict[Any, Any] = {
            torch.empty: torch.zeros,
            torch.empty_like: torch.zeros_like,
            "new_empty": "new_zeros",
        }
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
        while arguments and _is_default(schema[len(arguments) - 1], arguments[-1]):
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
                function = _below_torch_function(function)
            taken = {known for _, known in functions.values()}
            name = code_key(self.kind, code.src, code.globals, self.modules, taken)
            functions[key] = function, name
        return functions[key]


def _below_torch_function(function: Callable[..., tuple]) -> Callable[..., tuple]:
    """Runs ops below tensors' `__torch_function__`, where the trace found them."""

    def run(*arguments: Any) -> tuple:
        with torch_api.below_torch_function():
            return function(*arguments)

    return run


def _is_default(argument: Any, value: Any) -> bool:
    default = argument.default_value
    has_default: bool = argument.has_default_value()
    return has_default and type(value) is type(default) and bool(value == default)
