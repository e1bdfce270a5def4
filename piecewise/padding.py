"""What padded rows are filled with, to test what was proven of them [I3].

A value that repeats a real row is given another one, the same in all values; integers that an op bounds are
given the ends of their range; anything else gets NaN and large numbers, and integers that are no index, since
nothing is indexed by it. On a CUDA device such an integer would end its use, should a rule be wrong.
"""

from __future__ import annotations

import torch

from piecewise.plan import ValueSpec
from runners.rows import padded_parts, poison_value, repeat_row_

_NO_INDEX = 1 << 30
# The variant for which padded rows repeat a real one, whatever they may hold.
OTHER_ROWS = 3


def poison_padding_(
    tensor: torch.Tensor, value: ValueSpec, num_rows: int, bucket: int, *, variant: int
) -> None:
    """Fills the padded rows of a value at a bucket, of whose rows `num_rows` are real, with what it was
    proven for."""
    if not value.token_dims or value.sizes is None or not value.padded.is_prefix:
        return
    sizes = value.sizes(num_rows)
    if value.padded.is_real or variant == OTHER_ROWS:
        repeat_row_(tensor, sizes, value.units, row=variant)
        return
    filling = _filling(tensor, value.padded.bounds(bucket), variant)
    for part in padded_parts(tensor, sizes):
        part.fill_(filling)


def _filling(tensor: torch.Tensor, bounds: tuple[int | None, int | None], variant: int) -> float | int | bool:
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
