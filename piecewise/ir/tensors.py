"""Finds the tensors inside of values and the memory behind them, and binds an op's arguments by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from piecewise import torch_api
from runners.tensors import map_tensors, tensors_in

__all__ = ["bound_arguments", "map_tensors", "storage_of", "tensors_in", "written_arguments"]


def storage_of(tensor: torch.Tensor) -> int:
    """Returns the identity of the memory behind a (fake) tensor."""
    return tensor.untyped_storage()._cdata


def bound_arguments(
    op: torch_api.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Maps argument names to what a call of the op passes, or the default, None where there is none."""
    bound = {argument.name: argument.default_value for argument in op._schema.arguments}
    return bound | dict(zip(bound, args, strict=False)) | dict(kwargs)


def written_arguments(op: torch_api.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns what a call of the op passes for the arguments that it writes."""
    bound = bound_arguments(op, args, kwargs)
    written = (a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [bound[name] for name in written]
