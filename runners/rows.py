"""Narrows tensors to their real rows and fills their padded rows.

A graph works on `padded_num_tokens` rows; everything outside works on `num_tokens` rows, which are the
leading ones on each dim that carries tokens [I1].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Sizes, strides and offset of a tensor.
Place = tuple[tuple[int, ...], tuple[int, ...], int]
# A target and its source; None where there is no row to repeat: such a target is filled with zeros.
RowCopy = tuple[Tensor, Tensor | None]


def narrow_to(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """Views the leading part of `tensor` of the given sizes."""
    for dim, (size, wanted) in enumerate(zip(tensor.shape, sizes, strict=True)):
        if size != wanted:
            tensor = tensor.narrow(dim, 0, wanted)
    return tensor


def has_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Whether the strides match where they matter: dims of size 0 or 1 may have any."""
    return tensor.numel() == 0 or all(
        size <= 1 or have == want
        for size, have, want in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory without holes or overlaps, in some order of dims."""
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def num_spanned(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Counts elements from the first to the last, gaps included."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def padded_parts(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns views that together cover what lies outside the leading part of `sizes`."""
    return [target for target, _ in row_copies(tensor, sizes, [1] * len(sizes))]


def row_copies(tensor: Tensor, sizes: Sequence[int], units: Sequence[int], *, row: int = 0) -> list[RowCopy]:
    """Finds views whose copies, in order, repeat one leading row behind the leading part of `sizes` [I2].

    `units` is how many elements are one row, per dim; `row` is the leading row, the same in all tensors.
    """
    found: list[RowCopy] = []
    inner = tensor
    for dim, (size, unit) in enumerate(zip(sizes, units, strict=True)):
        if size == tensor.shape[dim]:
            continue
        pad = inner.narrow(dim, size, tensor.shape[dim] - size)
        if size:
            begin = row % (size // unit) * unit
            pad = pad.unflatten(dim, (-1, unit)) if unit > 1 else pad
            source = inner.narrow(dim, begin, unit)
            found.append((pad, (source.unsqueeze(dim) if unit > 1 else source).expand_as(pad)))
        else:
            found.append((pad, None))
        inner = inner.narrow(dim, 0, size)
    return found[::-1]


def repeat_row_(tensor: Tensor, sizes: Sequence[int], units: Sequence[int], *, row: int = 0) -> None:
    """Fills the rows behind the leading part of `sizes` as `row_copies` says."""
    for target, source in row_copies(tensor, sizes, units, row=row):
        target.copy_(source) if source is not None else target.zero_()


def poison_value(dtype: torch.dtype, variant: int) -> float | int | bool:
    """Returns a value that shows whether padded rows reach real ones: NaN, +1e4 and −1e4 for floats.

    Two values would miss an ascending sort, where both go last. A dtype that ends below 1e4 (FP8) takes its
    largest and smallest numbers.
    """
    if dtype.is_floating_point or dtype.is_complex:
        limits = torch.finfo(dtype)
        return (float("nan"), min(1e4, limits.max), max(-1e4, limits.min))[variant % 3]
    if dtype is torch.bool:
        return variant % 2 == 0
    return (0, 1, 0)[variant % 3]
