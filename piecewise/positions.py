"""Do the real rows of a view lie in memory where they lie without padding?

`base[n:]` of a `[2n, h]` tensor looks at other memory when n is padded, though no value shows it while
the base holds zeros. So a view is also run on tensors that number their elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from runners.rows import narrow_to

View = Callable[[Callable[[torch.Tensor], torch.Tensor]], Sequence[torch.Tensor]]


def numbered_like(tensor: torch.Tensor, leading: Sequence[int]) -> torch.Tensor:
    """int64 of the tensor's geometry: the leading part is numbered row by row, the rest is −1."""
    codes = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.int64, device=tensor.device).fill_(
        -1
    )
    count = 1
    for size in leading:
        count *= size
    narrow_to(codes, leading).copy_(torch.arange(count, device=tensor.device).view(tuple(leading)))
    return codes


def can_be_numbered(tensor: torch.Tensor) -> bool:
    """Whether each element has memory of its own."""
    return all(stride > 0 or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def keeps_places(real: Sequence[torch.Tensor], padded: Sequence[torch.Tensor]) -> bool:
    """Whether views of numbered tensors show the same numbers in their leading parts."""
    for left, right in zip(real, padded, strict=True):
        fits = left.dim() == right.dim() and all(a <= b for a, b in zip(left.shape, right.shape, strict=True))
        if not fits or not torch.equal(left, narrow_to(right, left.shape)):
            return False
    return True


def lie_alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two views of equal memory begin at the same place and step alike."""
    return left.storage_offset() == right.storage_offset() and all(
        one == other or left.shape[dim] <= 1
        for dim, (one, other) in enumerate(zip(left.stride(), right.stride(), strict=True))
    )


def random_where_constant(tensor: torch.Tensor, generator: Any) -> torch.Tensor:
    """A random twin of a float tensor of one value (a workspace of zeros), which would show no moved row."""
    if not tensor.dtype.is_floating_point or tensor.numel() < 2 or tensor.dtype.itemsize == 1:
        return tensor
    if not bool((tensor == tensor.flatten()[0]).all()):
        return tensor
    noise = 0.5 + torch.rand(tuple(tensor.shape), generator=generator)
    return torch.empty_like(tensor).copy_(noise)
