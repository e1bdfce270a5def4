"""[I8]: warm-up and capture leave no trace, and a failed capture leaves nothing but its reason."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import state_models
import torch
from inspection import inspect
from state_models import BUCKETS, HIDDEN, Model, calls, graph, new_model, serve, tokens
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import boundary_ops
import piecewise
from runners.mode import capturing, in_capture_window
from runners.piecewise_runner import PiecewiseRunner

trouble = {"rows": None, "error": None, "in_capture": False}


def _fragile(x):
    if trouble["rows"] == x.shape[0] and (capturing() is not None or not trouble["in_capture"]):
        raise trouble["error"]
    return x * 2


_library = torch.library.Library("state_failures", "DEF")
_library.define("fragile(Tensor x) -> Tensor")
_library.impl("fragile", _fragile, "CPU")
_library.impl("fragile", lambda x: torch.empty_like(x), "Meta")
_library.define("peeks(Tensor x) -> Tensor")
_library.impl("peeks", lambda x: x * float(x.sum().item() > 1e9) + x, "CPU")
_library.impl("peeks", lambda x: torch.empty_like(x), "Meta")
for name in ("fragile", "peeks"):
    boundary_ops.declare_rows(f"state_failures::{name}", token_args={"x": 0})


@pytest.fixture
def fragile():
    """A model with an op in its second graph segment that fails at 16 rows."""
    trouble.update(rows=16, error=torch.OutOfMemoryError("no room for 16 rows"), in_capture=False)
    yield new_model(after=lambda model, x: torch.ops.state_failures.fragile(x))
    trouble.update(rows=None, error=None)


class Everything(nn.Module):
    """State of each kind; a buffer that graphs count up, and dropout in a submodule."""

    def __init__(self):
        super().__init__()
        self.inner, self.dropout = Model(), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mean", torch.ones(HIDDEN))
        self.items, self.table = [1.0, 2.0], {"a": 1.0}

    def forward(self, ids):
        self.steps.add_(1)
        x = self.inner.embedding(ids) * self.mean * self.items[0] * self.table["a"]
        x = self.dropout(self.inner.block(x))
        self.mean.mul_(0.5).add_(0.5)
        return self.inner.projection(x)


def everything_about(model):
    """Tensors by value and identity, Python state of each module, RNGs and collector settings."""
    tensors = {
        name: (id(tensor), tensor.data_ptr(), tensor.clone(), tensor._version)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    tensors["cache"] = (0, 0, state_models.caches(model)[0].clone(), state_models.caches(model)[0]._version)
    names = {path: {k: id(v) for k, v in vars(module).items()} for path, module in model.named_modules()}
    lists = {path: repr(vars(module)) for path, module in model.named_modules()}
    rng = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        _get_current_dispatch_mode_stack(),
        torch._C._len_torch_function_stack(),
        capturing(),
        in_capture_window(),
    )
    return tensors, (names, lists, rng, gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), modes)


def assert_untouched(model, before):
    tensors, rest = everything_about(model)
    assert rest == before[1]
    assert tensors.keys() == before[0].keys()
    for name, (identity, address, value, _) in tensors.items():
        assert (identity, address) == before[0][name][:2], name
        assert torch.equal(value, before[0][name][2]), name


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("do", ["capture", "explain", "refresh", "one token fails"])
def test_I8_capture_leaves_no_trace(training, do):
    torch.manual_seed(0)
    model = Everything().train(training)
    model.inner.block.cache.fill_(7.0)
    graphed = graph(model, captured=False)
    if do == "refresh":
        graphed.capture(tokens(7))
    before, calls.count = everything_about(model), 0
    if do == "capture":
        assert graphed.capture(tokens(7)).ok
    elif do == "refresh":
        assert graphed.refresh().ok
    elif do == "explain":
        graphed.explain(tokens(7))
    else:
        with pytest.raises(piecewise.TokenDimError):
            graphed.capture(tokens(1))
    assert_untouched(model, before)
    assert calls.count == 0, "boundary ops are not called"


def test_I8_the_kv_pool_is_not_even_touched():
    model = new_model()
    version = model.block.cache._version
    graph(model)
    assert model.block.cache._version == version


def test_I8_the_callers_tensors_carry_no_marks():
    ids = tokens(7)
    before = set(vars(ids))
    graph(new_model(), ids)
    assert set(vars(ids)) == before


def test_I8_dynamo_keeps_nothing_of_a_trace():
    backends = dict(torch._dynamo.eval_frame.cached_backends)
    model = new_model()
    graphed = graph(model)
    assert dict(torch._dynamo.eval_frame.cached_backends) == backends
    gone = weakref.ref(model)
    del model, graphed
    gc.collect()
    assert gone() is None


def test_I8_many_models_trace_in_one_process():
    for seed in range(10):
        torch.manual_seed(seed)
        graphed = graph(Model().eval(), buckets=(4,))
        assert serve(graphed, tokens(3)) == "replay"


def test_I8_a_failed_bucket_is_eager_with_the_reason_and_the_rest_goes_on(fragile):
    graphed = graph(fragile, captured=False)
    before = everything_about(fragile)
    report = graphed.capture(tokens(7))
    assert_untouched(fragile, before)
    assert not report.ok and report.captured == (4, 8)
    (failed,) = [bucket for bucket in report.buckets if bucket.status == "failed"]
    assert failed.bucket == 16 and "no room for 16 rows" in failed.reason
    assert [serve(graphed, tokens(n)) for n in (3, 7)] == ["replay", "replay"]
    trouble["rows"] = None
    assert serve(graphed, tokens(12)) == "out_of_memory"


def test_I8_a_failure_without_a_message_has_a_reason_too(monkeypatch):
    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr("piecewise.capture.build_plan.PlanAssembler.capture", fail)
    report = graph(new_model(), captured=False, allow_eager=True).capture(tokens(7))
    assert [bucket.status for bucket in report.buckets] == ["failed"] * 3
    assert all("AssertionError" in bucket.reason for bucket in report.buckets)


@pytest.mark.parametrize("in_capture", [False, True], ids=["warm-up", "capture"])
def test_I8_a_failed_bucket_leaves_no_graph_and_no_memory(fragile, in_capture):
    trouble["in_capture"] = in_capture  # of the second segment: the first one is recorded already
    graphed = graph(fragile, captured=False, buckets=(16,), allow_eager=True)
    graphed.capture(tokens(7))
    assert inspect(graphed).pool.allocated_bytes == 0
    assert not [tape for tape in inspect(graphed).pool.graphs if not tape.is_reset]
    graphed.release()

    graphed = graph(fragile, captured=False, buckets=(8, 16))
    graphed.capture(tokens(7))
    alone = graph(new_model(after=lambda model, x: x * 2), buckets=(8,))
    assert inspect(graphed).pool.allocated_bytes == inspect(alone).pool.allocated_bytes


def test_I8_a_failed_bucket_can_be_captured_later(fragile):
    graphed = graph(fragile, captured=False)
    graphed.capture(tokens(7))
    trouble["rows"] = None
    assert graphed.capture(tokens(7)).captured == BUCKETS
    assert serve(graphed, tokens(12)) == "replay"
    assert graphed.report().captures[0].ok


def test_I8_a_failure_in_a_later_bucket_leaves_the_earlier_ones(fragile):
    trouble["rows"] = 4
    graphed = graph(fragile, captured=False)
    assert graphed.capture(tokens(7)).captured == (8, 16)
    trouble["rows"] = None
    assert [serve(graphed, tokens(n)) for n in (3, 7, 12)] == ["out_of_memory", "replay", "replay"]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("stop"), SystemExit("stop")], ids=lambda e: type(e).__name__
)
def test_I8_an_interrupt_passes_through_and_leaves_nothing(fragile, error):
    trouble["error"] = error
    graphed = graph(fragile, captured=False)
    before = everything_about(fragile)
    with pytest.raises(type(error)):
        graphed.capture(tokens(7))
    assert_untouched(fragile, before)
    assert inspect(graphed).pool.allocated_bytes == 0
    assert graphed.stats.captured == ()
    assert serve(graphed, tokens(3)) == "not_captured"
    trouble["rows"] = None
    assert graphed.capture(tokens(7)).captured == BUCKETS
    assert serve(graphed, tokens(12)) == "replay"


def test_I8_strict_raises_what_failed_and_keeps_what_was_captured(fragile):
    trouble["rows"] = 8
    graphed = graph(fragile, captured=False, strict=True)
    with pytest.raises(piecewise.CaptureError, match=r"(?s)segment 2.*bucket 8.*no room for 8 rows"):
        trouble["error"] = torch.OutOfMemoryError("no room for 8 rows")
        graphed.capture(tokens(7))
    assert graphed.stats.captured == (16,)
    assert serve(graphed, tokens(12)) == "replay"


def test_I8_an_op_that_reads_back_inside_its_kernel_runs_eagerly():
    graphed = graph(new_model(after=lambda model, x: torch.ops.state_failures.peeks(x)))
    assert serve(graphed, tokens(5)) == "replay"
    (segment,) = [segment for segment in graphed.report().plans[0].segments if segment.kind == "eager"]
    assert segment.reasons[0].code == "not_recordable" and "peeks" in segment.reasons[0].op


def test_I8_strict_names_the_op_and_the_source_line():
    model = new_model(after=lambda model, x: torch.ops.state_failures.peeks(x))
    graphed = graph(model, captured=False, strict=True)
    with pytest.raises(piecewise.CaptureError) as caught:
        graphed.capture(tokens(7))
    text = str(caught.value)
    assert "peeks" in text and "test_no_trace_left.py" in text and "Rule:" in text and "Fix:" in text
    assert serve(graphed, tokens(5)) == "not_captured"


def test_I8_a_trace_that_fails_leaves_no_trace():
    def after(model, x):
        model.calls += 1
        model.log.append(1)
        return x

    model = new_model(after=after)
    model.calls, model.log = 0, []
    graphed = graph(model, captured=False)
    with pytest.raises(piecewise.TraceError):
        graphed.capture(tokens(7))
    assert model.calls == 0 and model.log == []


def test_I8_refresh_that_fails_can_be_repeated():
    model = new_model()
    graphed = graph(model)
    graphed.capture(tokens(7).int())

    def broken(module, args, out):
        module.calls = out
        return out

    hook = model.projection.register_forward_hook(broken)
    with pytest.raises(piecewise.TraceError):
        graphed.refresh()
    assert serve_with_hook(graphed) == "not_captured"
    hook.remove()
    assert graphed.refresh().captured == BUCKETS
    assert [serve(graphed, ids) for ids in (tokens(5), tokens(5).int())] == ["replay", "replay"]


@pytest.mark.parametrize("at", [1, 9], ids=["first signature", "second signature"])
def test_I8_refresh_whose_capture_is_interrupted_can_be_repeated(monkeypatch, at):
    graphed = graph(new_model(), strict=True)
    graphed.capture(tokens(7).int())
    counted, capture = [], PiecewiseRunner.capture

    def interrupted(self, *args, **kwargs):
        counted.append(None)
        if len(counted) == at + 1:
            raise KeyboardInterrupt
        return capture(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PiecewiseRunner, "capture", interrupted)
        with pytest.raises(KeyboardInterrupt):
            graphed.refresh()
    second = "replay" if at > 8 else "not_captured"
    assert serve(graphed, tokens(5)) == second
    assert graphed.refresh().captured == BUCKETS
    assert [serve(graphed, ids) for ids in (tokens(5), tokens(5).int())] == ["replay", "replay"]


def serve_with_hook(graphed):
    outcome = serve(graphed, tokens(5))
    del graphed.model.projection.calls
    return outcome
