"""Norms rows in one program, with an optional sum before and float8 rounding after.

The program computes in float32 and rounds where the references in `piecewise/passes/fusions` do.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from piecewise.passes.fusion_pass import MAX_FLOAT8, MAX_WIDTH
from piecewise.passes.kernels.rows import TILE, addressable, as_made, output_like, row_begin

# Triton's own types are values, not annotations that a type checker knows.
constexpr: Any = tl.constexpr

_NO_ROWS = (1, 0, 0)


@triton.jit
def norm_program(
    x, residual, weight, scale, out, total, scales, num_rows, width,
    eps, offset, quant_max, least_peak, least_step,
    x_inner, x_outer_step, x_inner_step, residual_inner, residual_outer_step, residual_inner_step,
    out_inner, out_outer_step, out_inner_step, total_inner, total_outer_step, total_inner_step,
    ROWS: constexpr, WIDTH: constexpr, HAS_RESIDUAL: constexpr, ROUND_FIRST: constexpr, QUANT: constexpr,
):  # fmt: skip
    """Norms `ROWS` rows, rounding to float8 by one scale (QUANT 1) or a scale per row (2, 3 in x's dtype)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows)[:, None] & (column < width)
    dtype = x.dtype.element_ty
    place = row_begin(row, x_inner, x_outer_step, x_inner_step)[:, None] + column
    value = tl.load(x + place, inside, other=0.0)
    if HAS_RESIDUAL:
        place = row_begin(row, residual_inner, residual_outer_step, residual_inner_step)[:, None] + column
        added = tl.load(residual + place, inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(dtype)
        place = row_begin(row, total_inner, total_outer_step, total_inner_step)[:, None] + column
        tl.store(total + place, value, inside)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / width
    normed = wide * tl.rsqrt(mean + eps)[:, None]
    if ROUND_FIRST:
        normed = normed.to(dtype).to(tl.float32)
    factor = tl.load(weight + column, column < width, other=0.0).to(tl.float32) + offset
    normed = (normed * factor).to(dtype)
    place = row_begin(row, out_inner, out_outer_step, out_inner_step)[:, None] + column
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
        # A row of zeros has a scale of zero and becomes NaN, as in the model.
        wide = tl.maximum(wide, -quant_max, propagate_nan=tl.PropagateNan.ALL)
        wide = tl.minimum(wide, quant_max, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + place, wide.to(out.dtype.element_ty), inside)


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    round_first: bool,
    quant: int = 0,
    scale: torch.Tensor | None = None,
    least_peak: float = 0.0,
    least_step: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (normed, x + residual, scale per row); the sum needs a residual, scales a `quant` of 2 or 3.

    Args:
        x, residual: [..., width], width at most `MAX_WIDTH`.
        weight: [width], dense.
        quant: 0 for x's dtype, 1 for float8 by `scale`, 2 for float8 by a scale per row, of a peak of at
            least `least_peak` and itself at least `least_step`; 3 as 2, with that scale in x's dtype.
    """
    width = x.shape[-1]
    assert width <= MAX_WIDTH
    given = x
    out = output_like(x, torch.float8_e4m3fn if quant else None)
    total = output_like(x) if residual is not None else out
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) if quant > 1 else out
    x, x_steps = addressable(x)
    added, added_steps = addressable(residual) if residual is not None else (x, _NO_ROWS)
    num_rows = x.numel() // max(width, 1)
    if num_rows:
        columns = triton.next_power_of_2(width)
        rows = max(TILE // columns, 1)
        norm_program[(triton.cdiv(num_rows, rows),)](
            x, added, weight, scale if scale is not None else x, out, total, scales,
            num_rows, width, eps, offset, MAX_FLOAT8, least_peak, least_step,
            *x_steps, *added_steps, *addressable(out)[1], *addressable(total)[1],
            ROWS=rows, WIDTH=columns, HAS_RESIDUAL=residual is not None, ROUND_FIRST=round_first, QUANT=quant,
            num_warps=min(max(triton.next_power_of_2(rows * columns) // 512, 1), 16),
        )  # fmt: skip
    return as_made(out, given), as_made(total, given), scales


def rms_norm(x: torch.Tensor, *options: Any) -> torch.Tensor:
    return norm(x, None, *options)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return norm(x, residual, *options)[:2]


def rms_norm_quant(x: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm_quant(x, None, *options)[:2]


def add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight, eps, offset, round_first, scale, least_peak, least_step, *rest = options
    quant = 1 if scale is not None else 3 if any(rest) else 2
    found, total, scales = norm(
        x, residual, weight, eps, offset, round_first, quant, scale, least_peak, least_step
    )
    return found, scales if scale is None else x.new_empty(0, dtype=torch.float32), total
