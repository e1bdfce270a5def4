"""Boundary ops compile ahead of a capture: told the bucket, shown the arguments, and not called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import boundary_ops
import piecewise

calls: list[Any] = []
seen: list[Any] = []


def _kernel(x: Tensor, scale: float, out: Tensor, cache: Tensor) -> None:
    calls.append(x.shape[0])
    cache.add_(1)
    out.copy_(x * scale)


def _by_arguments(num_tokens: int, *args: Any, **kwargs: Any) -> None:
    x, scale, out, cache = args
    seen.append((num_tokens, tuple(x.shape), scale, tuple(out.shape), cache))


def _plain(num_tokens: int) -> None:
    seen.append(num_tokens)


def _failing(num_tokens: int) -> None:
    if num_tokens == 8:
        raise ValueError("no program for 8 tokens")


_SCHEMA = "(Tensor x, float scale, Tensor(a!) out, Tensor(b!) cache) -> ()"
OPS = {
    name: boundary_ops.define(f"warm_up_test::{name}{_SCHEMA}", _kernel, warm_up=warm_up)
    for name, warm_up in (
        ("shown", _by_arguments),
        ("told", _plain),
        ("failing", _failing),
        ("without", None),
    )
}


class Model(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.first, self.op = nn.Linear(4, 4), op
        self.caches = [torch.zeros(2), torch.zeros(2)]

    def forward(self, x: Tensor) -> Tensor:
        for cache in self.caches:
            x = self.first(x)
            out = torch.empty_like(x)
            self.op(x, 0.5, out, cache)
            x = x + out
        return x


def capture(name: str) -> tuple[Model, Any]:
    calls.clear()
    seen.clear()
    model = Model(OPS[name]).eval()
    graphed = piecewise.compile(model, buckets=[4, 8], progress=False)
    with torch.no_grad():
        report = graphed.capture(torch.randn(3, 4))
    assert calls == [] and all(not cache.any() for cache in model.caches)
    return model, report


def test_I5_each_bucket_is_announced_with_its_arguments() -> None:
    model, report = capture("shown")
    assert report.ok
    assert [entry[:4] for entry in seen] == [(n, (n, 4), 0.5, (n, 4)) for n in (8, 4)]
    assert all(entry[4] is model.caches[0] for entry in seen)


def test_a_function_of_the_token_count_alone_is_given_that() -> None:
    assert capture("told")[1].ok and seen == [8, 4]


@pytest.mark.parametrize("name", ["without", "told"])
def test_nothing_is_called_by_a_capture(name: str) -> None:
    assert capture(name)[1].ok
    assert calls == []


def test_I8_a_warm_up_that_fails_closes_its_bucket_only() -> None:
    _, report = capture("failing")
    assert report.captured == (4,)
    assert "no program for 8 tokens" in report.buckets[0].reason
