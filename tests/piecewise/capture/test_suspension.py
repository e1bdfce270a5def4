"""suspend() and resume(): all graph memory given back, and the same graphs again without a new trace."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from inspection import inspect
from state_models import BUCKETS, HIDDEN, assert_equal, before_each_attend, graph, new_model, serve, tokens
from torch import nn

import boundary_ops
import piecewise
from boundary_ops.declare import registry, rows
from piecewise.capture import model_calls as signatures
from piecewise.errors.capture import NotSuspended, StillSuspended
from runners.piecewise_runner import PiecewiseRunner
from runners.state.state_check import StateFacts

CALLS = (1, 3, 4, 5, 12, 16)


@pytest.fixture
def model():
    return new_model()


@pytest.fixture
def traces(monkeypatch):
    """How often a model was traced."""
    counted = []
    make = signatures.trace_model

    def trace_model(*args, **kwargs):
        counted.append(None)
        return make(*args, **kwargs)

    monkeypatch.setattr(signatures, "trace_model", trace_model)
    return counted


def weak(storages):
    return [torch.multiprocessing.reductions.StorageWeakRef(storage) for storage in storages]


def test_I9_suspend_gives_all_memory_back_and_calls_are_right(model):
    graphed = graph(model)
    graphed.capture(tokens(7).int())
    serve(graphed, tokens(5))
    store = inspect(graphed)
    memory = [*store.pool.arena._chunks, *store.buffers._storages.values()]
    held = weak([each.untyped_storage() for each in memory])
    del memory
    tapes = [weakref.ref(tape) for tape in store.pool.graphs]
    graphed.suspend()
    gc.collect()
    assert store.pool is None and store.buffers.allocated_bytes == 0 and graphed.stats.captured == ()
    assert all(storage.expired() for storage in held) and not any(tape() for tape in tapes)
    assert [serve(graphed, ids) for ids in (tokens(5), tokens(5).int(), tokens(0))] == ["suspended"] * 3


def test_resume_captures_the_same_buckets_and_signatures_without_a_trace(model, traces):
    graphed = graph(model, max_signatures=2)
    graphed.capture(tokens(7).int())
    before = len(traces)
    graphed.suspend()
    report = graphed.resume()
    assert report.captured == BUCKETS == graphed.stats.captured and len(traces) == before
    assert [serve(graphed, tokens(size)) for size in CALLS] == ["replay"] * len(CALLS)
    assert serve(graphed, tokens(5).int()) == "replay"


def test_resume_brings_back_what_was_captured_and_no_more(model):
    graphed = graph(model, captured=False, capture="lazy")
    for _ in range(3):
        serve(graphed, tokens(3))
    serve(graphed, tokens(7))
    graphed.suspend()
    assert [serve(graphed, tokens(7)) for _ in range(4)] == ["suspended"] * 4, "nothing is captured meanwhile"
    assert graphed.resume().captured == (4,)
    assert [serve(graphed, tokens(7)) for _ in range(2)] == ["not_captured", "replay"], "third call in all"


def test_I5_a_window_captures_nothing_while_suspended(model):
    graphed = graph(model)
    graphed.suspend()
    with piecewise.capture_window():
        assert serve(graphed, tokens(5)) == "suspended"
        assert serve(graphed, tokens(5).int()) == "suspended"
    assert inspect(graphed).pool is None


def move_away_and_back(model):
    """As a trainer does: weights leave their memory and come back elsewhere."""
    away = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    for parameter, values in zip(model.parameters(), away, strict=True):
        parameter.data = values.mul_(2)


def rebind(model):
    model.projection.weight = nn.Parameter(model.projection.weight.detach() * 2)


def load_by_assignment(model):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)


def swap(model):
    torch.utils.swap_tensors(model.projection.weight, nn.Parameter(model.projection.weight.detach() * 2))


def reallocate_the_cache(model):
    model.block.cache = torch.zeros_like(model.block.cache)


@pytest.mark.parametrize(
    "move",
    [move_away_and_back, rebind, load_by_assignment, swap, reallocate_the_cache],
    ids=lambda f: f.__name__,
)
def test_I4_tensors_that_moved_meanwhile_need_no_new_trace_and_the_old_are_not_held(model, traces, move):
    graphed = graph(model)
    with torch.no_grad():
        before = graphed(tokens(5)).clone()
    count = len(traces)
    graphed.suspend()
    old = weak([tensor.untyped_storage() for tensor in (*model.parameters(), model.block.cache)])
    with torch.no_grad():
        move(model)
    gc.collect()
    now = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), model.block.cache)}
    assert all(storage.expired() or storage.cdata in now for storage in old), "what left is held by nobody"
    assert graphed.resume().captured == BUCKETS and len(traces) == count
    assert [serve(graphed, tokens(size)) for size in CALLS] == ["replay"] * len(CALLS)
    if move is not reallocate_the_cache:
        with torch.no_grad():
            assert not torch.equal(graphed(tokens(5)), before)


def change_a_flag(model):
    model.projection.train()


def add_a_hook(model):
    model.projection.register_forward_hook(lambda module, args, out: out * 2)


def replace_a_module(model):
    model.projection = nn.Linear(HIDDEN, model.projection.out_features, bias=False)


def change_the_dtype(model):
    model.to(torch.float64)
    model.block.cache = model.block.cache.double()


def transpose_a_weight(model):
    model.block.o.weight.data = model.block.o.weight.data.t()


@pytest.mark.parametrize(
    "change",
    [change_a_flag, add_a_hook, replace_a_module, change_the_dtype, transpose_a_weight],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("when", ["before", "while suspended"])
def test_I10_a_model_that_changed_is_traced_again(model, traces, change, when):
    graphed = graph(model)
    count = len(traces)
    if when == "before":
        change(model)
    graphed.suspend()
    if when != "before":
        change(model)
    assert graphed.resume().captured == BUCKETS
    assert len(traces) > count
    assert [serve(graphed, tokens(size)) for size in CALLS] == ["replay"] * len(CALLS)


def test_I10_weights_that_were_untied_meanwhile_are_traced_again(traces):
    model = new_model(after=lambda model, x: x + nn.functional.linear(x, model.block.o.weight, model.shift))
    model.shift = model.block.o.bias
    graphed = graph(model)
    count = len(traces)
    graphed.suspend()
    model.shift = nn.Parameter(torch.ones(HIDDEN))
    graphed.resume()
    assert len(traces) > count and serve(graphed, tokens(5)) == "replay"


def test_a_bucket_with_a_trace_of_its_own_is_resumed_from_that(traces):
    model = new_model(before=lambda model, x: x * 2 if x.shape[0] % 8 == 0 else x + 1)
    graphed = graph(model, tokens(8), buckets=(8, 12))
    assert len(inspect(graphed).signature.cuts) == 2
    count = len(traces)
    graphed.suspend()
    assert graphed.resume().captured == (8, 12) and len(traces) == count
    assert [serve(graphed, tokens(size)) for size in (8, 12)] == ["replay"] * 2


def test_suspend_twice_is_suspend_once_and_resume_twice_is_an_error(model):
    graphed = graph(model)
    graphed.suspend()
    graphed.suspend()
    assert graphed.resume().captured == BUCKETS
    with pytest.raises(NotSuspended, match=r"(?s)resume\(\).*not suspended.*Rule:.*Fix:"):
        graphed.resume()
    assert serve(graphed, tokens(5)) == "replay"


def test_suspend_before_any_capture(model):
    graphed = graph(model, captured=False)
    graphed.suspend()
    assert serve(graphed, tokens(5)) == "suspended"
    assert graphed.resume() is None
    assert serve(graphed, tokens(5)) == "not_captured"
    assert graphed.capture(tokens(7)).ok


@pytest.mark.parametrize("method", ["capture", "refresh"])
def test_a_capture_while_suspended_is_an_error(model, method):
    graphed = graph(model)
    graphed.suspend()
    with pytest.raises(StillSuspended, match=rf"(?s){method}\(\) while suspended.*Rule:.*Fix:.*resume"):
        getattr(graphed, method)(*([tokens(7)] if method == "capture" else []))
    assert inspect(graphed).pool is None
    assert graphed.resume().captured == BUCKETS


def test_release_while_suspended_gives_the_traces_up_too(model):
    graphed = graph(model)
    graphed.suspend()
    graphed.release()
    assert serve(graphed, tokens(5)) == "released" and graphed.report().plans == ()
    with pytest.raises(NotSuspended):
        graphed.resume()
    assert graphed.capture(tokens(7)).ok and serve(graphed, tokens(5)) == "replay"


def test_suspend_after_release_stays_released(model):
    graphed = graph(model)
    graphed.release()
    graphed.suspend()
    assert graphed.resume() is None
    assert serve(graphed, tokens(5)) == "released"


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_suspended_module_is_one_without_graphs(model, how):
    graphed = graph(model)
    graphed.suspend()
    copied = copy.deepcopy(graphed) if how == "deepcopy" else pickle.loads(pickle.dumps(graphed))
    assert serve(copied, tokens(5)) == "not_captured"
    assert copied.capture(tokens(7)).ok
    assert serve(graphed, tokens(5)) == "suspended" and graphed.resume().ok
    with torch.no_grad():
        assert_equal(copied(tokens(5)), graphed(tokens(5)))


def test_an_enabled_model_is_suspended_in_place_and_disable_ends_it(model):
    graphed = piecewise.enable(model, buckets=BUCKETS, progress=False)
    graphed.capture(tokens(7))
    graphed.suspend()
    with torch.no_grad():
        model(tokens(5))
        assert graphed.stats.reasons == {"suspended": 1}
        graphed.resume()
        model(tokens(5))
        assert graphed.stats.replays == 1
    graphed.suspend()
    piecewise.disable(model)
    with pytest.raises(NotSuspended):
        graphed.resume()


@pytest.mark.parametrize("method", ["suspend", "resume"])
def test_I5_not_inside_a_call(model, method):
    graphed = graph(model)
    errors = []

    def inside():
        try:
            getattr(graphed, method)()
        except piecewise.StateError as error:
            errors.append(str(error))

    with before_each_attend(inside), torch.no_grad():
        graphed(tokens(5))
    assert len(errors) == 1 and f"{method}() inside a call" in errors[0]
    assert serve(graphed, tokens(5)) == "replay"


def test_I7_suspend_waits_for_a_call_in_another_thread(model):
    graphed = graph(model)
    inside, may_go_on, results = threading.Event(), threading.Event(), []

    def wait():
        if threading.current_thread() is caller:
            inside.set()
            assert may_go_on.wait(30)

    def call():
        with torch.no_grad():
            results.append(graphed(tokens(5)))

    caller = threading.Thread(target=call)
    suspender = threading.Thread(target=graphed.suspend)
    with before_each_attend(wait):
        caller.start()
        assert inside.wait(30)
        suspender.start()
        suspender.join(0.2)
        assert suspender.is_alive(), "the call reads the memory"
        may_go_on.set()
        caller.join()
        suspender.join()
    with torch.no_grad():
        assert_equal(results[0], model(tokens(5)))
    assert graphed.stats.replays == 1 and serve(graphed, tokens(5)) == "suspended"


def test_resume_that_fails_stays_suspended_and_can_be_repeated(model):
    graphed = graph(model)
    graphed.capture(tokens(7).int())
    graphed.suspend()

    def broken(module, args, out):
        module.calls = out
        return out

    hook = model.projection.register_forward_hook(broken)
    with pytest.raises(piecewise.TraceError):
        graphed.resume()
    hook.remove()
    assert serve(graphed, tokens(5)) == "suspended" and inspect(graphed).pool is None
    assert graphed.resume().captured == BUCKETS
    assert [serve(graphed, ids) for ids in (tokens(5), tokens(5).int())] == ["replay"] * 2


def failing_captures(monkeypatch, error, *, after=0):
    """Captures of a segment raise `error`, all but the first `after`."""
    seen, capture = [], PiecewiseRunner.capture

    def fail(self, *args, **kwargs):
        seen.append(None)
        if len(seen) > after:
            raise error
        return capture(self, *args, **kwargs)

    monkeypatch.setattr(PiecewiseRunner, "capture", fail)


@pytest.mark.parametrize("error", [RuntimeError("no room"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("after", [0, 4])
def test_I8_a_capture_that_fails_in_resume_leaves_everything_suspended(model, monkeypatch, error, after):
    graphed = graph(model, strict=True)
    graphed.capture(tokens(7).int())
    graphed.suspend()
    before = str(graphed.report())
    with monkeypatch.context() as patch:
        failing_captures(patch, error, after=after)
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            graphed.resume()
    assert inspect(graphed).pool is None and graphed.stats.captured == ()
    again = str(graphed.report())
    assert again.count("suspended") == before.count("suspended")
    assert serve(graphed, tokens(5)) == "suspended"
    assert graphed.resume().captured == BUCKETS
    assert [serve(graphed, ids) for ids in (tokens(5), tokens(5).int())] == ["replay"] * 2


def test_I10_a_model_that_changed_while_a_failed_resume_waits_is_traced_again(model, traces, monkeypatch):
    graphed = graph(model, strict=True)
    graphed.suspend()
    with monkeypatch.context() as patch:
        failing_captures(patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            graphed.resume()
    traces.clear()
    model.projection.bias = None
    assert graphed.resume().ok and traces
    assert serve(graphed, tokens(5)) == "replay"


def test_I6_a_resume_that_fails_at_a_call_is_told_once(model, monkeypatch):
    graphed = graph(model, strict=True)
    graphed.suspend()
    inspect(graphed).store.resume(None)
    with monkeypatch.context() as patch, torch.no_grad():
        failing_captures(patch, RuntimeError("no room"))
        with pytest.raises(RuntimeError, match="no room"):
            graphed(tokens(5))
    assert serve(graphed, tokens(5)) == "capture_failed"
    assert "no room" in str(graphed.report())
    assert graphed.capture(tokens(7)).ok and serve(graphed, tokens(5)) == "replay"


def test_I4_a_weight_that_is_gone_when_a_resume_is_due_is_no_error(model):
    graphed = graph(model)
    graphed.suspend()
    inspect(graphed).store.resume(None)
    model.projection.bias = None
    assert serve(graphed, tokens(5)) == "module_state_changed"
    assert graphed.refresh().ok and serve(graphed, tokens(5)) == "replay"


def test_the_report_says_what_is_suspended(model):
    graphed = graph(model)
    graphed.suspend()
    report = graphed.report()
    assert report.state == "suspended"
    assert [(b.bucket, b.status, b.code) for b in report.captures[0].buckets] == [
        (bucket, "suspended", "suspended") for bucket in sorted(BUCKETS, reverse=True)
    ]
    assert not report.captures[0].ok
    for text in (str(report), report.to_markdown()):
        assert "suspended: the graphs' memory was given back until resume()" in text
    assert '"state": "suspended"' in report.to_json()
    graphed.resume()
    assert graphed.report().state == "captured"


def test_the_progress_bar_says_what_is_done_again(model, monkeypatch):
    told = []

    class Bar:
        def set_description(self, text):
            told.append(text)

        set_postfix_str = update = lambda self, _: None
        close = lambda self: None  # noqa: E731

    monkeypatch.setattr("piecewise.capture.store.progress_bar", lambda total, enabled: Bar())
    graphed = graph(model)
    graphed.suspend()
    assert told == [f"capturing bucket {bucket}" for bucket in (16, 8, 4)]
    graphed.resume()
    assert told[3:] == [f"capturing again: bucket {bucket}" for bucket in (16, 8, 4)]


def test_I10_what_was_captured_under_another_global_state_comes_back_at_a_call_under_it(model, traces):
    graphed = graph(model)

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    with autocast():
        graphed.capture(tokens(7))
    count = len(traces)
    graphed.suspend()
    with autocast():
        graphed.resume()
    assert graphed.report().captures[0].captured == ()
    assert graphed.report().captures[1].captured == BUCKETS
    assert serve(graphed, tokens(5)) == "replay" and graphed.report().captures[0].captured == BUCKETS
    with autocast(), torch.no_grad():
        before = graphed.stats.replays
        torch.testing.assert_close(graphed(tokens(5)), model(tokens(5)), rtol=0.02, atol=0.02)
        assert graphed.stats.replays == before + 1
    assert len(traces) == count


def test_I10_what_waits_for_a_call_and_changed_meanwhile_is_not_captured_from_the_old_trace(model):
    graphed = graph(model)
    graphed.suspend()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert graphed.resume() is None
    change_a_flag(model)
    assert serve(graphed, tokens(5)) == "module_state_changed"
    assert graphed.capture(tokens(7)).captured == BUCKETS and serve(graphed, tokens(5)) == "replay"


def test_I10_a_module_whose_attributes_were_replaced_as_a_whole_is_traced_again(model, traces):
    graphed = graph(model)
    before = len(traces)
    graphed.suspend()
    model.projection.__dict__ = dict(model.projection.__dict__)
    assert graphed.resume().ok and len(traces) == before + 1
    model.projection.train()
    assert serve(graphed, tokens(5)) == "module_state_changed"


@pytest.mark.parametrize("noticed", [False, True], ids=["before any call", "after a call"])
def test_refresh_makes_no_trace_where_weights_moved_alone(model, traces, noticed):
    graphed = graph(model)
    graphed.capture(tokens(7).int())
    before = len(traces)
    model.projection.weight = torch.nn.Parameter(model.projection.weight.detach() * 2)
    if noticed:
        assert serve(graphed, tokens(5)) == "moved_address"
    assert graphed.refresh().captured == BUCKETS and len(traces) == before
    assert [serve(graphed, ids) for ids in (tokens(5), tokens(5).int())] == ["replay", "replay"]


def test_refresh_traces_again_what_reads_a_changed_flag(model, traces):
    graphed = graph(model)
    before = len(traces)
    change_a_flag(model)
    assert graphed.refresh().captured == BUCKETS and len(traces) == before + 1
    assert serve(graphed, tokens(5)) == "replay"


def test_refresh_traces_again_where_no_call_finds_a_change(model, traces):
    graphed = graph(model)
    before = len(traces)
    assert graphed.refresh().captured == BUCKETS and len(traces) == before + 1


def test_a_refresh_that_found_no_change_and_failed_keeps_no_trace_when_repeated(model, traces, monkeypatch):
    graphed = graph(model)
    with monkeypatch.context() as patch:
        failing_captures(patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            graphed.refresh()
    before = len(traces)
    assert graphed.refresh().captured == BUCKETS and len(traces) == before + 1


@torch.library.custom_op("test_suspension::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


@torch.library.custom_op("test_suspension::sum_before", mutates_args=("out",))
def sum_before(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.cumsum(0))


def calls_twice(model, x):
    return twice(x)


def calls_sum_before(model, x):
    out = torch.empty_like(x)
    sum_before(x, out)
    return out


@pytest.fixture
def undeclared(monkeypatch):
    monkeypatch.setattr(rows, "_declared", dict(rows._declared))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


DECLARED = {
    "rows": (calls_twice, lambda: boundary_ops.declare_rows("test_suspension::twice", token_args={"x": 0})),
    "a boundary op": (calls_sum_before, lambda: boundary_ops.register("test_suspension::sum_before")),
}


@pytest.mark.parametrize("what", DECLARED)
@pytest.mark.parametrize("again", ["resume", "refresh"])
@pytest.mark.usefixtures("undeclared")
def test_what_is_declared_of_an_op_takes_effect_where_weights_moved_too(what, again):
    after, declare = DECLARED[what]
    model = new_model(after=after)
    graphed = graph(model)
    (before,) = graphed.report().plans
    assert "eager" in {segment.kind for segment in before.segments}
    if again == "resume":
        graphed.suspend()
    model.projection.weight = nn.Parameter(model.projection.weight.detach() * 2)
    declare()
    assert getattr(graphed, again)().captured == BUCKETS
    (plan,) = graphed.report().plans
    assert "eager" not in {segment.kind for segment in plan.segments}
    assert serve(graphed, tokens(5)) == "replay"


def triples_one_token(model, x):
    return x * 3 if x.shape[0] == 1 and model.triples else x


@pytest.mark.parametrize("again", ["resume", "refresh"])
def test_I10_what_a_branch_of_one_token_alone_asks_for_is_compared(again):
    model = new_model(after=triples_one_token)
    model.triples = False
    graphed = graph(model)
    assert serve(graphed, tokens(1)) == "replay"
    model.triples = True
    assert serve(graphed, tokens(1)) == "module_state_changed"
    assert serve(graphed, tokens(5)) == "replay"
    model.triples = False
    assert serve(graphed, tokens(1)) == "replay"
    for triples, outcome in ((True, "one_token_branch"), (False, "replay")):
        if again == "resume":
            graphed.suspend()
        model.triples = triples
        model.projection.weight = nn.Parameter(model.projection.weight.detach() * 2)
        assert getattr(graphed, again)().captured == BUCKETS
        assert serve(graphed, tokens(1)) == outcome
        assert serve(graphed, tokens(5)) == "replay"


def test_one_token_compares_nothing_that_is_compared_already(model):
    graphed = graph(model)
    assert serve(graphed, tokens(1)) == "replay"
    (signature,) = inspect(graphed).store.signatures
    assert signature.one_token == "" and signature.one_token_facts == StateFacts()
