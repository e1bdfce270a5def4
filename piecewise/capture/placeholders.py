"""Makes placeholder values for warm-ups, and compares the real rows that warm-ups leave [I3].

The example's rows are resized to other counts, placeholders replace what an op would write, and padded rows
hold any value that was proven possible there.

If a rule were wrong, a bad index would end all use of some devices. On these an integer of unknown range is
0, and indices are checked.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from piecewise.analysis.index_bounds import CheckedIndices
from piecewise.ir.plan import Segment, ValueSpec
from runners.engines import native_engine
from runners.rows import padded_parts, poison_value, repeat_row_

_NO_INDEX = 1 << 30
# The variant in which padded rows repeat a real row, even if they may hold anything.
OTHER_ROWS = 3


def resize_leaf(value: Tensor, sizes: Sequence[int]) -> Tensor:
    """Resizes the example's tensor: takes leading rows, or repeats its rows in order."""
    for dim, size in enumerate(sizes):
        if size != value.shape[dim]:
            index = torch.arange(size, device=value.device) % max(value.shape[dim], 1)
            value = value.index_select(dim, index)
    return value


def placeholder_for(sizes: Sequence[int], like: Tensor, *, seed: int) -> Tensor:
    """Makes values that an op outside the graphs might have written: random floats, the index 0."""
    if not like.dtype.is_floating_point:
        return torch.zeros(tuple(sizes), dtype=like.dtype, device=like.device)
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(tuple(sizes), generator=generator, device=like.device).to(like.dtype)


def poison_padding_(tensor: Tensor, value: ValueSpec, num_rows: int, bucket: int, *, variant: int) -> None:
    """Fills padded rows, after the first `num_rows`, with any value that was proven possible there."""
    if not value.token_dims or value.sizes is None or not value.padded.is_prefix:
        return
    sizes = value.sizes(num_rows)
    if value.padded.is_real or variant == OTHER_ROWS:
        repeat_row_(tensor, sizes, value.units, row=variant)
        return
    filling = anything(tensor, variant, value.padded.bounds(bucket))
    for part in padded_parts(tensor, sizes):
        part.fill_(filling)


def anything(
    tensor: Tensor, variant: int, bounds: tuple[int | None, int | None] = (None, None)
) -> float | int | bool:
    """Chooses a value of which nothing more than these bounds is known."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return poison_value(dtype, variant)
    low, high = bounds
    limits = torch.iinfo(dtype)
    if low is None:
        low = max(-_NO_INDEX, limits.min) if tensor.device.type == "cpu" else min(high or 0, 0)
    if high is None:
        high = min(_NO_INDEX, limits.max) if tensor.device.type == "cpu" else max(low, 0)
    return (low, high)[variant % 2]


def checked_indices(arguments: Sequence[Any]) -> AbstractContextManager[object]:
    """Makes a context in which an index out of range is an error on every device."""
    devices = {each.device for each in arguments if isinstance(each, Tensor)}
    is_fatal = any(native_engine(device).dies_of_bad_index for device in devices)
    return CheckedIndices() if is_fatal else nullcontext()


def real_results(
    segment: Segment, values: Sequence[ValueSpec], outputs: Sequence[Tensor], num_rows: int
) -> dict[int, Tensor]:
    """Maps value index → real rows, for results whose real rows lead and were written."""
    return {
        index: values[index].real_rows(tensor, num_rows)
        for index, tensor in zip(segment.outputs, outputs, strict=True)
        if values[index].padded.is_prefix and values[index].memory not in segment.unwritten
    }


def are_same(left: Tensor, right: Tensor) -> bool:
    """Whether all values are equal; NaN equals NaN here."""
    equal = left == right
    if left.dtype.is_floating_point:
        equal |= (left != left) & (right != right)
    return bool(equal.all())
