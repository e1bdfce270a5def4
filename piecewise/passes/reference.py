"""What the fused ops compute, in torch operators: their implementation without a GPU, and the tests' oracle.

Each rounds where the unfused model does, so that fusing adds no error:

* `rms_norm`: statistics in float32 on the values as they are; `round_first` rounds the normed value to x's
  dtype before it is multiplied with the weight (transformers' Llama and Qwen3), else there is one rounding,
  at the end (Gemma, `torch.nn.RMSNorm`). The factor is `weight + offset` in float32 (Gemma: 1).
* `add_rms_norm`: the sum is rounded to x's dtype, and that is what is normed.
* quantised: the normed value is rounded to x's dtype, divided by the scale in float32, clamped to float8's
  range and rounded. The scale is given, or made for each row from its largest value, in float32 or rounded
  to x's dtype (torchao's float8 rows).
* `silu_and_mul`: silu in float32, rounded, times `up`, rounded.
* `rotate`: both products and their sum are rounded, as transformers' `rotate_half` formulation has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MAX_FLOAT8 = 448.0  # the largest float8_e4m3fn
MAX_WIDTH = 16384
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, round_first: bool
) -> torch.Tensor:
    """[..., width] normed over its last dim, in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        normed = normed.to(x.dtype).float()
    factor = weight.float() if offset == 0.0 else weight.float() + offset
    return (normed * factor).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual); `options` are those of `rms_norm`."""
    total = x + residual
    return rms_norm(total, *options), total


def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    round_first: bool,
    scale: torch.Tensor | None,
    least_peak: float,
    least_step: float,
    round_step: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm in float8, the scale of each row [..., 1] in float32); no such scales where one is given."""
    wide = rms_norm(x, weight, eps, offset, round_first).float()
    step, scales = scale, x.new_empty(0, dtype=torch.float32)
    if step is None:
        peak = wide.abs().amax(-1, keepdim=True).clamp(min=least_peak)
        step = (peak / MAX_FLOAT8).clamp(min=least_step)
        step = scales = step.to(x.dtype).float() if round_step else step
    return (wide / step).clamp(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn), scales


def add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(as `rms_norm_quant` of x + residual, x + residual); `options` are those of `rms_norm_quant`."""
    total = x + residual
    return (*rms_norm_quant(total, *options), total)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def rotate(tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Each tensor [..., width], halves turned by cos and sin, which expand to it."""
    return [each * cos + _turned(each) * sin for each in tensors]


def _turned(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)
