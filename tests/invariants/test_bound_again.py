"""[I7]: ``self.load += x`` writes a tensor and binds the same one again; a replay does as much."""

from __future__ import annotations

import gc
import weakref

import pytest
import state_models
import torch
from state_models import HIDDEN, graph, new_model, serve, tokens

import piecewise
from runners.stats import FallbackReason

LOAD = torch.zeros(HIDDEN)


def adds_to_a_buffer(m, x):
    m.load += x.sum(0)
    return x * m.load


def adds_to_an_attribute(m, x):
    m.plain *= 0.5
    m.plain += 1
    return x + m.plain


def adds_to_an_item(m, x):
    m.loads[1] -= 1
    return x + m.loads[1]


def adds_to_an_entry(m, x):
    m.table["a"] /= 2
    return x + m.table["a"]


def adds_to_a_global(m, x):
    global LOAD
    LOAD += 1
    return x + LOAD


def assigns_what_a_method_returns(m, x):
    m.load = m.load.add_(1)
    return x + m.load


def adds_to_a_weight(m, x):
    m.block.norm.weight += 1
    return x


def reads_it_before_and_after(m, x):
    x = x + m.load
    m.load += 1
    return x * m.load


def binds_a_result(m, x):
    m.load = m.load + 1
    return x


def binds_a_view(m, x):
    m.load = m.load[:]
    return x * m.load


def binds_it_elsewhere(m, x):
    m.load += 1
    m.plain = m.load
    return x


def binds_another(m, x):
    m.load += 1
    m.load, m.plain = m.plain, m.load
    return x


def with_loads(before):
    model = new_model(before=before)
    model.register_buffer("load", torch.ones(HIDDEN))
    model.plain, model.loads = torch.ones(HIDDEN), [None, torch.ones(HIDDEN)]
    model.table = {"a": torch.ones(HIDDEN)}
    return model.requires_grad_(False).eval()


def tensors_of(model):
    held = [model.plain, model.loads[1], model.table["a"], LOAD, model.block.cache]
    return [*model.parameters(), *model.buffers(), *held]


SERVED = [
    adds_to_a_buffer, adds_to_an_attribute, adds_to_an_item, adds_to_an_entry, adds_to_a_global,
    assigns_what_a_method_returns, adds_to_a_weight, reads_it_before_and_after,
]  # fmt: skip


@pytest.mark.parametrize("before", SERVED, ids=lambda before: before.__name__)
def test_I7_a_tensor_that_forward_binds_again_is_written_and_stays(before):
    model = with_loads(before)
    start = [tensor.clone() for tensor in tensors_of(model)]
    graphed = graph(model, buckets=(8,))
    state_models.assert_equal(tensors_of(model), start)
    tensors = tensors_of(model)
    with torch.no_grad():
        for count in range(3):
            start = [tensor.clone() for tensor in tensors]
            want = model(tokens(5))
            after = [tensor.clone() for tensor in tensors]
            for tensor, value in zip(tensors, start, strict=True):
                tensor.copy_(value)
            got = graphed(tokens(5))
            state_models.assert_equal(got, want)
            state_models.assert_equal(tensors, after)
            assert all(map(lambda now, seen: now is seen, tensors_of(model), tensors))
            assert graphed.stats.replays == count + 1
        assert graphed.verify(tokens(5)).ok


@pytest.mark.parametrize(
    "before",
    [binds_a_result, binds_a_view, binds_it_elsewhere, binds_another],
    ids=lambda each: each.__name__,
)
def test_I8_what_binds_another_tensor_is_refused(before):
    model = with_loads(before)
    tensors = tensors_of(model)
    with pytest.raises(piecewise.TraceError, match=r"(?s)changes (load|plain).*Rule:.*Fix:.*in place"):
        graph(model)
    assert all(map(lambda now, seen: now is seen, tensors_of(model), tensors))


def binds_what_is_there(m, x):
    m.plain = m.load
    return x * m.load


def binds_what_no_graph_reads(m, x):
    m.plain = m.load
    return x * 2


def puts_what_is_there(m, x):
    m.loads[0] = m.load
    return x * m.load


@pytest.mark.parametrize(
    "before",
    [binds_what_is_there, binds_what_no_graph_reads, puts_what_is_there],
    ids=lambda each: each.__name__,
)
def test_I8_what_forward_binds_and_was_there_is_compared(before):
    model = with_loads(before)
    model.plain = model.loads[0] = model.load
    graphed = graph(model, buckets=(8,))
    assert serve(graphed, tokens(5)) == "replay"
    model.plain, model.loads[0] = torch.ones(HIDDEN), torch.ones(HIDDEN)
    with torch.no_grad():
        graphed(tokens(5))
    assert graphed.stats.reasons == {FallbackReason.MODULE_STATE_CHANGED: 1}
    written = model.loads[0] if before is puts_what_is_there else model.plain
    assert written is model.load
    model.plain = model.loads[0] = model.load
    assert serve(graphed, tokens(5)) == "replay"


def test_I8_a_value_that_forward_sets_to_what_it_is_is_compared():
    def sets_its_mood(m, x):
        m.mood = "calm"
        return x

    model = with_loads(sets_its_mood)
    model.mood = "calm"
    graphed = graph(model, buckets=(8,))
    assert serve(graphed, tokens(5)) == "replay"
    model.mood = "loud"
    with torch.no_grad():
        graphed(tokens(5))
    assert model.mood == "calm" and graphed.stats.reasons == {FallbackReason.MODULE_STATE_CHANGED: 1}


def test_a_suspended_model_holds_no_tensor_that_forward_binds():
    model = with_loads(binds_what_no_graph_reads)
    model.plain = model.load
    graphed = graph(model, buckets=(8,))
    old = weakref.ref(model.load)
    graphed.suspend()
    model.plain = model.load = torch.ones(HIDDEN)
    gc.collect()
    assert old() is None
    graphed.resume()
    assert serve(graphed, tokens(5)) == "replay"
