"""Compares a value of now with the one that was seen.

No comparison here raises, and none asks an object of the user's: a tuple of tensors has no truth, and an
`__eq__` may do anything.
"""

import sys
from collections.abc import Mapping, Set
from typing import Any

import torch

_BY_REPR = (float, complex)  # which tells 0.0 from -0.0, and takes one nan for another
_BY_EQUALITY = (bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_same_value(now: Any, seen: Any) -> bool:
    """Whether both are one object or equal plain values of one type; tuples, slices, frozen sets by item."""
    if now is seen:
        return True
    try:
        return type(now) is type(seen) and _is_equal(now, seen)
    except Exception:  # of a subclass with ideas of its own
        return False


def _is_equal(now: Any, seen: Any) -> bool:
    if getattr(seen, "__dict__", None) is not None:  # it may hold more than its value
        return False
    if isinstance(seen, tuple):
        same_length = tuple.__len__(now) == tuple.__len__(seen)
        return same_length and all(map(is_same_value, tuple.__iter__(now), tuple.__iter__(seen)))
    if isinstance(seen, (slice, range)):
        return is_same_value((now.start, now.stop, now.step), (seen.start, seen.stop, seen.step))
    if isinstance(seen, frozenset):
        return set(map(_told_apart, now)) == set(map(_told_apart, seen))
    if isinstance(seen, _BY_REPR) or _is_numpy_scalar(seen):
        return repr(now) == repr(seen)
    return isinstance(seen, _BY_EQUALITY) and bool(now == seen)


def _told_apart(item: Any) -> Any:
    is_plain = isinstance(item, (*_BY_REPR, *_BY_EQUALITY)) and getattr(item, "__dict__", None) is None
    return (type(item), repr(item)) if is_plain else id(item)


def _is_numpy_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.void)


def table_content(table: Any) -> Any:
    """Takes what is compared of a container: a set's items, a mapping's keys in order, or a length."""
    if isinstance(table, Set):
        return frozenset(table)
    return tuple(table) if isinstance(table, Mapping) else len(table)


def content_like(content: Any, table: Any) -> Any:
    """Takes the same of a table as was recorded in `content`, its length or more."""
    return len(table) if isinstance(content, int) else table_content(table)


def has_content(table: Any, content: Any) -> bool:
    """Whether a container holds what was recorded of it."""
    try:
        return is_same_value(content_like(content, table), content)
    except Exception:  # a container of the user's
        return False
