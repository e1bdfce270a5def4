"""Tells whether suspended traces still hold, without holding the model's tensors.

A trace needs less than graphs do: tensors of the same kinds, tied and sharing memory as before, and the
Python state that it read. So weights may move or be rebound without a new trace.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from boundary_ops.declare.registry import lookup
from boundary_ops.declare.rows import declared_rows
from piecewise import torch_api
from piecewise.ir.plan import SegmentPlan
from runners.state.state_check import StateRef


class TracedState:
    """Records the model's tensors that traces were made with, as they are now, without holding them.

    Args:
        fixed: places whose addresses must stay: step metadata in the traces knows a KV pool by its address.
        ops: the traced ops, which may be declared again.
    """

    def __init__(self, plans: Sequence[SegmentPlan], fixed: Iterable[StateRef], ops: Iterable[Any]) -> None:
        states = [value.state for plan in plans for value in plan.values if value.state is not None]
        # Forward may read no element of two tensors, yet test whether they are the same tensor.
        states += [state for plan in plans for state in plan.state_facts.tensor_places()]
        self._places = tuple({(id(state.owner), state.key): state for state in states}.values())
        self._fixed = tuple(fixed)
        found = (item for plan in plans for item, *_ in plan.state_facts.types)
        items = [item for item in found if not isinstance(item, torch.Tensor)]  # tensors must not be held
        self._attributes = [(each, getattr(each, "__dict__", None)) for each in items]
        self._declared = [(op, _declared_of(op)) for op in dict.fromkeys(ops)]
        self._seen = self._kinds()

    def holds(self) -> bool:
        """Whether the tensors are still of these kinds, and each object still has the same attribute dict, in
        which all else is compared."""
        are_kept = all(getattr(item, "__dict__", None) is known for item, known in self._attributes)
        are_declared = all(_declared_of(op) == declared for op, declared in self._declared)
        return are_kept and are_declared and self._kinds() == self._seen

    def _kinds(self) -> list[Any]:
        """Describes each tensor's type, dtype, device and geometry, which places share a tensor or memory,
        and the addresses of the fixed places."""
        found: list[Any] = []
        tensors: dict[int, int] = {}
        memories: dict[int, int] = {}
        for place in self._places:
            tensor = place.get()
            if not isinstance(tensor, torch.Tensor):
                found.append(None)
                continue
            # A wrapper subclass has no memory; the tensors inside it have places of their own.
            memory = 0 if torch_api.is_wrapper(tensor) else tensor.untyped_storage().data_ptr()
            same = tensors.setdefault(id(tensor), len(tensors)), memories.setdefault(memory, len(memories))
            geometry = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            bits = tensor.is_conj(), tensor.is_neg()
            found.append((type(tensor), tensor.dtype, tensor.device, geometry, bits, same))
        pools = [place.get() for place in self._fixed]
        return found + [pool.data_ptr() if isinstance(pool, torch.Tensor) else None for pool in pools]


def _declared_of(op: torch_api.OpOverload) -> tuple[Any, ...]:
    """Returns the declarations of an op that a cut depends on; a new implementation alone is no change."""
    boundary, rows = lookup(op), declared_rows(op)
    if boundary is None:
        return None, rows
    said = boundary.token_args, boundary.capture_safe, boundary.captured_form, boundary.any_strides
    return (*said, boundary.repeatable), rows
