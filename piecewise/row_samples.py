"""Example rows at other row counts, with poison behind them: what probes and warm-ups run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from runners.rows import narrow_to, poison_value


def resize_leaf(value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The example's tensor at other sizes: leading rows, or its rows repeated in order."""
    for dim, size in enumerate(sizes):
        if size != value.shape[dim]:
            index = torch.arange(size, device=value.device) % max(value.shape[dim], 1)
            value = value.index_select(dim, index)
    return value


def int_candidates(value: torch.Tensor) -> tuple[int, int, int]:
    """Valid values for padded rows of an integer tensor, different ones where possible."""
    if value.numel() == 0:
        return 0, 1, 0
    low, high = int(value.min()), int(value.max())
    return (high, low, 1 if high >= 1 else low) if low != high else (high, 0, 1)


def stand_in(sizes: Sequence[int], like: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Values that an op outside the graphs might have left: random floats, the index 0."""
    if not like.dtype.is_floating_point:
        return torch.zeros(tuple(sizes), dtype=like.dtype, device=like.device)
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(tuple(sizes), generator=generator, device=like.device).to(like.dtype)


def with_padding(
    rows: torch.Tensor, sizes: Sequence[int], strides: Sequence[int] | None, variant: int
) -> torch.Tensor:
    """A tensor of `sizes` whose leading part is `rows` and whose rest is poison."""
    padded = torch.empty(tuple(sizes), dtype=rows.dtype, device=rows.device)
    if strides is not None and 0 not in strides:
        padded = torch.empty_strided(tuple(sizes), tuple(strides), dtype=rows.dtype, device=rows.device)
    if rows.dtype.is_floating_point or rows.dtype in (torch.bool,) or rows.dtype.is_complex:
        padded.fill_(poison_value(rows.dtype, variant))
    else:
        padded.fill_(int_candidates(rows)[variant])
    narrow_to(padded, rows.shape).copy_(rows)
    return padded


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with each tensor in its lists, tuples and dicts replaced by `function` of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, function) for item in value]
        return (
            type(value)(*items)
            if hasattr(value, "_fields")
            else type(value)(items)
            if type(value) in (tuple, list)
            else tuple(items)
        )
    return value


@contextmanager
def unchanged_random_state(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def choose_probe_sizes(
    example_num_tokens: int, buckets: Sequence[int], is_valid: Callable[[int], bool]
) -> tuple[int, int] | None:
    """(real, padded) row counts at which the trace holds: few rows, padded by at least one; None if there
    are none."""
    real_options = [
        n
        for n in (6, 5, 7, example_num_tokens, 3, 2)
        if 2 <= n <= example_num_tokens or n == example_num_tokens
    ]
    for real in dict.fromkeys(real_options):
        if not is_valid(real):
            continue
        for padded in (real + 3, real + 4, *(bucket for bucket in sorted(buckets) if bucket > real)):
            if is_valid(padded):
                return real, padded
    for padded in filter(is_valid, sorted(buckets)):
        for real in range(padded - 1, 1, -1):
            if is_valid(real):
                return real, padded
    return None
