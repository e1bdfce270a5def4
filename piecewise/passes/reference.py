"""What the fused ops compute, in torch operators: their implementation without a GPU, and the tests' oracle.

Each rounds where the unfused model does, so that fusing adds no error:

* `rms_norm`: statistics in float32 on the values as they are; `round_first` rounds the normed value to x's
  dtype before it is multiplied with the weight (transformers' Llama and Qwen3), else there is one rounding,
  at the end (Gemma, `torch.nn.RMSNorm`). The factor is `weight + offset` in float32 (Gemma: 1).
* `add_rms_norm`: the sum is rounded to x's dtype, and that is what is normed.
* `silu_and_mul`: silu in float32, rounded, times `up`, rounded.
* `rotate`: both products and their sum are rounded, as transformers' `rotate_half` formulation has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MAX_FLOAT8 = 448.0  # the largest float8_e4m3fn
MAX_WIDTH = 16384


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


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    round_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps, offset, round_first), total


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def rotate(tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Each tensor [..., width], halves turned by cos and sin, which expand to it."""
    return [each * cos + _turned(each) * sin for each in tensors]


def _turned(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)
