"""Reads ints as callers have them: Python's, NumPy's and those of tensors, alone and in lists and arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from boundary_ops.errors import BoundaryOpError


def whole_number(value: Any) -> int | None:
    """Returns a value of any integer type as an int; None for all else: True, 8.0 and text are none."""
    if type(value) is int:
        return value
    is_flag = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if is_flag or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # the latter from a tensor without a value
        return None


def check_whole(
    value: object, refusal: type[BoundaryOpError], *, low: int = 1, high: int | None = None, **names: object
) -> int:
    """Returns the value as an int; raises the refusal unless it is one from `low` to `high`, inclusive."""
    number = whole_number(value)
    if number is None or number < low or (high is not None and number > high):
        raise refusal(got=repr(value), **names)  # type: ignore[arg-type]
    return number


def listed(values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the items; those of an array or tensor of one dim as Python's own."""
    is_array = getattr(values, "ndim", 0) == 1 and hasattr(values, "tolist")
    return tuple(values.tolist() if is_array else values)  # type: ignore[attr-defined]
