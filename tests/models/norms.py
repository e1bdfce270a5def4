"""Formulations of an RMS norm, as models write it."""

from __future__ import annotations

import torch
from aten_segments import ROWS
from torch.nn import functional as F

WIDTH, DTYPES = 16, [torch.float32, torch.float16, torch.bfloat16]


def llama(x, weight):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def gemma(x, weight):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + weight.float())).type_as(x)


def olmo(x, weight):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (weight * wide).to(x.dtype)


def by_hand(x, weight):
    wide = x.float()
    return (torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * wide * weight.float()).to(x.dtype)


def plain(x, weight):
    return F.rms_norm(x, (WIDTH,), weight, 1e-6)


NORMS = [llama, gemma, olmo, by_hand, plain]


def rows(*sizes, dtype=torch.float32):
    return torch.randn(ROWS, *sizes).to(dtype)
