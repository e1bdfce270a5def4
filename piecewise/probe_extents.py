"""The sizes that a probe's tensors have with and without padding, worked out once per node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piecewise.aliases import storage_of, tensors_in
from piecewise.row_samples import map_tensors
from piecewise.sizes import SizeFunctions


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """One tensor of a node.

    Attributes:
        real, padded: its sizes at either row count; None where another symbol decides on them.
        padded_strides: None likewise.
        carries_tokens: whether a size depends on the row count.
        keeps_strides: whether leading rows of the padded tensor have the strides of the unpadded one.
        memory: as `storage_of` tells it.
    """

    real: tuple[int, ...] | None
    padded: tuple[int, ...] | None
    padded_strides: tuple[int, ...] | None
    carries_tokens: bool
    keeps_strides: bool
    memory: int
    is_floating: bool


class Extents:
    """Of all nodes of one trace, at two row counts."""

    def __init__(self, sizes: SizeFunctions, *, num_tokens: int, padded_num_tokens: int) -> None:
        self._sizes, self._rows, self._padded_rows = sizes, num_tokens, padded_num_tokens
        self._known: dict[fx.Node, tuple[Extent, ...]] = {}

    def of(self, node: fx.Node) -> tuple[Extent, ...]:
        """One per tensor in the node's value, in order."""
        known = self._known.get(node)
        if known is None:
            fakes = tensors_in(node.meta.get("example_value"))
            known = self._known[node] = tuple(map(self._extent, fakes))
        return known

    def _extent(self, fake: torch.Tensor) -> Extent:
        sizes, strides = self._sizes.of(fake.shape), self._sizes.of(fake.stride())
        return Extent(
            sizes(self._rows) if sizes is not None else None,
            sizes(self._padded_rows) if sizes is not None else None,
            strides(self._padded_rows) if strides is not None else None,
            bool(self._sizes.token_dims(fake)),
            self._sizes.keeps_strides(fake),
            storage_of(fake),
            fake.dtype.is_floating_point,
        )


def map_with(
    value: Any, extents: Sequence[Extent], function: Callable[[torch.Tensor, Extent], torch.Tensor]
) -> Any:
    """`value` with each tensor in it replaced by `function` of it and its extent."""
    if isinstance(value, torch.Tensor):
        return function(value, extents[0])
    remaining = iter(extents)
    return map_tensors(value, lambda tensor: function(tensor, next(remaining)))
