"""Finds and replaces tensors inside values."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Returns the tensors of a value, in order; tuples and lists are looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replaces each tensor in a value's lists, tuples and dicts by `function` of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, function) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items) if type(value) in (tuple, list) else tuple(items)
    return value
