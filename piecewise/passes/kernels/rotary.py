"""Rotates one or two tensors by the same cos and sin in one program, rounding as the unfused ops do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from piecewise.passes.kernels.rows import TILE, addressable, as_made, output_like, row_begin, row_steps

# Triton's own types are values, not annotations that a type checker knows.
constexpr: Any = tl.constexpr


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
    """Rotates `ROWS` rows of x, or of x2 in the blocks from `num_blocks` on."""
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
    place = x + row_begin(row, x_inner, x_outer_step, x_inner_step)[:, None] + column
    left = tl.load(place, inside, other=0.0).to(tl.float32)
    right = tl.load(place + half, inside, other=0.0).to(tl.float32)
    place = cos + row_begin(row, cos_inner, cos_outer_step, cos_inner_step)[:, None] + column
    cos_left = tl.load(place, inside, other=0.0).to(tl.float32)
    cos_right = tl.load(place + half, inside, other=0.0).to(tl.float32)
    place = sin + row_begin(row, sin_inner, sin_outer_step, sin_inner_step)[:, None] + column
    sin_left = tl.load(place, inside, other=0.0).to(tl.float32)
    sin_right = tl.load(place + half, inside, other=0.0).to(tl.float32)
    first = (left * cos_left).to(dtype).to(tl.float32) + (-right * sin_left).to(dtype).to(tl.float32)
    second = (right * cos_right).to(dtype).to(tl.float32) + (left * sin_right).to(dtype).to(tl.float32)
    place = out + row_begin(row, out_inner, out_outer_step, out_inner_step)[:, None] + column
    tl.store(place, first.to(dtype), inside)
    tl.store(place + half, second.to(dtype), inside)


def rotate(tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Rotates one or two tensors [..., width]; cos and sin expand to them."""
    half = tensors[0].shape[-1] // 2
    columns = triton.next_power_of_2(half)
    rows = max(TILE // (2 * columns), 1)
    outputs = [output_like(each) for each in tensors]
    parts: list[tuple[Any, ...]] = []
    for each, out in zip(tensors, outputs, strict=True):
        rows_of, steps = addressable(each)
        angles = [row_steps(angle.expand(each.shape)) for angle in (cos, sin)]
        if angles[0] is None or angles[1] is None:
            return [_rotated_alone(each, cos, sin) for each in tensors]
        all_steps = (*steps, *angles[0], *angles[1], *addressable(out)[1])
        parts.append((rows_of, out, each.numel() // (2 * half), all_steps))
    first, second = parts[0], parts[-1] if len(parts) > 1 else (*parts[0][:2], 0, parts[0][3])
    blocks = [triton.cdiv(part[2], rows) for part in (first, second)]
    if sum(blocks):
        rotary_program[(sum(blocks),)](
            first[0], cos, sin, first[1], first[2], half, *first[3],
            second[0], second[1], second[2], blocks[0], *second[3],
            ROWS=rows, HALF=columns, num_warps=4,
        )  # fmt: skip
    return [as_made(out, each) for out, each in zip(outputs, tensors, strict=True)]


def _rotated_alone(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate([x], cos.expand(x.shape).contiguous(), sin.expand(x.shape).contiguous())[0]
