"""[I6]: a fallback changes speed, never results, and has exactly one counted reason of the closed set."""

from __future__ import annotations

import pytest
import torch
from inspection import inspect
from paged_models import captured_paged
from state_models import (
    HIDDEN,
    before_each_attend,
    calls,
    graph,
    new_model,
    serve,
    serve_as_is,
    tokens,
    what_was_counted,
)
from torch import nn

import boundary_ops
import piecewise
from boundary_ops import PrefillBatch
from runners.stats import FallbackReason


class Marked(torch.Tensor):
    pass


def plain():
    return graph(new_model())


def zero_tokens(graphed):
    return serve(graphed, tokens(0))


def above_the_largest(graphed):
    return serve(graphed, tokens(17))


def padded_too_much(graphed):
    return serve(graphed, tokens(9))


def not_captured(graphed):
    return serve(graphed, tokens(5))


def unseen(graphed):
    return serve(graphed, tokens(5).int())


def too_many_kinds(graphed):
    with piecewise.capture_window():
        return serve(graphed, tokens(5).int())


def subclass(graphed):
    return serve(graphed, tokens(5).as_subclass(Marked))


def mismatch(graphed):
    return serve(graphed, tokens(5), shift=torch.ones(1, HIDDEN))


def with_grad(graphed):
    with torch.enable_grad():
        return serve_as_is(graphed, tokens(5))


def in_an_eager_block(graphed):
    with piecewise.eager_only():
        return serve(graphed, tokens(5))


def one_token(graphed):
    return serve(graphed, tokens(1))


def moved(graphed):
    graphed.model.projection.weight = nn.Parameter(graphed.model.projection.weight.detach().clone())
    return serve(graphed, tokens(5))


def changed(graphed):
    graphed.model.projection.train()
    return serve(graphed, tokens(5))


def other_global_state(graphed):
    torch.set_default_dtype(torch.float64)
    try:
        return serve(graphed, tokens(5))
    finally:
        torch.set_default_dtype(torch.float32)


def released(graphed):
    graphed.release()
    return serve(graphed, tokens(5))


def suspended(graphed):
    graphed.suspend()
    return serve(graphed, tokens(5))


def under_a_stance(graphed):
    with torch.compiler.set_stance("force_eager"):
        return serve(graphed, tokens(5))


def without_memory(graphed):
    (signature,) = inspect(graphed).signatures
    signature.served.pop(8)
    signature.refuse(8, FallbackReason.OUT_OF_MEMORY, "there was none")
    return serve(graphed, tokens(5))


def transformed(graphed):
    before = graphed.stats.snapshot()
    with torch.no_grad():
        x = torch.randn(2, 5, HIDDEN)
        got, want = torch.vmap(graphed)(x), torch.vmap(graphed.model)(x)
    torch.testing.assert_close(got, want)
    return what_was_counted(graphed, before)


def called_from_inside(graphed):
    before, inner = graphed.stats.snapshot(), []

    def call():
        if not inner:
            inner.append(None)
            inner.append(graphed(tokens(3, seed=4)))

    with torch.no_grad():
        want = graphed.model(tokens(3, seed=4))
        with before_each_attend(call):
            graphed(tokens(5))
        torch.testing.assert_close(inner[1], want)
    assert graphed.stats.replays == before.replays + 1, "the outer call"
    assert sum(graphed.stats.reasons.values()) == graphed.stats.eager_calls == 1
    (reason,) = graphed.stats.reasons
    return reason.value


def at_a_failed_bucket(graphed):
    return serve(graphed, tokens(5))


class Linear(nn.Module):
    """Works on rows alone, so that it can be mapped over."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.linear(x)


def _cumulate(x, out):
    out.copy_(x.cumsum(0))


cumulate = boundary_ops.define(
    "state_fallbacks::cumulate(Tensor x, Tensor(a!) out) -> ()", _cumulate, token_args={"x": 0, "out": 0}
)


class Last(nn.Module):
    """Its one op beside the boundary loses the token dim."""

    def forward(self, x, out):
        cumulate(x, out)
        return out.sum(0)


def captured_above_a_branch():
    graphed = piecewise.compile(
        new_model(before=lambda model, x: x * 2 if x.shape[0] > 6 else x), buckets=(8,), progress=False
    )
    graphed.capture(tokens(8))
    return graphed


def below_the_branch(graphed):
    return serve(graphed, tokens(5))


def failing():
    graphed = graph(new_model(), captured=False)
    graphed.capture(tokens(7))
    (signature,) = inspect(graphed).signatures
    signature.served.pop(8)
    signature.refuse(8, FallbackReason.CAPTURE_FAILED, "it failed")
    return graphed


def test_a_failed_bucket_is_tried_again_by_capture_as_its_fix_says():
    graphed = failing()
    assert at_a_failed_bucket(graphed) == "capture_failed"
    assert "capture() again" in FallbackReason.CAPTURE_FAILED.fix
    assert graphed.capture(tokens(7)).ok and at_a_failed_bucket(graphed) == "replay"


def in_a_step(graphed, lens, *, names="abc"):
    """A call of the paged model inside a step of these lengths."""
    before = graphed.stats.snapshot()
    batch = PrefillBatch.build(graphed.model.cache, names[: len(lens)], lens)
    with torch.no_grad(), batch:
        graphed(torch.ones(sum(lens), dtype=torch.long), batch.positions[0])
    return what_was_counted(graphed, before)


def without_a_step(graphed):
    before = graphed.stats.snapshot()
    with torch.no_grad(), pytest.raises(boundary_ops.BoundaryOpError, match="running `with batch:` block"):
        graphed(torch.ones(5, dtype=torch.long), torch.arange(5))
    return what_was_counted(graphed, before)


CASES = {
    FallbackReason.STEP_LIMIT: (captured_paged, lambda graphed: in_a_step(graphed, (1, 1, 1))),
    FallbackReason.STEP_MISMATCH: (captured_paged, without_a_step),
    FallbackReason.ZERO_TOKENS: (plain, zero_tokens),
    FallbackReason.ABOVE_LARGEST_BUCKET: (plain, above_the_largest),
    FallbackReason.PADDING_RATIO: (lambda: graph(new_model(), max_padding_ratio=1.5), padded_too_much),
    FallbackReason.NOT_CAPTURED: (lambda: graph(new_model(), captured=False), not_captured),
    FallbackReason.UNSEEN_SIGNATURE: (plain, unseen),
    FallbackReason.SIGNATURE_LIMIT: (lambda: graph(new_model(), max_signatures=1), too_many_kinds),
    FallbackReason.UNSUPPORTED_INPUT: (plain, subclass),
    FallbackReason.TOKEN_COUNT_MISMATCH: (
        lambda: with_shift(graph(new_model(after=lambda model, x, shift: x + shift), captured=False)),
        mismatch,
    ),
    FallbackReason.GRAD_ENABLED: (plain, with_grad),
    FallbackReason.EAGER_ONLY: (plain, in_an_eager_block),
    FallbackReason.SHAPE_GUARD: (captured_above_a_branch, below_the_branch),
    FallbackReason.ONE_TOKEN_BRANCH: (
        lambda: graph(new_model(before=lambda model, x: x if x.shape[0] > 1 else x * 2)),
        one_token,
    ),
    FallbackReason.MOVED_ADDRESS: (plain, moved),
    FallbackReason.MODULE_STATE_CHANGED: (plain, changed),
    FallbackReason.GLOBAL_STATE_CHANGED: (plain, other_global_state),
    FallbackReason.CAPTURE_FAILED: (failing, at_a_failed_bucket),
    FallbackReason.RELEASED: (plain, released),
    FallbackReason.SUSPENDED: (plain, suspended),
    FallbackReason.DISABLED: (plain, under_a_stance),
    FallbackReason.OUT_OF_MEMORY: (plain, without_memory),
    FallbackReason.NESTED_TRACING: (lambda: graph(Linear().eval(), captured=False), transformed),
    FallbackReason.REENTRANT_CALL: (plain, called_from_inside),
}
# Not of these models: a plan without any graph and a call inside a capture have tests of their own below; a
# graph of Dynamo's is the backend's; an error comes before low coverage.
ELSEWHERE = {
    FallbackReason.NO_GRAPH,
    FallbackReason.CAPTURE_IN_PROGRESS,
    FallbackReason.STATIC_TOKEN_COUNT,
    FallbackReason.LOW_COVERAGE,
}


def with_shift(graphed):
    graphed.capture(tokens(7), shift=torch.ones(7, HIDDEN))
    return graphed


@pytest.mark.parametrize("reason", CASES, ids=lambda reason: reason.value)
def test_I6_each_reason_is_the_one_counted(reason):
    make, call = CASES[reason]
    graphed = make()
    assert call(graphed) == reason.value
    assert graphed.stats.reasons[reason] == 1
    assert reason.explanation in str(graphed.report()) and reason.fix in str(graphed.report())


def test_I6_every_reason_has_a_case():
    assert set(CASES) | ELSEWHERE == set(FallbackReason)


def test_I6_a_plan_without_graphs_is_not_called_a_replay():
    model = Last().eval()
    graphed = piecewise.compile(model, buckets=(8,), progress=False, allow_eager=True)
    report = graphed.capture(torch.randn(7, HIDDEN), torch.empty(7, HIDDEN))
    assert not report.ok and graphed.stats.captured == ()
    with torch.no_grad():
        x, out = torch.randn(5, HIDDEN), torch.empty(5, HIDDEN)
        torch.testing.assert_close(graphed(x, out), model(x, torch.empty(5, HIDDEN)))
    assert graphed.stats.reasons == {"no_graph": 1} and graphed.stats.replays == 0


def test_I6_a_call_from_inside_a_capture():
    outcomes = []

    def peek(x):
        if inspect(graphed).is_capturing and not outcomes:
            outcomes.append(None)
            outcomes.append(graphed(tokens(3)))
        return x * 2

    library = torch.library.Library("state_fallbacks", "FRAGMENT")
    library.define("peek(Tensor x) -> Tensor")
    library.impl("peek", peek, "CPU")
    library.impl("peek", lambda x: torch.empty_like(x), "Meta")
    model = new_model(after=lambda model, x: torch.ops.state_fallbacks.peek(x))
    graphed = graph(model, captured=False, buckets=(8,))
    graphed.capture(tokens(7))
    assert graphed.stats.reasons == {"capture_in_progress": 1}
    with torch.no_grad():
        torch.testing.assert_close(outcomes[1], model(tokens(3)))
    assert serve(graphed, tokens(5)) == "replay"


def test_I6_the_sums_agree_over_many_calls():
    graphed = graph(new_model(), buckets=(4, 8))
    for size in (0, 1, 3, 4, 5, 8, 9, 12):
        serve(graphed, tokens(size))
        serve(graphed, tokens(size).int())
    stats = graphed.stats
    assert stats.replays == 5 == sum(stats.calls_by_bucket.values())
    assert stats.eager_calls == 11 == sum(stats.reasons.values())
    assert stats.reasons == {"zero_tokens": 1, "above_largest_bucket": 2, "unseen_signature": 8}


def test_I6_a_fallback_runs_the_boundary_op_once():
    graphed = graph(new_model())
    calls.count = 0
    with torch.no_grad():
        graphed(tokens(5).int())
    assert calls.count == 1
    moved(graphed)
    assert calls.count == 1 + 2, "serve calls the model and its replacement"
