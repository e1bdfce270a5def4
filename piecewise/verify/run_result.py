"""Copies the result and state of a run, so that several runs can be compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from piecewise import torch_api
from piecewise.calls.structure import Structure, flatten_structure
from piecewise.verify.differences import TensorDifference, Tolerance, compare_values
from runners.engines import native_engine


@dataclass(frozen=True, slots=True)
class RunResult:
    """Holds copies of a result's structure and leaves, and of the watched tensors by name. A tensor subclass
    counts as its class, in the structure, and its inner tensors, as leaves."""

    structure: tuple[Structure, tuple[tuple[type, int], ...]]
    leaves: list[Any]
    watched: dict[str, torch.Tensor]

    @classmethod
    def of(cls, call: Callable[[], Any], watched: Mapping[str, torch.Tensor]) -> RunResult:
        """Runs `call()`, and copies its result, which the next run may overwrite."""
        structure, leaves = flatten_structure(call())
        # A subclass defines its own comparisons, so all of its inner tensors are compared.
        opened = [
            list(torch_api.plain_tensors(leaf)) if torch_api.is_wrapper(leaf) else [leaf] for leaf in leaves
        ]
        kinds = tuple(
            (type(leaf), len(parts))
            for leaf, parts in zip(leaves, opened, strict=True)
            if torch_api.is_wrapper(leaf)
        )
        parts = itertools.chain.from_iterable(opened)
        leaves = [stored(part.detach()) if isinstance(part, torch.Tensor) else part for part in parts]
        return cls((structure, kinds), leaves, {name: stored(tensor) for name, tensor in watched.items()})

    def difference(
        self,
        found: RunResult,
        tolerance: Tolerance | None,
        *,
        before: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[str, TensorDifference] | None:
        """Finds the name and kind of the first difference of `found`, results before watched tensors, which
        were `before` the call; without a tolerance bits must be equal."""
        if self.structure != found.structure:
            return "the result", TensorDifference(detail="its structure is not eager's")
        for index, (left, right) in enumerate(zip(self.leaves, found.leaves, strict=True)):
            if (difference := compare_values(left, right, tolerance)) is not None:
                return f"result leaf {index}", difference
        for name, tensor in self.watched.items():
            kept = before[name] if before is not None else None
            difference = compare_values(tensor, found.watched[name], tolerance, before=kept)
            if difference is not None:
                return name, difference
        return None


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor, to the host where the device has no room for four of it."""
    memory = native_engine(tensor.device).free_memory(tensor.device)
    has_room = memory is None or 4 * tensor.numel() * tensor.element_size() <= memory[0]
    return tensor.clone() if has_room else tensor.cpu()


def has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have equal bits; false for any NaN."""
    right = right.to(left.device)
    if not torch.equal(left, right):
        return False
    return not left.dtype.is_floating_point or torch.equal(left.signbit(), right.signbit())
