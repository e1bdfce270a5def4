"""Copies a call's inputs into their static buffers, padding included, in one launch [I2]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from boundary_ops.attention.triton.launcher import DirectLaunch, current_stream, jit_launch
from runners.bound_steps import CopyIn, CopyLaunch

constexpr: Any = tl.constexpr

MAX_COPIES = 4
_BLOCK = 1024
# These change from call to call, so Triton must not specialise on them.
_GIVEN = [f"{name}{number}" for number in range(MAX_COPIES) for name in ("buffer", "source")]
_SIZES = [f"{name}{at}" for at in range(MAX_COPIES) for name in ("total", "real", "padded", "inner", "unit")]


@triton.jit
def _copy(buffer, source, total, real, padded, inner, unit, BLOCK: constexpr):
    """Copies [outer, real, inner] into [outer, padded, inner]; padded row `i` repeats row `i % unit`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    line = place // inner
    row = line % padded
    row = tl.where(row < real, row, row % unit)
    value = tl.load(source + ((line // padded) * real + row) * inner + place % inner, place < total)
    tl.store(buffer + place, value, place < total)


@triton.jit(do_not_specialize=[*_GIVEN, *_SIZES], do_not_specialize_on_alignment=_GIVEN)
def copies_program(
    buffer0, source0, total0, real0, padded0, inner0, unit0,
    buffer1, source1, total1, real1, padded1, inner1, unit1,
    buffer2, source2, total2, real2, padded2, inner2, unit2,
    buffer3, source3, total3, real3, padded3, inner3, unit3,
    COUNT: constexpr, BLOCK: constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    if which == 0:
        _copy(buffer0, source0, total0, real0, padded0, inner0, unit0, BLOCK)
    if COUNT > 1 and which == 1:
        _copy(buffer1, source1, total1, real1, padded1, inner1, unit1, BLOCK)
    if COUNT > 2 and which == 2:
        _copy(buffer2, source2, total2, real2, padded2, inner2, unit2, BLOCK)
    if COUNT > 3 and which == 3:
        _copy(buffer3, source3, total3, real3, padded3, inner3, unit3, BLOCK)


# Dtypes of the buffers → the compiled program's launch.
_launches: dict[tuple[torch.dtype, ...], DirectLaunch | None] = {}


def copier(copies: Sequence[CopyIn]) -> CopyLaunch | None:
    """Returns a launch that makes these copies, or None where their buffers do not allow one. The launch
    returns false for tensors that are not dense, which are then copied one by one."""
    sizes = [_sizes(copy) for copy in copies]
    if len(copies) > MAX_COPIES or None in sizes:
        return None
    buffers = [_bits(copy.buffer) for copy in copies]
    key = tuple(buffer.dtype for buffer in buffers)
    grid = (triton.cdiv(max(size[0] for size in sizes if size), _BLOCK), len(copies))
    shapes = [(copy.rows.shape, copy.buffer.dtype) for copy in copies]
    device = buffers[0].device

    def launch(given: Sequence[torch.Tensor]) -> bool:
        for tensor, (shape, dtype) in zip(given, shapes, strict=True):
            fits = tensor.shape == shape and tensor.dtype is dtype and tensor.device == device
            if not fits or not tensor.is_contiguous():
                return False
        direct = _launches.get(key)
        arguments: list[Any] = []
        for tensor, buffer, size in zip(given, buffers, sizes, strict=True):
            pair = (buffer, _bits(tensor)) if direct is None else (buffer.data_ptr(), tensor.data_ptr())
            arguments += [*pair, *size]  # type: ignore[misc]
        arguments += arguments[:7] * (MAX_COPIES - len(copies))
        arguments += [len(copies), _BLOCK]
        if direct is None:
            _launches[key] = jit_launch(copies_program, grid, arguments, num_warps=4, num_stages=1)
        else:
            direct(*grid, current_stream(device.index or 0), tuple(arguments))
        return True

    return launch


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _sizes(copy: CopyIn) -> tuple[int, int, int, int, int] | None:
    """Returns (elements of the buffer, real rows, padded rows, elements of a row, rows of one unit)."""
    buffer, shape = copy.buffer, copy.buffer.shape
    grown = [dim for dim, size in enumerate(copy.rows.shape) if size != shape[dim]]
    if len(grown) > 1 or not buffer.is_contiguous() or buffer.is_complex() or 0 in copy.rows.shape:
        return None
    if not grown:
        return buffer.numel(), buffer.numel(), buffer.numel(), 1, 1
    (dim,) = grown
    return buffer.numel(), copy.rows.shape[dim], shape[dim], math.prod(shape[dim + 1 :]), copy.units[dim]
