"""Writes shapes and strides as plain functions of the row count, and as ops of a graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from piecewise import torch_api

_ROWS = sympy.Symbol("n")


class SizeFunctions:
    """Compiles the size expressions of one trace, each once."""

    def __init__(self, shape_env: torch_api.ShapeEnv | None, symbol: sympy.Symbol) -> None:
        self._shape_env, self._symbol = shape_env, symbol
        self._known: dict[Any, Callable[[int], tuple[int, ...]] | None] = {}

    def exprs(self, sizes: Sequence[Any]) -> tuple[sympy.Expr, ...]:
        return tuple(torch_api.expression(size, self._shape_env) for size in sizes)  # type: ignore[misc]

    def of(self, sizes: Sequence[Any]) -> Callable[[int], tuple[int, ...]] | None:
        """Compiles rows → sizes; None if a symbol other than the token count occurs."""
        exprs = self.exprs(sizes)
        if exprs not in self._known:
            others = {symbol for expr in exprs for symbol in expr.free_symbols} - {self._symbol}
            self._known[exprs] = None if others else torch_api.compile_expressions(exprs, [self._symbol])
        return self._known[exprs]

    def text(self, tensor: torch.Tensor) -> str:
        """Writes sizes, strides and offset as text, with `n` for the row count."""
        parts = (tensor.shape, tensor.stride(), (tensor.storage_offset(),))
        shown = [[str(expr.xreplace({self._symbol: _ROWS})) for expr in self.exprs(part)] for part in parts]
        return " ".join(f"[{', '.join(part)}]" for part in shown)

    def token_dims(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Finds the dims whose size depends on the token count, ascending."""
        exprs = enumerate(self.exprs(tensor.shape))
        return tuple(dim for dim, expr in exprs if self._symbol in expr.free_symbols)


def holds(conditions: Callable[..., tuple]) -> Callable[..., bool]:
    """Makes a check that all conditions hold; one that cannot be evaluated (`n % (n // 4)`) does not."""

    def check(*sizes: int) -> bool:
        try:
            return all(conditions(*sizes))
        except (ZeroDivisionError, ValueError, OverflowError):
            return False

    return check


def size_node(graph: fx.Graph, expr: sympy.Expr, nodes: dict[sympy.Symbol, fx.Node]) -> Any:
    """Writes an expression as graph ops on its symbols' nodes; as a number if it has no symbols."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in nodes.items()}
    found = torch_api.sympy_interp(_RowFormulas, proxies, expr)  # type: ignore[arg-type]
    return found.node if isinstance(found, fx.Proxy) else found


def _recorded(function: Callable[..., Any], num_arguments: int = 1) -> Any:
    """Calls `function` on its first arguments (the rest is a dtype); records one call if one is a proxy."""

    def apply(*arguments: Any) -> Any:
        taken = arguments[:num_arguments]
        proxy = next((item for item in taken if isinstance(item, fx.Proxy)), None)
        if proxy is None:
            return function(*taken)
        return proxy.tracer.create_proxy("call_function", function, taken, {})

    return staticmethod(apply)


class _RowFormulas(torch_api.PythonReferenceAnalysis):
    """Interprets expressions over numbers or FX proxies; torch's reference supports few ops on proxies."""

    truediv = int_truediv = _recorded(operator.truediv, 2)
    floor_to_int, ceil_to_int = _recorded(math.floor), _recorded(math.ceil)
    trunc_to_int, round_to_int = _recorded(math.trunc), _recorded(round)
    round_decimal = _recorded(round, 2)
    exp, log, log2, sqrt = map(_recorded, (math.exp, math.log, math.log2, math.sqrt))
