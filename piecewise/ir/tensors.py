"""Finds the tensors inside of values and the memory behind them, and binds an op's arguments by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from piecewise import torch_api
from runners.state.state_check import StateRef
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


_SOURCE = re.compile(r"___from_numpy\((.+)\)")


def array_source(source: str) -> str | None:
    """Returns the source of the array behind Dynamo's source of a tensor; None for other tensors."""
    found = _SOURCE.fullmatch(source)
    return found[1] if found else None


class ArrayPlace:
    """Holds the place of a NumPy array or scalar, which Dynamo treats as a tensor, and makes that tensor.

    The tensor shares the array's memory, so a graph reads the array's present contents. It stays one object
    while the array keeps its identity, memory and geometry; else the comparison of addresses finds a new one.
    """

    __slots__ = ("_place", "_seen", "_tensor", "_value")

    def __init__(self, place: StateRef) -> None:
        self._place = place
        self._value: Any = None
        self._seen: Any = None
        self._tensor: torch.Tensor | None = None

    def __getitem__(self, _: int) -> torch.Tensor | None:
        value = self._place.get()
        seen = None
        if isinstance(value, np.ndarray):  # it may get another shape, dtype or memory in place
            about = value.__array_interface__
            seen = about["data"], about["strides"], about["shape"], about["typestr"]
        if value is not self._value or seen != self._seen:
            is_numpys = isinstance(value, (np.ndarray, np.generic))
            self._tensor = torch.as_tensor(value) if is_numpys else None
            self._value, self._seen = value, seen
        return self._tensor
