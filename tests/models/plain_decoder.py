"""A plain decoder of torch's own modules, whose fusions and branches are known."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from toy_models import HIDDEN, VOCAB, mix

from piecewise.passes.pack_linears import are_packed


class Layer(nn.Module):
    """A plain decoder layer: norm, q/k/v with or without biases, `mix`, output; norm, gated MLP."""

    def __init__(self, bias=False):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.gate, self.up = (nn.Linear(HIDDEN, 3 * HIDDEN, bias=bias) for _ in range(2))
        self.down = nn.Linear(3 * HIDDEN, HIDDEN, bias=bias)
        self.cache = torch.zeros(64, HIDDEN)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        out = torch.empty_like(q)
        mix(q, k, v, out, self.cache)
        x = x + self.o(out)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Plain(nn.Module):
    def __init__(self, num_layers=2, bias=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer(bias) for _ in range(num_layers)])
        self.norm, self.head = nn.RMSNorm(HIDDEN, eps=1e-6), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def matches(report):
    """Pass → matches."""
    return dict(report.fusions.matches)


def packs(model):
    """Whether q, k and v, and gate and up, of each layer lie in one storage."""
    return [
        are_packed([getattr(layer, name).weight for name in names])
        for layer in model.layers
        for names in (("q", "k", "v"), ("gate", "up"))
    ]
