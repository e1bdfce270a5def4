"""No collection starts while graphs are made."""

from __future__ import annotations

import gc

import pytest
import torch
from toy_models import Toy, make_ids

import piecewise
from piecewise.capture.analyse import TracedModel
from piecewise.capture.build_plan import PlanAssembler
from piecewise.torch_backend import piecewise_backend
from runners.collector import paused_collector


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_off_in_the_block_and_as_before_after_it(is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="no"), paused_collector():
            assert not gc.isenabled()
            with paused_collector():
                pass
            assert not gc.isenabled()
            raise ValueError("no")
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


@pytest.fixture
def states(monkeypatch):
    """Whether the collector was on: where a plan was cut, and where a bucket was captured."""
    found = []

    def noting(function):
        def call(*args, **kwargs):
            found.append(gc.isenabled())
            return function(*args, **kwargs)

        return call

    for owner, name in ((TracedModel, "cut"), (PlanAssembler, "capture")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    return found


def test_the_collector_is_off_while_graphs_are_made(states):
    graphed = piecewise.compile(Toy(num_blocks=1).eval(), buckets=[4, 8], progress=False)
    arguments = make_ids(5), torch.arange(5)
    with torch.no_grad():
        graphed.capture(*arguments)
        graphed.refresh()
    assert states == [False] * 6 and gc.isenabled()


def test_the_collector_is_off_while_a_first_call_makes_graphs(states):
    graphed = piecewise.compile(Toy(num_blocks=1).eval(), buckets=[8], progress=False, capture="lazy")
    with torch.no_grad():
        for _ in range(3):
            graphed(make_ids(5), torch.arange(5))
    assert graphed.stats.captured and states == [False] * 2 and gc.isenabled()


def test_the_collector_is_off_behind_torch_compile(states):
    torch._dynamo.reset()
    options = {"buckets": [8], "progress": False}
    compiled = torch.compile(
        Toy(num_blocks=1).eval(), backend=piecewise_backend, dynamic=True, options=options
    )
    with torch.no_grad(), piecewise.capture_window():
        compiled(make_ids(5), torch.arange(5))
    assert states == [False] * 2 and gc.isenabled()
