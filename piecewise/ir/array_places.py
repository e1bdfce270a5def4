"""Finds the tensor over a NumPy array or scalar that forward reads, which Dynamo treats as a tensor.

The tensor shares the array's memory, so a graph reads the array's present contents. It stays one object while
the array keeps its identity, memory and geometry; else a new one, which the comparison of addresses finds.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from runners.state.state_check import StateRef

_SOURCE = re.compile(r"___from_numpy\((.+)\)")


def array_source(source: str) -> str | None:
    """Returns the source of the array behind Dynamo's source of a tensor; None for other tensors."""
    found = _SOURCE.fullmatch(source)
    return found[1] if found else None


class ArrayPlace:
    """Holds the place of an array or scalar, whose tensor a `StateRef` reads."""

    __slots__ = ("_place", "_seen", "_tensor", "_value")

    def __init__(self, place: StateRef) -> None:
        self._place = place
        self._value: Any = None
        self._seen: Any = None
        self._tensor: torch.Tensor | None = None

    @classmethod
    def ref(cls, place: StateRef) -> StateRef:
        """Makes the place of the tensor over the array at `place`."""
        return StateRef(cls(place), 0, place.path)

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


def is_of_array(place: StateRef) -> bool:
    """Whether a place holds the tensor over an array's memory, which must stay there."""
    return isinstance(place.owner, ArrayPlace)
