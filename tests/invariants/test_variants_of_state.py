"""States of the model that come and go between calls, adapters above all: each is captured once, and replays
when it is back [I4, I10]."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from adapted_models import STATES, adapted, come_to
from inspection import inspect
from state_models import HIDDEN, graph, new_model, serve, tokens
from torch import nn

import piecewise
from piecewise.trace.state.state import adapters_in_use


def in_a_row(model, x):
    for part in model.parts.values():
        x = part(x)
    return x


def test_I8_a_capture_that_fails_leaves_no_memory_to_what_gave_way():
    def breaks(model, x):
        if model.level == 2:
            torch._dynamo.graph_break()
        return x * model.level

    model = new_model(before=breaks)
    model.level = 1
    graphed = graph(model, buckets=(8,), max_signatures=1)
    model.level = 2
    with pytest.raises(piecewise.TraceError):
        graphed.capture(tokens(7))
    assert graphed.stats.captured == () and inspect(graphed).pool is None
    model.level = 1
    assert serve(graphed, tokens(5)) == "not_captured"
    assert graphed.capture(tokens(7)).ok
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_the_order_of_submodules_counts():
    model = new_model(before=in_a_row)
    model.parts = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN) for name in ("a", "b")}).eval()
    graphed = graph(model, buckets=(8,))
    assert serve(graphed, tokens(5)) == "replay"
    model.parts["a"] = model.parts.pop("a")
    assert serve(graphed, tokens(5)) == "module_state_changed"
    model.parts["b"] = model.parts.pop("b")
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_each_state_that_was_captured_replays_when_it_is_back():
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(8,))
    for number, state in enumerate(STATES):
        come_to(state, each)
        assert adapters_in_use(model) == state
        assert serve(graphed, tokens(5)) == ("module_state_changed" if number else "not_captured")
        assert graphed.capture(tokens(7)).ok
        assert serve(graphed, tokens(5)) == "replay"
        assert graphed.capture(tokens(7)).ok
        assert len(inspect(graphed).signatures) == number + 1, "captured once"
    for _ in range(2):
        for state in STATES:
            come_to(state, each)
            assert [serve(graphed, tokens(n)) for n in (3, 8)] == ["replay", "replay"], state
            with torch.no_grad():
                assert graphed.verify(tokens(6)).ok
            graphed.check_addresses().require()
    come_to("adapter b", each)
    text = str(graphed.report())
    for number, state in enumerate(STATES):
        waits = "" if state == "adapter b" else "; kept for its return: "
        assert f"signature {number} ({state}{waits}" in text
        assert f"## Signature {number} ({state}{waits}" in graphed.report().to_markdown()
    assert [each["adapters"] for each in graphed.report().asdict()["captures"]] == list(STATES)
    each("activate", "b", "a")
    assert serve(graphed, tokens(5)) == "module_state_changed", "nobody captured them in this order"


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_I10_at_most_max_signatures_are_kept_and_the_one_used_longest_ago_gives_way(limit):
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(8,), max_signatures=limit)
    states = ["adapter a", "adapter b", "no adapter"]
    for state in states:
        come_to(state, each)
        graphed.capture(tokens(7))
        assert serve(graphed, tokens(5)) == "replay"
    kept = [capture.adapters for capture in graphed.report().captures]
    assert kept == states[-limit:]
    if limit < 3:
        with pytest.raises(piecewise.StateError, match=r"(?s)at most.*Rule:.*Fix:"):
            for extra in range(limit):  # another kind of call is no variant
                graphed.capture(tokens(7), **{f"unknown{extra}": 1.0})
    for state in states:
        come_to(state, each)
        assert serve(graphed, tokens(5)) == ("replay" if state in kept else "module_state_changed")
    if limit == 3:
        come_to("adapter a", each)
        assert serve(graphed, tokens(5)) == "replay"
        come_to("adapters a, b", each)
        graphed.capture(tokens(7))
        kept = [capture.adapters for capture in graphed.report().captures]
        assert kept == ["adapter a", "no adapter", "adapters a, b"], "b was used longest ago"


def test_I10_kinds_of_call_and_states_are_independent():
    model, each = adapted(after=lambda model, x, scale=None: x if scale is None else x * scale)
    graphed = graph(model, captured=False, buckets=(8,))
    kinds = [{}, {"scale": torch.full((1,), 2.0)}]
    for state in ("adapter a", "no adapter"):
        come_to(state, each)
        for kind in kinds:
            graphed.capture(tokens(7), **kind)
    for state in ("adapter a", "no adapter", "adapter a"):
        come_to(state, each)
        for kind in (*kinds, *reversed(kinds)):
            assert serve(graphed, tokens(5), **kind) == "replay"
    assert len(inspect(graphed).signatures) == 4


def test_I5_a_capture_window_captures_the_state_of_now():
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(8,))
    with torch.no_grad(), piecewise.capture_window():
        for state in ("adapter a", "adapter b"):
            come_to(state, each)
            graphed(tokens(5))
    for state in ("adapter a", "adapter b"):
        come_to(state, each)
        assert serve(graphed, tokens(5)) == "replay"
    come_to("no adapter", each)
    assert serve(graphed, tokens(5)) == "module_state_changed", "and none outside of it"


def test_I8_what_a_call_writes_is_written_once_whatever_was_tried_first():
    model, each = adapted(before=lambda model, x: x * model.calls.add_(1))
    model.register_buffer("calls", torch.zeros(1))
    graphed = graph(model, captured=False, buckets=(8,))
    states = ["adapter a", "adapter b"]
    for state in states:
        come_to(state, each)
        graphed.capture(tokens(7))
    for number in range(6):
        come_to(states[number % 2], each)
        model.calls.fill_(number)
        with torch.no_grad():
            got = graphed(tokens(5))
            assert model.calls.item() == number + 1
            model.calls.fill_(number)
            torch.testing.assert_close(got, model(tokens(5)))
    assert graphed.stats.replays == 6


def test_I4_values_of_an_adapter_change_in_place_and_moved_weights_end_all_variants():
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(8,))
    for state in ("adapter a", "adapter b"):
        come_to(state, each)
        graphed.capture(tokens(7))
    with torch.no_grad():
        model.projection.up["a"].weight.mul_(3)
        model.projection.base.weight.mul_(2)
    for state in ("adapter a", "adapter b"):
        come_to(state, each)
        assert serve(graphed, tokens(5)) == "replay"
    old = weakref.ref(model.projection.base.weight.untyped_storage())
    model.projection.base.weight.data = model.projection.base.weight.data.clone()
    assert serve(graphed, tokens(5)) == "moved_address"
    gc.collect()
    assert inspect(graphed).pool is None and old() is None, "nothing holds the old weights"
    for state in ("adapter a", "adapter b"):
        come_to(state, each)
        graphed.capture(tokens(7))
        assert serve(graphed, tokens(5)) == "replay"
    assert len(inspect(graphed).signatures) == 2, "in the place of those that were given up"


def test_I4_a_variant_whose_adapter_was_deleted_gives_way_at_the_next_capture():
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(8,))
    for state in ("adapter b", "adapter a"):
        come_to(state, each)
        graphed.capture(tokens(7))
    gone = weakref.ref(model.projection.up["b"].weight)
    for layer in (model.block.o, model.projection):
        del layer.up["b"], layer.down["b"]
    assert serve(graphed, tokens(5)) == "module_state_changed", "forward may look through the names"
    graphed.capture(tokens(7))
    gc.collect()
    assert gone() is None and serve(graphed, tokens(5)) == "replay"


def test_refresh_captures_the_state_of_now_once():
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(4, 8))
    for state in ("adapter a", "adapter b", "no adapter"):
        come_to(state, each)
        graphed.capture(tokens(7))
    assert graphed.refresh().captured == (4, 8)
    assert [capture.adapters for capture in graphed.report().captures] == ["no adapter"]
    assert [serve(graphed, tokens(n)) for n in (3, 7)] == ["replay", "replay"]


def test_suspended_variants_come_back_without_a_trace_each_in_its_state():
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(8,))
    states = ["adapter a", "adapter b", "no adapter"]
    for state in states:
        come_to(state, each)
        graphed.capture(tokens(7))
    traces = {signature.adapters: signature.traced for signature in inspect(graphed).signatures}
    for _ in range(2):
        come_to("adapter b", each)
        graphed.suspend()
        assert serve(graphed, tokens(5)) == "suspended"
        graphed.resume()
        for state in ("adapter b", "no adapter", "adapter a", "adapter b"):
            come_to(state, each)
            assert serve(graphed, tokens(5)) == "replay", state
    assert {each.adapters: each.traced for each in inspect(graphed).signatures} == traces, "no new trace"
    graphed.suspend()
    come_to("adapters a, b", each)
    graphed.resume()
    assert serve(graphed, tokens(5)) == "replay", "traced again, as nothing was captured in this state"
    come_to("adapter a (merged)", each)
    graphed.capture(tokens(7))
    for state in ("adapter a", "no adapter", "adapters a, b", "adapter a (merged)"):
        come_to(state, each)
        assert serve(graphed, tokens(5)) == "replay", "all but the one that was used last, and traced again"


def test_a_variant_that_waits_since_a_resume_is_captured_by_capture_too():
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(8,))
    for state in ("adapter a", "adapter b"):
        come_to(state, each)
        graphed.capture(tokens(7))
    graphed.suspend()
    graphed.resume()
    come_to("adapter a", each)
    traced = {id(signature.traced) for signature in inspect(graphed).signatures}
    assert graphed.capture(tokens(7)).captured == (8,)
    assert {id(signature.traced) for signature in inspect(graphed).signatures} == traced
    assert serve(graphed, tokens(5)) == "replay"


def test_a_bucket_that_one_variant_lacks_is_served_by_another():
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(4, 8))
    for state in ("adapter a", "adapter b"):
        come_to(state, each)
        graphed.capture(tokens(7))
    inspect(graphed).signature.take_back(4)
    assert inspect(graphed).signature.adapters == "adapter b"
    assert serve(graphed, tokens(3)) == "not_captured"
    come_to("adapter a", each)
    assert serve(graphed, tokens(3)) == "replay"


def test_modes_of_the_model_are_states_too():
    model = new_model(before=lambda model, x: x * 2 if model.training else x * model.factor)
    model.factor = 3.0
    graphed = graph(model, buckets=(8,))
    model.train()
    graphed.capture(tokens(7))
    model.eval()
    model.factor = 5.0
    graphed.capture(tokens(7))
    for factor, mode in [(3.0, False), (5.0, False), (5.0, True), (3.0, False), (5.0, False)]:
        model.factor = factor
        model.train(mode)
        assert serve(graphed, tokens(5)) == "replay"
    assert [capture.adapters for capture in graphed.report().captures] == [""] * 3


@pytest.mark.parametrize("how", ["enabled", "fused"])
def test_I6_states_come_and_go_at_random(how):
    model, each = adapted()
    options = {"buckets": (4, 8), "max_signatures": 3, "progress": False}
    if how == "enabled":
        graphed = piecewise.enable(model, **options)
    else:
        graphed = piecewise.compile(model, **options, fusions=("auto",))
    draw = random.Random(7)
    actions = ["come"] * 8 + ["capture"] * 3 + ["suspend", "update", "move", "add", "refresh"]
    replays = 0
    for step in range(60):
        action = draw.choice(actions)
        if action == "come":
            come_to(draw.choice(list(STATES)), each)
        elif action == "capture":
            graphed.capture(tokens(7))
        elif action == "suspend":
            graphed.suspend()
            assert serve(graphed, tokens(5)) == "suspended"
            graphed.resume()
        elif action == "update":
            with torch.no_grad():
                draw.choice(list(model.parameters())).mul_(0.9)
        elif action == "move":
            weight = draw.choice(list(model.parameters()))
            weight.data = weight.data.clone()
        elif action == "add":
            each("add", f"new{step}")
        else:
            graphed.refresh()
        replays += serve(graphed, tokens(draw.choice([3, 5, 8]))) == "replay"
        assert len(inspect(graphed).signatures) <= 3
    assert replays > 15
