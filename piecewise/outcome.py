"""What one run of a call left behind, and in what two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from piecewise.differences import TensorDifference, Tolerance, compare_tensors
from piecewise.structure import Structure, flatten_structure


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result's structure and leaves, and the watched tensors by name: copies of all."""

    structure: Structure
    leaves: list[Any]
    watched: dict[str, torch.Tensor]

    @classmethod
    def of(cls, call: Callable[[], Any], watched: Mapping[str, torch.Tensor]) -> Outcome:
        """Of `call()`. Copies, since the next run may overwrite what a result is a view of."""
        structure, leaves = flatten_structure(call())
        leaves = [stored(x.detach()) if isinstance(x, torch.Tensor) else x for x in leaves]
        return cls(structure, leaves, {name: stored(tensor) for name, tensor in watched.items()})

    def differing(
        self, found: Outcome, tolerance: Tolerance | None, *, before: Mapping[str, torch.Tensor] | None = None
    ) -> list[tuple[str, TensorDifference]]:
        """What `found`, of equal structure, differs in, by name, results first.

        Args:
            tolerance: None for equal bits.
            before: the watched tensors before the call.
        """
        wrong = []
        for index, (left, right) in enumerate(zip(self.leaves, found.leaves, strict=True)):
            if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
                difference = compare_tensors(left, right, tolerance)
            elif left == right or (left != left and right != right):
                difference = None
            else:
                detail = f"{right!r} where eager has {left!r}"
                difference = TensorDifference(size=float("inf"), allowed=0.0, detail=detail)
            if difference is not None:
                wrong.append((f"result leaf {index}", difference))
        for name, tensor in self.watched.items():
            kept = before[name] if before is not None else None
            difference = compare_tensors(tensor, found.watched[name], tolerance, before=kept)
            if difference is not None:
                wrong.append((name, difference))
        return wrong


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; on the host where the device has too little room left for four of it."""
    if tensor.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(tensor.device)
        if 4 * tensor.numel() * tensor.element_size() > free:
            return tensor.cpu()
    return tensor.clone()


def has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same; a NaN is never."""
    right = right.to(left.device)
    if not torch.equal(left, right):
        return False
    return not left.dtype.is_floating_point or torch.equal(left.signbit(), right.signbit())
