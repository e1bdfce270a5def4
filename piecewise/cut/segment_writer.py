"""Writes one segment as a graph of its own, and turns it into a plain function.

The function is `segment(num_rows, *inputs) -> tuple`. It makes sizes, views of outside tensors and autocast
regions for itself, so that it computes the same for any row count, under any caller. Nodes get canonical
names: equal segments have equal source.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

import boundary_ops
from piecewise import torch_api
from piecewise.ir.aten import function_of
from piecewise.ir.plan import InputAt, OpCall
from piecewise.ir.sizes import RowFormulas
from piecewise.ir.tensors import bound_arguments

if TYPE_CHECKING:
    from piecewise.cut.split import Splitter

# Tells programs apart that go by no name of their own.
_serial = itertools.count()


class SegmentWriter:
    """Copies `nodes` of the splitter's graph into a new graph, with what they need from outside as
    placeholders.

    Attributes:
        inputs: placeholder → index of the value that it stands for.
    """

    def __init__(self, splitter: Splitter, kind: str, nodes: Sequence[fx.Node]) -> None:
        self.splitter, self.kind, self.nodes = splitter, kind, tuple(nodes)
        self.graph = fx.Graph()
        self.rows = self.graph.placeholder("num_rows")
        self.input_nodes: list[fx.Node] = []
        self.copies: dict[fx.Node, Any] = {}
        self._scalars: dict[Any, Any] = {}
        self._symbols: dict[sympy.Symbol, fx.Node] = {splitter.token.symbol: self.rows}
        self.inputs: dict[fx.Node, int] = {}
        self.modules: dict[str, Any] = {}
        self._last_placeholder = self.rows

    def write(self) -> SegmentWriter:
        """Copies the nodes; outputs are added by `finish`."""
        for region, nodes in itertools.groupby(self.nodes, lambda node: node.meta.get("autocast", ())):
            entered = [self.graph.call_function(_enter_autocast, arguments) for arguments in region]
            for node in nodes:
                self._copy(node)
            for opened in reversed(entered):
                self.graph.call_function(_exit_autocast, (opened,))
        return self

    def _copy(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._argument)
        self.copies[node] = self.graph.create_node(node.op, node.target, args, kwargs)

    def _argument(self, node: Any) -> Any:
        """What a leaf of the arguments is inside: a copied node, a placeholder, a number, or itself."""
        if not isinstance(node, fx.Node):
            return self._scalar(node) if isinstance(node, torch_api.SYMBOLIC) else node
        if node in self.copies:
            return self.copies[node]
        value = node.meta.get("example_value")
        if node.op == "get_attr":
            value = getattr(self.splitter.trace.graph, str(node.target))
            if not isinstance(value, torch.Tensor):
                self.modules[str(node.target)] = value
                self.copies[node] = self.graph.create_node("get_attr", str(node.target))
                return self.copies[node]
        if self.splitter.classifier.is_floating(node):
            base, chain = self.splitter.classifier.view_chain(node)
            self._argument(base)
            for view in chain:
                if view not in self.copies:
                    self._copy(view)
            return self.copies[node]
        if not isinstance(value, torch.Tensor) and not self.splitter.is_eager(node):
            return self._scalar(value)
        self.copies[node] = self._placeholder(self.splitter._value(node))
        self.input_nodes.append(node)
        return self.copies[node]

    def _placeholder(self, value: int) -> fx.Node:
        with self.graph.inserting_after(self._last_placeholder):
            placeholder = self.graph.placeholder(f"v{len(self.inputs)}")
        self._last_placeholder = placeholder
        self.inputs[placeholder] = value
        return placeholder

    def _scalar(self, value: Any) -> Any:
        """The number as ops on `num_rows`; a tuple of sizes as a tuple of such numbers."""
        if isinstance(value, (tuple, list)):
            return tuple(map(self._scalar, value))
        expr = torch_api.expression(value, self.splitter.trace.shape_env)
        if expr is None or not expr.free_symbols:
            if isinstance(value, torch_api.SYMBOLIC):
                return int(value) if isinstance(value, torch.SymInt) else value.node.pytype(value)
            return value
        if expr not in self._scalars:
            proxies = {}
            for symbol in sorted(expr.free_symbols, key=str):
                if symbol not in self._symbols:
                    self._symbols[symbol] = self._placeholder(self.splitter.symbol_value(symbol))  # type: ignore[arg-type, index]
                proxies[symbol] = fx.Proxy(self._symbols[symbol], fx.proxy.GraphAppendingTracer(self.graph))  # type: ignore[index]
            proxy = torch_api.sympy_interp(RowFormulas, proxies, expr)
            self._scalars[expr] = proxy.node if isinstance(proxy, fx.Proxy) else proxy
        return self._scalars[expr]

    def zero_fill(self, node: fx.Node) -> None:
        """Makes memory that the copied `empty*` node allocates start as zeros."""
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

    def op_call(self) -> OpCall | None:
        """The one call of a boundary op that the segment is; None where it computes anything beside."""
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
        # As the dispatcher does, so that an implementation is called in one way.
        while arguments and _is_default(schema[len(arguments) - 1], arguments[-1]):
            arguments.pop()
        return OpCall(op.name, tuple(arguments))

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
            functions[key] = function, self._stable_key(code, functions)
        return functions[key]

    def _stable_key(self, code: Any, functions: Mapping[Any, Any]) -> str:
        """A name of the program that no other function of this cut has, and the same in each process where
        the program is made of torch's functions alone. What others do is known by no name: theirs is new."""
        foreign = [f"{name} = {_named(value)}" for name, value in sorted(code.globals.items())]
        foreign += [
            f"self.{name} = {getattr(module, 'code', type(module).__qualname__)}"
            for name, module in sorted(self.modules.items())
        ]
        digest = hashlib.sha256("\n".join([code.src, *foreign]).encode()).hexdigest()[:24]
        key = f"{self.kind}-{digest}"
        # Two objects may go by one name; what they do is then not known to be the same.
        is_taken = any(known == key for _, known in functions.values())
        is_known = not self.modules and all(map(_is_torchs, code.globals.values()))
        return key if is_known and not is_taken else f"{key}-{next(_serial)}"


def _below_torch_function(function: Callable[..., tuple]) -> Callable[..., tuple]:
    """The function of ops that a trace has found below the `__torch_function__` of the model's tensors."""

    def run(*arguments: Any) -> tuple:
        with torch_api.below_torch_function():
            return function(*arguments)

    return run


def _named(value: Any) -> str:
    """A global of generated code, without its address."""
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{getattr(value, '__module__', '')}.{name}"
    return re.sub(r" at 0x\w+", "", repr(value))


def _is_torchs(value: Any) -> bool:
    """Whether a global of generated code is torch's, or Python's own, and so the same by its name."""
    if isinstance(value, (int, float, complex, str, torch.dtype, torch.device, type(None))):
        return True
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] in ("torch", "builtins", "_operator", "math")


def _is_default(argument: Any, value: Any) -> bool:
    default = argument.default_value
    has_default: bool = argument.has_default_value()
    return has_default and type(value) is type(default) and bool(value == default)
