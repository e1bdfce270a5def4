"""Multiplies silu of one tensor with another, in float32, rounding as the unfused ops do."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from piecewise.passes.kernels.rows import addressable, as_made, output_like, row_begin

# Triton's own types are values, not annotations that a type checker knows.
constexpr: Any = tl.constexpr

_BLOCK = 1024


@triton.jit
def gated_program(
    gate, up, out, width,
    gate_inner, gate_outer_step, gate_inner_step, up_inner, up_outer_step, up_inner_step,
    out_inner, out_outer_step, out_inner_step,
    BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = gate.dtype.element_ty
    place = row_begin(row, gate_inner, gate_outer_step, gate_inner_step) + column
    first = tl.load(gate + place, inside, other=0.0).to(tl.float32)
    place = row_begin(row, up_inner, up_outer_step, up_inner_step) + column
    second = tl.load(up + place, inside, other=0.0).to(tl.float32)
    active = (first / (1.0 + tl.exp(-first))).to(dtype).to(tl.float32)
    place = row_begin(row, out_inner, out_outer_step, out_inner_step) + column
    tl.store(out + place, (active * second).to(dtype), inside)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up; both are [..., width]."""
    given, out = gate, output_like(gate)
    (gate, gate_steps), (up, up_steps) = addressable(gate), addressable(up)
    width = gate.shape[-1]
    if out.numel():
        block = min(triton.next_power_of_2(width), _BLOCK)
        gated_program[(out.numel() // width, triton.cdiv(width, block))](
            gate, up, out, width, *gate_steps, *up_steps, *addressable(out)[1], BLOCK=block, num_warps=2
        )
    return as_made(out, given)
