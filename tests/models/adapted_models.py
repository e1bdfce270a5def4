"""A model with low-rank adapters of the shape that PEFT's have, and the states that it comes to."""

from __future__ import annotations

import torch
from state_models import new_model
from torch import nn


class LoraLike(nn.Module):
    """A linear with low-rank adapters, of the shape that PEFT's have: named, active, disabled, merged."""

    def __init__(self, base, names=("a", "b")):
        super().__init__()
        self.base, self.down, self.up = base, nn.ModuleDict(), nn.ModuleDict()
        self._active, self._disabled, self.merged_adapters = ["a"], False, []
        for name in names:
            self.add(name)

    def add(self, name, rank=4):
        self.down[name] = nn.Linear(self.base.in_features, rank, bias=False)
        self.up[name] = nn.Linear(rank, self.base.out_features, bias=False)
        self.eval()

    @property
    def active_adapters(self):
        return self._active

    @property
    def disable_adapters(self):
        return self._disabled

    def activate(self, *names):
        self._active = list(names)  # another list each time, as PEFT makes it
        self._disabled = False

    def delta(self, name):
        return self.up[name].weight @ self.down[name].weight

    def merge(self):
        for name in self._active:
            self.base.weight.data += self.delta(name)
            self.merged_adapters.append(name)

    def unmerge(self):
        while self.merged_adapters:
            self.base.weight.data -= self.delta(self.merged_adapters.pop())

    def forward(self, x):
        result = self.base(x)
        if not self.disable_adapters and not self.merged_adapters:
            for name in self.active_adapters:
                result = result + self.up[name](self.down[name](x))
        return result


def adapted(**parts):
    """A model with two adapted linears, and what does a thing to both of them."""
    model = new_model(**parts)
    model.block.o, model.projection = LoraLike(model.block.o), LoraLike(model.projection)
    layers = model.block.o, model.projection

    def each(method, *args):
        with torch.no_grad():
            for layer in layers:
                if method == "disable":
                    layer._disabled = True
                else:
                    getattr(layer, method)(*args)

    return model.eval(), each


STATES = {
    "adapter a": [("activate", "a")],
    "adapter b": [("activate", "b")],
    "adapters a, b": [("activate", "a", "b")],
    "no adapter": [("disable",)],
    "adapter a (merged)": [("activate", "a"), ("merge",)],
}


def come_to(state, each):
    each("unmerge")
    for action in STATES[state]:
        each(*action)
