"""suspend() and resume() on real graphs: the device's memory goes back, and comes to the same again."""

from __future__ import annotations

import gc

import pytest
import torch
from inspection import inspect
from state_models import BUCKETS, assert_equal, graph, new_model, tokens

pytestmark = pytest.mark.gpu


def on_device():
    model = new_model().cuda()
    model.block.cache = model.block.cache.cuda()
    return model


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_I9_suspend_gives_the_devices_memory_back_and_resume_takes_no_more_than_before():
    model = on_device()
    with torch.no_grad():
        model(tokens(5).cuda())  # what the libraries keep is no graph's
        graphed = graph(model, tokens(7).cuda(), buckets=BUCKETS)
        graphed.suspend()
        graphed.resume()
        captured = allocated()
        for _ in range(3):
            graphed.suspend()
            suspended = allocated()
            assert inspect(graphed).pool is None and suspended < captured
            assert graphed.resume().captured == BUCKETS
            assert allocated() <= captured
        ids = tokens(5).cuda()
        assert_equal(graphed(ids), model(ids))
    assert graphed.stats.replays == 1


def test_I4_weights_that_were_on_the_host_meanwhile_are_read_where_they_are_now():
    model = on_device()
    graphed = graph(model, tokens(7).cuda())
    traced = inspect(graphed).traced
    graphed.suspend()
    away = [parameter.data.cpu() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.empty(0, device="cuda")
    taken = torch.full((1 << 20,), float("nan"), device="cuda")  # somebody else's, where they were
    for parameter, values in zip(model.parameters(), away, strict=True):
        parameter.data = values.mul_(2).cuda()
    assert graphed.resume().captured == BUCKETS
    assert inspect(graphed).traced is traced, "no new trace"
    with torch.no_grad():
        for size in (1, 5, 16):
            ids = tokens(size).cuda()
            assert_equal(graphed(ids), model(ids))
    assert graphed.stats.replays == 3 and bool(taken.isnan().all())


def test_a_lazy_capture_asks_the_device_for_its_memory(monkeypatch):
    model = on_device()
    graphed = graph(model, captured=False, capture="lazy")
    ids = tokens(3).cuda()
    with torch.no_grad():
        for _ in range(3):
            graphed(ids)
        assert graphed.stats.captured == (4,)
        total = torch.cuda.mem_get_info()[1]
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device=None: (0, total))
        for _ in range(3):
            assert_equal(graphed(tokens(7).cuda()), model(tokens(7).cuda()))
    assert graphed.stats.captured == (4,) and graphed.stats.reasons["out_of_memory"] == 1
