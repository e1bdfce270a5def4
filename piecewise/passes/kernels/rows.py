"""Launches of the programs; tensors may have any strides, and are copied where rows cannot be addressed.

Outputs have the strides of `empty_like` of the first input, as unfused elementwise ops give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from piecewise.passes.kernels.programs import gated_program, norm_program, rotary_program
from piecewise.passes.reference import MAX_FLOAT8, MAX_WIDTH

# Elements that one program holds, where rows are short.
_TILE = 2048
_GATED_BLOCK = 1024

_NO_ROWS = (1, 0, 0)


def row_steps(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """(inner, outer step, inner step) of a tensor's rows; None where these do not address them."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        return None
    dims: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 2:
        return None
    if len(dims) == 2:
        return dims[1][0], dims[0][1], dims[1][1]
    size, stride = dims[0] if dims else (1, 0)
    return max(size, 1), 0, stride


def _addressable(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    steps = row_steps(tensor)
    if steps is None:
        tensor = tensor.contiguous()
        steps = row_steps(tensor)
    assert steps is not None
    return tensor, steps


def _output(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory of `like`'s strides to write rows into, or a dense one where those do not address rows."""
    made = torch.empty_like(like, dtype=dtype)
    return made if row_steps(made) is not None else made.new_empty(like.shape)


def _as_made(written: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What was written into an `_output`, with the strides of `empty_like`."""
    if (
        row_steps(like) is not None
        or row_steps(made := torch.empty_like(like, dtype=written.dtype)) is not None
    ):
        return written
    return made.copy_(written)


def _num_warps(elements: int) -> int:
    return min(max(triton.next_power_of_2(elements) // 512, 1), 16)


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float,
    round_first: bool,
    quant: int = 0,
    scale: torch.Tensor | None = None,
    least_peak: float = 0.0,
    least_step: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normed, x + residual, scale per row); the last two are made where they are asked for.

    Args:
        x, residual: [..., width], width at most `reference.MAX_WIDTH`.
        weight: [width], dense.
        quant: 0 for x's dtype, 1 for float8 by `scale`, 2 for float8 by a scale per row, which is made from
            the row's peak, of at least `least_peak`, and is at least `least_step`; 3 as 2, and that scale is
            rounded to x's dtype.
    """
    width = x.shape[-1]
    assert width <= MAX_WIDTH
    given = x
    out = _output(x, torch.float8_e4m3fn if quant else None)
    total = _output(x) if residual is not None else out
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) if quant > 1 else out
    x, x_steps = _addressable(x)
    added, added_steps = _addressable(residual) if residual is not None else (x, _NO_ROWS)
    num_rows = x.numel() // max(width, 1)
    if num_rows:
        columns = triton.next_power_of_2(width)
        rows = max(_TILE // columns, 1)
        norm_program[(triton.cdiv(num_rows, rows),)](
            x, added, weight, scale if scale is not None else x, out, total, scales,
            num_rows, width, eps, offset, MAX_FLOAT8, least_peak, least_step,
            *x_steps, *added_steps, *_addressable(out)[1], *_addressable(total)[1],
            ROWS=rows, WIDTH=columns, HAS_RESIDUAL=residual is not None, ROUND_FIRST=round_first, QUANT=quant,
            num_warps=_num_warps(rows * columns),
        )  # fmt: skip
    return _as_made(out, given), _as_made(total, given), scales


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [..., width] each."""
    given, out = gate, _output(gate)
    (gate, gate_steps), (up, up_steps) = _addressable(gate), _addressable(up)
    width = gate.shape[-1]
    if out.numel():
        block = min(triton.next_power_of_2(width), _GATED_BLOCK)
        gated_program[(out.numel() // width, triton.cdiv(width, block))](
            gate, up, out, width, *gate_steps, *up_steps, *_addressable(out)[1], BLOCK=block, num_warps=2
        )
    return _as_made(out, given)


def rotate(tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Each of one or two tensors, rotated; [..., width] with cos and sin that expand to them."""
    half = tensors[0].shape[-1] // 2
    columns = triton.next_power_of_2(half)
    rows = max(_TILE // (2 * columns), 1)
    outputs = [_output(each) for each in tensors]
    parts: list[tuple[Any, ...]] = []
    for each, out in zip(tensors, outputs, strict=True):
        rows_of, steps = _addressable(each)
        angles = [row_steps(angle.expand(each.shape)) for angle in (cos, sin)]
        if angles[0] is None or angles[1] is None:
            return [_rotated_alone(each, cos, sin) for each in tensors]
        all_steps = (*steps, *angles[0], *angles[1], *_addressable(out)[1])
        parts.append((rows_of, out, each.numel() // (2 * half), all_steps))
    first, second = parts[0], parts[-1] if len(parts) > 1 else (*parts[0][:2], 0, parts[0][3])
    blocks = [triton.cdiv(part[2], rows) for part in (first, second)]
    if sum(blocks):
        rotary_program[(sum(blocks),)](
            first[0], cos, sin, first[1], first[2], half, *first[3],
            second[0], second[1], second[2], blocks[0], *second[3],
            ROWS=rows, HALF=columns, num_warps=4,
        )  # fmt: skip
    return [_as_made(out, each) for out, each in zip(outputs, tensors, strict=True)]


def _rotated_alone(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate([x], cos.expand(x.shape).contiguous(), sin.expand(x.shape).contiguous())[0]
