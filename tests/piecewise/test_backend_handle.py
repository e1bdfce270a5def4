"""The handle of a `torch.compile` result: capture, explain and verify; whose it is, and how long it lives."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from inspection import inspect
from small_transformers import VOCAB as WORDS
from small_transformers import attached, call, prompts_of
from test_backend import LAYERS, Model, check_call, ids_of
from torch import nn

import piecewise
from boundary_ops import PrefillBatch
from piecewise.capture.build_plan import PlanAssembler
from piecewise.errors.analysis import FixedTokenCount
from piecewise.errors.api import NoHandle
from piecewise.errors.trace import CompileIsOff
from piecewise.torch_backend import piecewise_backend
from runners.stats import FallbackReason

BUCKETS = [8, 16]
SIZES = (1, 2, 7, 8, 9, 16, 1)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_model(model=None, **arguments):
    model = Model().eval() if model is None else model
    options = {"buckets": BUCKETS, "progress": False, **arguments.pop("options", {})}
    return model, torch.compile(model, backend=piecewise_backend, options=options, **arguments)


def check_replays(model, compiled, sizes=SIZES):
    """Calls at each size equal the model's, and each replays."""
    handle = piecewise.handle(compiled)
    before = handle.stats.replays
    with torch.no_grad():
        for size in sizes:
            check_call(model, compiled, size)
    assert handle.stats.eager_calls == 0, handle.stats.reasons
    assert handle.stats.replays == before + len(sizes)


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_capture_serves_every_count_and_runs_nothing(fullgraph, dynamic):
    model, compiled = compiled_model(fullgraph=fullgraph, dynamic=dynamic)
    handle = piecewise.handle(compiled)
    report = handle.capture(torch.arange(5))
    assert [each.status for each in report.buckets] == ["captured"] * len(BUCKETS)
    assert handle.stats.captured == tuple(BUCKETS) and handle.stats.replays == handle.stats.eager_calls == 0
    assert not any(pool.any() for pool in model.pools()), "the op wrote nothing of the example"
    check_replays(model, compiled)
    assert len(handle.report().plans) == 1


@pytest.mark.parametrize(("fullgraph", "dynamic"), [(True, None), (False, True)])
def test_an_attached_transformers_model_replays_prefill_and_single_tokens(fullgraph, dynamic):
    model, cache = attached("Llama")
    model, compiled = compiled_model(model, fullgraph=fullgraph, dynamic=dynamic)
    handle = piecewise.handle(compiled)
    ids = torch.randint(3, WORDS, (1, 7))
    assert handle.capture(input_ids=ids, position_ids=torch.arange(7)[None]).ok
    lengths = ([5, 4], [1], [3, 2, 7], [1])
    for step, lens in enumerate(lengths):
        prompts = prompts_of(lens)
        got, want = (
            call(
                served,
                PrefillBatch.build(cache, [f"{kind} {step} {i}" for i in range(len(lens))], lens),
                prompts,
            )
            for kind, served in (("graphed", compiled), ("own", model))
        )
        torch.testing.assert_close(got.logits, want.logits)
    assert handle.stats.replays == len(lengths) and handle.stats.eager_calls == 0


def test_a_capture_after_calls_of_a_fixed_size_serves_that_size_too():
    model, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    with torch.no_grad():
        check_call(model, compiled, 5)
        assert handle.stats.reasons == {FallbackReason.STATIC_TOKEN_COUNT: 1}
        handle.capture(torch.arange(5))
        for size in (5, 6):
            check_call(model, compiled, size)
    assert handle.stats.replays == 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_capture_outside_serves_calls_in_inference_mode_whose_tensors_dynamo_compiles_for_again(dynamic):
    model, compiled = compiled_model(dynamic=dynamic)
    handle = piecewise.handle(compiled)
    handle.capture(torch.arange(5))
    outside = torch.arange(6)
    with torch.inference_mode():
        check_replays(model, compiled)
        compiled(outside)
        assert handle.capture(torch.arange(5)).ok
    check_replays(model, compiled)
    assert handle.stats.replays == 2 * len(SIZES) + 1 and len(handle.report().plans) == 1


def test_a_graph_of_another_program_has_a_plan_of_its_own():
    class Switched(Model):
        def forward(self, ids, double=False):
            found = super().forward(ids)
            return {name: x * 2 for name, x in found.items()} if double else found

    model, compiled = compiled_model(Switched().eval())
    handle = piecewise.handle(compiled)
    for double in (False, True):
        handle.capture(torch.arange(5), double=double)
    with torch.no_grad():
        for size in (1, 5, 1):
            once, twice = (compiled(torch.arange(size), double)["logits"] for double in (False, True))
            torch.testing.assert_close(twice, once * 2)
    assert handle.stats.replays == 6 and len(handle.report().plans) == 2


def test_parts_with_the_same_code_have_graphs_of_their_own_weights():
    class Apart(Model):
        def forward(self, ids):
            x = self.embedding(ids)
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = layer(x)
            return {"logits": self.head(x)}

    model, compiled = compiled_model(Apart().eval(), dynamic=True)
    handle = piecewise.handle(compiled)
    with torch.no_grad():
        with piecewise.capture_window():
            check_call(model, compiled, 5)
        for size in (5, 12, 1, 7):
            check_call(model, compiled, size)
    assert handle.stats.replays == 5 * LAYERS and len(handle.report().plans) == LAYERS
    assert handle.stats.eager_calls == 0


def test_an_example_of_one_token_is_enough_once_there_was_a_longer_one():
    model, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    with pytest.raises(FixedTokenCount, match="two or more tokens"):
        handle.capture(torch.arange(1))
    handle.capture(torch.arange(5))
    assert handle.capture(torch.arange(1)).ok and handle.explain(torch.arange(5)).count("graph") == LAYERS + 1
    check_replays(model, compiled)


def test_a_bucket_of_one_token():
    model, compiled = compiled_model(options={"buckets": [1, 8]})
    report = piecewise.handle(compiled).capture(torch.arange(5))
    assert report.ok and {each.bucket for each in report.buckets} == {1, 8}
    check_replays(model, compiled, (1, 2, 1))
    assert piecewise.handle(compiled).stats.calls_by_bucket == {1: 2, 8: 1}


def test_a_bucket_of_one_token_is_captured_lazily_once_a_call_showed_the_program():
    model, compiled = compiled_model(options={"buckets": [1, 8]})
    handle = piecewise.handle(compiled)
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        assert handle.stats.captured == (8,)
        for _ in range(3):
            check_call(model, compiled, 1)
    assert handle.stats.captured == (1, 8) and handle.stats.reasons == {FallbackReason.NOT_CAPTURED: 2}


def test_explain_says_what_the_models_own_plan_says_and_captures_nothing():
    model, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    plan, own = handle.explain(torch.arange(5)), piecewise.explain(model, torch.arange(5))
    for kind in ("graph", "boundary", "eager"):
        assert plan.count(kind) == own.count(kind)
    assert plan.count("graph") == LAYERS + 1 and plan.coverage == own.coverage
    assert handle.report().plans == () and inspect(handle).pool is None
    in_place = piecewise.enable(model, progress=False).explain(torch.arange(5))
    for other in (plan, in_place):
        assert [each.module_path for each in other.segments] == [each.module_path for each in own.segments]


def test_verify_compares_each_size_and_counts_nothing():
    _, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    assert handle.verify(torch.arange(5)).checks[0].path == "not_captured"
    handle.capture(torch.arange(5))
    report = handle.verify(make_inputs=lambda size: ((torch.arange(size),), {}))
    assert report.ok and [each.num_tokens for each in report.checks] == [1, 2, 7, 8, 9, 10, 15, 16]
    assert {each.path for each in report.checks} == {"graph"}
    assert handle.stats.replays == handle.stats.eager_calls == 0


def test_verify_finds_graphs_that_compute_something_else(monkeypatch):
    right = PlanAssembler.function_for

    def wrong(self, segment, bucket):
        function = right(self, segment, bucket)
        return (
            (lambda n, *inputs: tuple(x * 2 for x in function(n, *inputs)))
            if segment.index == 4
            else function
        )

    _, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    with monkeypatch.context() as patch:
        patch.setattr(PlanAssembler, "function_for", wrong)
        handle.capture(torch.arange(5))
    for size in (5, 1):
        found = handle.verify(torch.arange(size)).first_difference
        assert found.cause == "graphs" and found.segment.startswith("segment 4")


def test_two_models_of_one_class_have_graphs_and_lives_of_their_own():
    one, two = compiled_model(), compiled_model()
    handles = [piecewise.handle(compiled) for _, compiled in (one, two)]
    for handle in handles:
        handle.capture(torch.arange(5))
    for size in SIZES:
        check_replays(*one, (size,))
        check_replays(*two, (size,))
    gone = weakref.ref(one[0]), weakref.ref(handles[0])
    del one, handles
    gc.collect()
    assert [ref() for ref in gone] == [None, None], "Dynamo's entry went with the model"
    check_replays(*two)


def test_more_models_than_dynamo_recompiles_for_one_code():
    models = [compiled_model() for _ in range(torch._dynamo.config.recompile_limit + 2)]
    for _, compiled in models:
        piecewise.handle(compiled).capture(torch.arange(5))
    for model, compiled in models:
        check_replays(model, compiled, (3, 1))


def test_calls_of_another_thread_replay_and_its_capture_waits_for_them():
    model, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    errors = []

    def work():
        try:
            handle.capture(torch.arange(5))
            with torch.no_grad():  # the pools are both threads', so results alone are compared with eager
                for size in SIZES:
                    compiled(torch.arange(size))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and handle.stats.replays == 2 * len(SIZES) and handle.stats.eager_calls == 0
    check_replays(model, compiled)


def test_equal_options_share_a_handle_as_they_share_dynamos_graphs():
    model, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    handle.capture(torch.arange(5))
    _, again = compiled_model(model)
    assert piecewise.handle(again) is handle is piecewise.handle(compiled)
    check_replays(model, again)
    _, other = compiled_model(model, options={"buckets": [4]})
    assert piecewise.handle(other) is not handle
    assert piecewise.handle(other).capture(torch.arange(3)).ok


def test_after_a_reset_there_is_a_new_handle_without_anything_of_the_old():
    model, compiled = compiled_model()
    old = piecewise.handle(compiled)
    old.capture(torch.arange(5))
    check_replays(model, compiled)
    torch._dynamo.reset()
    _, again = compiled_model(model)
    new = piecewise.handle(again)
    assert new is not old and new.stats.captured == () and new.stats.replays == 0
    with pytest.raises(NoHandle, match=r"reset\(\) ends"):
        old.capture(torch.arange(5))
    new.capture(torch.arange(5))
    check_replays(model, again)
    assert piecewise.handle(compiled) is new, "the compiled object of before has the new graphs, too"
    gone = weakref.ref(old)
    del old
    gc.collect()
    assert gone() is None


def test_a_handle_holds_no_model():
    model, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    handle.capture(torch.arange(5))
    gone = weakref.ref(model)
    del model, compiled
    handle.release()
    gc.collect()
    assert gone() is None
    with pytest.raises(NoHandle, match="gone.*kept alive"):
        handle.capture(torch.arange(5))


def test_a_capture_after_a_weight_was_rebound_reads_the_new_one():
    model, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    handle.capture(torch.arange(5))
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    assert handle.capture(torch.arange(5)).ok
    check_replays(model, compiled)
    assert len(handle.report().plans) == 1


def test_capture_while_suspended_or_with_dynamo_off_is_an_error():
    _, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    handle.capture(torch.arange(5))
    handle.suspend()
    with pytest.raises(piecewise.StateError, match="suspend"):
        handle.capture(torch.arange(5))
    handle.resume()
    assert handle.capture(torch.arange(5)).ok
    with torch.compiler.set_stance("force_eager"):
        assert {each.status for each in handle.capture(torch.arange(5)).buckets} == {"disabled"}
        with pytest.raises(CompileIsOff):
            handle.explain(torch.arange(5))


def test_whatever_torch_compile_takes_has_a_handle():
    model = Model().eval()

    def function(ids):
        return model(ids)

    in_place = Model().eval()
    in_place.compile(backend=piecewise_backend, options={"buckets": BUCKETS})
    chain = nn.Sequential(Model().eval())
    for given, compiled in (
        (model, compiled_model(function)[1]),
        (model, compiled_model(model.forward)[1]),
        (chain[0], compiled_model(chain)[1]),
        (in_place, in_place),
    ):
        handle = piecewise.handle(compiled)
        assert handle.capture(torch.arange(5)).ok and handle.verify(torch.arange(5)).ok
        with torch.no_grad():
            want = [pool.zero_() for pool in given.pools()] and given.forward(torch.arange(3))
            torch.testing.assert_close(compiled(torch.arange(3)), want)
        assert handle.stats.replays == 1
