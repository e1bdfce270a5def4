"""What a suspended signature keeps, and whether its traces still hold when graphs are wanted again.

A trace needs less than graphs do: the same kinds of tensors, tied and sharing memory as before, and the
Python state that it read. Nothing of the old weights is held meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from piecewise.ir.plan import SegmentPlan
from runners.state.state_check import StateRef


@dataclasses.dataclass(frozen=True, slots=True)
class Suspended:
    """What is to be captured again, and what must be found for that to need no trace.

    Attributes:
        buckets: largest first.
        places: of the model's tensors that the traces read; they are not held.
        fixed: those for which the traces hold step metadata, that knows a KV pool by its address.
        seen: what `kinds_of` those places were; None where the trace was out of date already.
    """

    buckets: tuple[int, ...]
    places: tuple[StateRef, ...]
    fixed: tuple[StateRef, ...]
    seen: tuple[Any, ...] | None

    @classmethod
    def of(
        cls,
        buckets: Iterable[int],
        plans: Iterable[SegmentPlan],
        fixed: Iterable[StateRef],
        *,
        is_valid: bool,
    ) -> Suspended:
        """The tensors of these plans as they are now."""
        states = [value.state for plan in plans for value in plan.values if value.state is not None]
        places = tuple({(id(state.owner), state.key): state for state in states}.values())
        fixed = tuple(fixed)
        return cls(tuple(buckets), places, fixed, kinds_of(places, fixed) if is_valid else None)

    def holds(self) -> bool:
        """Whether the model's tensors are of the kinds that the traces were made with."""
        return self.seen is not None and kinds_of(self.places, self.fixed) == self.seen


def kinds_of(places: Iterable[StateRef], fixed: Iterable[StateRef]) -> tuple[Any, ...]:
    """Each tensor's type, dtype, device and geometry, which ones are one tensor or share memory, and the
    addresses of those that are fixed."""
    found: list[Any] = []
    tensors: dict[int, int] = {}
    memories: dict[int, int] = {}
    for place in places:
        tensor = place.get()
        if not isinstance(tensor, torch.Tensor):
            found.append(None)
            continue
        memory = tensor.untyped_storage().data_ptr()
        same = tensors.setdefault(id(tensor), len(tensors)), memories.setdefault(memory, len(memories))
        geometry = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        found.append((type(tensor), tensor.dtype, tensor.device, geometry, same))
    pools = [place.get() for place in fixed]
    found += [pool.data_ptr() if isinstance(pool, torch.Tensor) else None for pool in pools]
    return tuple(found)
