"""Makes the rows that warm-ups run on: an example at other row counts, and what ops would have left."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from runners.engines import native_engine


def resize_leaf(value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Returns the example's tensor at other sizes: leading rows, or its rows repeated in order."""
    for dim, size in enumerate(sizes):
        if size != value.shape[dim]:
            index = torch.arange(size, device=value.device) % max(value.shape[dim], 1)
            value = value.index_select(dim, index)
    return value


def placeholder_for(sizes: Sequence[int], like: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Values that an op outside the graphs might have left: random floats, the index 0."""
    if not like.dtype.is_floating_point:
        return torch.zeros(tuple(sizes), dtype=like.dtype, device=like.device)
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(tuple(sizes), generator=generator, device=like.device).to(like.dtype)


def unchanged_random_state(device: torch.device) -> AbstractContextManager[None]:
    return native_engine(device).fork_random_state(device)
