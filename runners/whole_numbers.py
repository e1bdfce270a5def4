"""Reads ints as callers have them: Python's, NumPy's and those of tensors, alone and in lists and arrays."""

import operator
from typing import Any


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


def listed(values: Any) -> list[Any] | None:
    """Returns the items of a list, tuple or range, or of an array or tensor of one dim; None for all else."""
    if isinstance(values, (list, tuple, range)):
        return list(values)
    if getattr(values, "ndim", 1) == 1 and hasattr(values, "tolist"):
        return list(values.tolist())
    return None
