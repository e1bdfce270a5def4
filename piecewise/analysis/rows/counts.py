"""Evaluates sizes at all token counts for which a trace is valid, as vectors.

Comparing these vectors is exact, while sympy may not simplify `m // (m // 8)` or `Min(4, n)`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray

from piecewise import torch_api

Counts = NDArray[np.int64]


class Size:
    """Holds a size at each token count; `constant` where it is one number. Equal sizes are one object."""

    __slots__ = ("constant", "values")

    def __init__(self, values: Counts) -> None:
        self.values = values
        first = int(values[0])
        self.constant = first if bool((values == first).all()) else None

    @property
    def unit(self) -> int:
        """Returns the largest number that divides the size at every count: k for n·k."""
        return max(int(np.gcd.reduce(self.values)), 1)

    @property
    def falls(self) -> bool:
        """Whether the size is smaller at some larger count."""
        return self.constant is None and bool((np.diff(self.values) < 0).any())

    def __repr__(self) -> str:
        return str(self.constant) if self.constant is not None else f"{self.values[:4].tolist()}.."


class KnownSizes:
    """Holds the sizes of one trace at its valid token counts, which are ascending and at least one."""

    def __init__(self, counts: Counts, symbol: sympy.Symbol, shape_env: torch_api.ShapeEnv | None) -> None:
        self.counts, self._symbol, self._shape_env = counts, symbol, shape_env
        self._by_expression: dict[Any, Size | None] = {}
        self._by_values: dict[bytes, Size] = {}
        self._products: dict[tuple[Size, Size], Size] = {}
        self._settled: dict[Any, bool] = {}

    def of(self, size: Any) -> Size | None:
        """Returns the size of an int, symbolic int or expression; None where it depends on another symbol."""
        key = size if isinstance(size, (int, sympy.Basic)) else size.node.expr
        if key not in self._by_expression:
            expr = sympy.Integer(key) if isinstance(key, int) else self._simplified(key)
            is_known = expr.free_symbols <= {self._symbol}
            values = values_at(expr, self._symbol, self.counts).astype(np.int64) if is_known else None
            self._by_expression[key] = self.interned(values) if values is not None else None
        return self._by_expression[key]

    def _simplified(self, expr: sympy.Basic) -> Any:
        return self._shape_env.simplify(expr) if self._shape_env is not None else expr  # type: ignore[arg-type]

    def number(self, value: Any) -> float | bool | None:
        """Returns the value of a symbolic float or bool; None where it is not the same at all counts."""
        found = self._simplified(value.node.expr)
        if found.free_symbols:
            return None
        return bool(found) if isinstance(value, torch.SymBool) else float(found)

    def is_settled(self, asked: sympy.Basic) -> bool:
        """Whether a condition has one answer at all counts of two or more: torch specialises 0 and 1."""
        if asked not in self._settled:
            expr = self._simplified(asked)
            self._settled[asked] = not expr.free_symbols
            if not isinstance(expr, sympy.Expr) and expr.free_symbols == {self._symbol}:
                values = values_at(expr, self._symbol, self.counts[self.counts > 1])
                self._settled[asked] = bool((values == values[:1]).all())
        return self._settled[asked]

    def constant(self, number: int) -> Size:
        found = self.of(number)
        assert found is not None
        return found

    def interned(self, values: Counts) -> Size:
        key = values.tobytes()
        if key not in self._by_values:
            self._by_values[key] = Size(values)
        return self._by_values[key]

    def product(self, left: Size, right: Size) -> Size:
        if left.constant == 1 or right.constant == 1:
            return left if right.constant == 1 else right
        if (left, right) not in self._products:
            self._products[left, right] = self.interned(left.values * right.values)
        return self._products[left, right]

    def quotient(self, size: Size, divisor: Size) -> Size | None:
        """Returns `size` divided by `divisor`; None where a remainder is left at some count."""
        if divisor.constant == 1:
            return size
        if size is divisor:
            return self.constant(1)
        if not divisor.values.all() or (size.values % divisor.values).any():
            return None
        return self.interned(size.values // divisor.values)


def valid_counts(shape_env: torch_api.ShapeEnv | None, symbol: sympy.Symbol, largest: int) -> Counts:
    """Returns the token counts up to `largest` for which the guards on the count alone hold."""
    counts = np.arange(1, largest + 1, dtype=np.int64)
    valid = np.ones(len(counts), dtype=bool)
    fixed = shape_env.simplify(symbol) if shape_env is not None else symbol
    if fixed.is_Integer:  # a fixed count makes every guard true
        valid = counts == int(fixed)
    for guard in torch_api.guard_expressions(shape_env):
        if guard.free_symbols == {symbol}:
            valid &= values_at(guard, symbol, counts).astype(bool)
    return counts[valid]


# Covers most expressions; `compile_expressions` takes long.
_DIRECT: dict[Any, Any] = {
    sympy.Add: lambda *parts: sum(parts), sympy.Mul: lambda *parts: math.prod(parts),
    sympy.Eq: np.equal, sympy.Ne: np.not_equal, sympy.Lt: np.less, sympy.Le: np.less_equal,
    sympy.Gt: np.greater, sympy.Ge: np.greater_equal,
}  # fmt: skip


def values_at(expr: sympy.Basic, symbol: sympy.Symbol, counts: Counts) -> NDArray[Any]:
    """Evaluates an expression at each count; a condition is false where it cannot be evaluated."""
    if (found := _direct(expr, symbol, counts)) is not None:
        return np.broadcast_to(found, counts.shape)
    function = torch_api.compile_expressions([expr], [symbol])
    try:
        with np.errstate(all="raise"):
            found = np.asarray(function(counts)[0])
        if found.dtype.kind in "bi":
            return np.broadcast_to(found, counts.shape)
    except (ArithmeticError, TypeError, ValueError):
        pass  # Python's conditions, minima and roots take one number at a time

    def value_at(count: int) -> int:
        try:
            return int(function(count)[0])
        except (ArithmeticError, ValueError):
            return 0

    return np.array([value_at(int(count)) for count in counts])


def _direct(expr: Any, symbol: sympy.Symbol, counts: Counts) -> Any:
    """Evaluates numbers, the symbol, and sums, products and comparisons of these; else returns None."""
    if expr == symbol:
        return counts
    if isinstance(expr, sympy.Integer):
        return np.int64(int(expr))
    if (operator := _DIRECT.get(type(expr))) is None:
        return None
    parts = [_direct(part, symbol, counts) for part in expr.args]
    return None if any(part is None for part in parts) else operator(*parts)
