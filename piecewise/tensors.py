"""Tensors inside of values, and the memory behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from runners.readbacks import tensors_in

__all__ = ["bound_arguments", "map_tensors", "storage_of", "tensors_in", "written_arguments"]


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a (fake) tensor."""
    return tensor.untyped_storage()._cdata


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with each tensor in its lists, tuples and dicts replaced by `function` of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, function) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items) if type(value) in (tuple, list) else tuple(items)
    return value


def bound_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Argument name → what a call of the op passes, or the default, which is None where there is none."""
    schema = op._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema}
    return (
        bound | {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    )


def written_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a call of the op passes for the arguments that it writes."""
    bound = bound_arguments(op, args, kwargs)
    written = (a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [bound[name] for name in written]
