# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton programs. All compute in float32 and round where the unfused ops do, as `reference.py` says.

A tensor's rows are its last dim, which is dense. Where row `i` begins is told by three numbers per tensor:
``(i // inner) * outer_step + (i % inner) * inner_step``. That covers slices of packed projections and heads
that lie in another order than they are counted in.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Triton's own types are values, not annotations that a type checker knows.
constexpr: Any = tl.constexpr


@triton.jit
def _begin(row, inner, outer_step, inner_step):
    return (row // inner) * outer_step + (row % inner) * inner_step


@triton.jit
def norm_program(
    x, residual, weight, scale, out, total, scales, num_rows, width,
    eps, offset, quant_max, least_peak, least_step,
    x_inner, x_outer_step, x_inner_step, residual_inner, residual_outer_step, residual_inner_step,
    out_inner, out_outer_step, out_inner_step, total_inner, total_outer_step, total_inner_step,
    ROWS: constexpr, WIDTH: constexpr, HAS_RESIDUAL: constexpr, ROUND_FIRST: constexpr, QUANT: constexpr,
):  # fmt: skip
    """`ROWS` rows: residual add, RMS norm, rounding to float8 by one scale (QUANT 1) or one per row (2, and 3
    where that is rounded to x's dtype)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows)[:, None] & (column < width)
    dtype = x.dtype.element_ty
    place = _begin(row, x_inner, x_outer_step, x_inner_step)[:, None] + column
    value = tl.load(x + place, inside, other=0.0)
    if HAS_RESIDUAL:
        place = _begin(row, residual_inner, residual_outer_step, residual_inner_step)[:, None] + column
        added = tl.load(residual + place, inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(dtype)
        place = _begin(row, total_inner, total_outer_step, total_inner_step)[:, None] + column
        tl.store(total + place, value, inside)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / width
    normed = wide * tl.rsqrt(mean + eps)[:, None]
    if ROUND_FIRST:
        normed = normed.to(dtype).to(tl.float32)
    factor = tl.load(weight + column, column < width, other=0.0).to(tl.float32) + offset
    normed = (normed * factor).to(dtype)
    place = _begin(row, out_inner, out_outer_step, out_inner_step)[:, None] + column
    if QUANT == 0:
        tl.store(out + place, normed, inside)
    else:
        wide = normed.to(tl.float32)
        if QUANT == 1:
            wide = wide / tl.load(scale).to(tl.float32)
        else:
            peak = tl.maximum(tl.max(tl.abs(wide), axis=1), least_peak)
            step = tl.maximum(peak / quant_max, least_step)
            if QUANT == 3:
                step = step.to(dtype).to(tl.float32)
            tl.store(scales + row, step, row < num_rows)
            wide = wide / step[:, None]
        # A row of zeros has a scale of zero, and is NaN in the model, too.
        wide = tl.maximum(wide, -quant_max, propagate_nan=tl.PropagateNan.ALL)
        wide = tl.minimum(wide, quant_max, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + place, wide.to(out.dtype.element_ty), inside)


@triton.jit
def gated_program(
    gate, up, out, width,
    gate_inner, gate_outer_step, gate_inner_step, up_inner, up_outer_step, up_inner_step,
    out_inner, out_outer_step, out_inner_step,
    BLOCK: constexpr,
):  # fmt: skip
    """silu(gate) * up for `BLOCK` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = gate.dtype.element_ty
    place = _begin(row, gate_inner, gate_outer_step, gate_inner_step) + column
    first = tl.load(gate + place, inside, other=0.0).to(tl.float32)
    place = _begin(row, up_inner, up_outer_step, up_inner_step) + column
    second = tl.load(up + place, inside, other=0.0).to(tl.float32)
    active = (first / (1.0 + tl.exp(-first))).to(dtype).to(tl.float32)
    place = _begin(row, out_inner, out_outer_step, out_inner_step) + column
    tl.store(out + place, (active * second).to(dtype), inside)


@triton.jit
def rotary_program(
    x, cos, sin, out, num_rows, half,
    x_inner, x_outer_step, x_inner_step, cos_inner, cos_outer_step, cos_inner_step,
    sin_inner, sin_outer_step, sin_inner_step, out_inner, out_outer_step, out_inner_step,
    x2, out2, num_rows2, num_blocks,
    x2_inner, x2_outer_step, x2_inner_step, cos2_inner, cos2_outer_step, cos2_inner_step,
    sin2_inner, sin2_outer_step, sin2_inner_step, out2_inner, out2_outer_step, out2_inner_step,
    ROWS: constexpr, HALF: constexpr,
):  # fmt: skip
    """`ROWS` rows of x, or in the blocks from `num_blocks` on, of x2."""
    block = tl.program_id(0)
    if block < num_blocks:
        _rotate(
            x, cos, sin, out, block, num_rows, half,
            x_inner, x_outer_step, x_inner_step, cos_inner, cos_outer_step, cos_inner_step,
            sin_inner, sin_outer_step, sin_inner_step, out_inner, out_outer_step, out_inner_step, ROWS, HALF,
        )  # fmt: skip
    else:
        _rotate(
            x2, cos, sin, out2, block - num_blocks, num_rows2, half,
            x2_inner, x2_outer_step, x2_inner_step, cos2_inner, cos2_outer_step, cos2_inner_step,
            sin2_inner, sin2_outer_step, sin2_inner_step, out2_inner, out2_outer_step, out2_inner_step,
            ROWS, HALF,
        )  # fmt: skip


@triton.jit
def _rotate(
    x, cos, sin, out, block, num_rows, half,
    x_inner, x_outer_step, x_inner_step, cos_inner, cos_outer_step, cos_inner_step,
    sin_inner, sin_outer_step, sin_inner_step, out_inner, out_outer_step, out_inner_step,
    ROWS: constexpr, HALF: constexpr,
):  # fmt: skip
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)[None, :]
    inside = (row < num_rows)[:, None] & (column < half)
    dtype = x.dtype.element_ty
    place = x + _begin(row, x_inner, x_outer_step, x_inner_step)[:, None] + column
    left = tl.load(place, inside, other=0.0).to(tl.float32)
    right = tl.load(place + half, inside, other=0.0).to(tl.float32)
    place = cos + _begin(row, cos_inner, cos_outer_step, cos_inner_step)[:, None] + column
    cos_left = tl.load(place, inside, other=0.0).to(tl.float32)
    cos_right = tl.load(place + half, inside, other=0.0).to(tl.float32)
    place = sin + _begin(row, sin_inner, sin_outer_step, sin_inner_step)[:, None] + column
    sin_left = tl.load(place, inside, other=0.0).to(tl.float32)
    sin_right = tl.load(place + half, inside, other=0.0).to(tl.float32)
    first = (left * cos_left).to(dtype).to(tl.float32) + (-right * sin_left).to(dtype).to(tl.float32)
    second = (right * cos_right).to(dtype).to(tl.float32) + (left * sin_right).to(dtype).to(tl.float32)
    place = out + _begin(row, out_inner, out_outer_step, out_inner_step)[:, None] + column
    tl.store(place, first.to(dtype), inside)
    tl.store(place + half, second.to(dtype), inside)
