"""Captures models with their segments lowered, and compares them with eager."""

from __future__ import annotations

import torch
from toy_models import compare, make_ids, op_poison, poison_copies

import piecewise


def captured(model, *, buckets=(4, 8, 16), arguments=None, **config):
    arguments = arguments or (lambda n: (make_ids(n), torch.arange(n)))
    graphed = piecewise.compile(model, buckets=buckets, progress=False, **{"lowering": "inductor", **config})
    report = graphed.capture(*arguments(5))
    assert report.ok, report
    return graphed, report


def check(model, *, sizes=(1, 3, 4, 7, 8, 11, 16), arguments=None, strides=True, **config):
    """Results, state and inputs of graphed and eager calls agree to rounding, with poisoned padding too."""
    arguments = arguments or (lambda n: (make_ids(n), torch.arange(n)))
    graphed, report = captured(model, arguments=arguments, **config)
    with torch.no_grad():
        for value in (None, float("nan"), 1e4):
            if value is not None:
                poison_copies(graphed, value)
            with op_poison(value):
                for n in sizes:
                    got, want = compare(graphed, model, arguments(n), exact=False, where=f"{n}, {value}")
                    if strides and isinstance(want, torch.Tensor):
                        assert got.stride() == want.stride()
    assert graphed.stats.eager_calls == 0, graphed.stats
    return graphed, report.lowerings[0]
