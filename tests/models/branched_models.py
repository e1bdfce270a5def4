"""Models with independent branches, and with writes that order what looks independent."""

from __future__ import annotations

import paged_models
import torch
from torch import nn
from torch.nn import functional as F
from toy_models import HIDDEN, Toy


class Experts(nn.Module):
    """A shared expert beside the routed ones, which are all computed and weighted."""

    def __init__(self, num_experts=3):
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.routed = nn.Parameter(torch.randn(num_experts, HIDDEN, HIDDEN) / HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, model, x):
        weights = torch.softmax(self.router(x), -1)
        routed = torch.einsum("nh,ehk->nek", x, self.routed)
        return x + (routed * weights.unsqueeze(-1)).sum(1) + self.down(F.gelu(self.up(x)))


class Writes(nn.Module):
    """One branch writes in place what the other one has to read before."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, model, x):
        y = x * 2
        first, second = self.a(y), self.b(y)
        y.copy_(second)
        return first * y


class Reads(Writes):
    """One branch reads, in memory that no edge of the graph leads to, what the other one has written."""

    def forward(self, model, x):
        y = x * 2
        y.view(-1).copy_(self.a(x).view(-1))
        return self.b(x) * y


def with_head(kind):
    model = Toy(num_blocks=1)
    model.part = kind()
    model.head = model.part.forward
    return model


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(paged_models.HIDDEN, paged_models.HIDDEN) for _ in range(2))

    def forward(self, x):
        return x + F.silu(self.gate(x)) * self.up(x)
