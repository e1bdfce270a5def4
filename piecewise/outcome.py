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
        leaves = enumerate(zip(self.leaves, found.leaves, strict=True))
        pairs: list[tuple[str, Any, Any, Any]]
        pairs = [(f"result leaf {index}", left, right, None) for index, (left, right) in leaves]
        kept = before if before is not None else {}
        pairs += [(name, t, found.watched[name], kept.get(name)) for name, t in self.watched.items()]
        wrong = []
        for name, left, right, earlier in pairs:
            if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
                difference = compare_tensors(left, right, tolerance, before=earlier)
            elif left == right or (left != left and right != right):
                difference = None
            else:
                detail = f"{right!r} where eager has {left!r}"
                difference = TensorDifference(0, (), 0, (), float("inf"), 0.0, detail)
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
