"""Where the comparison with the recorded state stands among the steps of a call [I4, I10]."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import boundary_ops
import piecewise
from runners.stats import FallbackReason

SCHEMA = "test_check_position::{name}(Tensor x, Tensor(a!) out, Tensor(b!) pool) -> ()"


class Layers(nn.Module):
    """Two layers of linear, boundary op, linear; each has a pool, which gets the rows of x."""

    def __init__(self, op, count=2):
        super().__init__()
        self.op, self.scale = op, 1.0
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.pools = [torch.zeros(64, 8) for _ in range(count)]

    def forward(self, x):
        for linear, pool in zip(self.first, self.pools, strict=True):
            x = linear(x) * self.scale
            out = torch.empty_like(x)
            self.op(x, out, pool)
            x = x + out
        return x


class Recorded:
    """A model graphed at 8 rows, and how often its op was called."""

    def __init__(self, name, *, repeatable, **settings):
        self.calls, self.schema = [], SCHEMA.format(name=name)

        def impl(x, out, pool):
            self.calls.append(x.shape[0])
            out.copy_(x + pool[0])
            pool[1 : x.shape[0] + 1] = x

        self.op = boundary_ops.define(self.schema, impl, repeatable=repeatable)
        self.model = Layers(self.op).eval()
        self.graphed = piecewise.compile(self.model, buckets=[8], progress=False, **settings)
        with torch.no_grad():
            assert self.graphed.capture(torch.randn(5, 8)).ok
            self.graphed(torch.randn(5, 8))
        self.calls.clear()

    def check_runs_eagerly(self, reason, *, num_ahead):
        """A call gives eager's result and pools; the op was called `num_ahead` times in vain before."""
        x = torch.randn(5, 8)
        with torch.no_grad():
            found = self.graphed(x)
            pools = [pool.clone() for pool in self.model.pools]
            assert len(self.calls) == num_ahead + 2
            expected = self.model(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for pool, wanted in zip(pools, self.model.pools, strict=True):
            assert torch.equal(pool, wanted)
        assert self.graphed.stats.reasons[reason] == 1


CHANGES = {
    "moved weight": (FallbackReason.MOVED_ADDRESS, lambda model: move(model.first[1])),
    "changed value": (FallbackReason.MODULE_STATE_CHANGED, lambda model: setattr(model, "scale", 2.0)),
}


def move(linear):
    linear.weight.data = torch.randn(8, 8)


@pytest.mark.parametrize("change", CHANGES)
def test_I10_a_repeatable_op_runs_ahead_of_the_check(change):
    reason, apply = CHANGES[change]
    recorded = Recorded("ahead_" + change.replace(" ", "_"), repeatable=True)
    apply(recorded.model)
    recorded.check_runs_eagerly(reason, num_ahead=2)


@pytest.mark.parametrize("change", CHANGES)
def test_I10_any_other_op_is_called_after_the_check_only(change):
    reason, apply = CHANGES[change]
    recorded = Recorded("after_" + change.replace(" ", "_"), repeatable=False)
    apply(recorded.model)
    recorded.check_runs_eagerly(reason, num_ahead=0)


def test_I4_what_a_repeatable_op_is_given_is_checked_before_it():
    recorded = Recorded("given", repeatable=True)
    recorded.model.pools[1].data = torch.zeros(32, 8)
    x = torch.randn(5, 8)
    with torch.no_grad():
        found = recorded.graphed(x)
        assert len(recorded.calls) == 2
        torch.testing.assert_close(found, recorded.model(x))
    assert recorded.graphed.stats.reasons[FallbackReason.MODULE_STATE_CHANGED] == 1


@pytest.mark.parametrize("how", ["defined again", "taken back"])
def test_I10_an_op_that_is_repeatable_no_longer_is_called_after_the_check(how):
    recorded = Recorded("once_" + how.replace(" ", "_"), repeatable=True)
    if how == "defined again":

        def impl(x, out, pool):
            recorded.calls.append(x.shape[0])
            out.copy_(x + pool[0])
            pool[0] += 1

        boundary_ops.define(recorded.schema, impl)
    else:
        boundary_ops.unregister(recorded.op.name)
    with torch.no_grad():
        recorded.graphed(torch.randn(5, 8))
    assert recorded.graphed.stats.replays == 2, "it is served as before"
    recorded.calls.clear()
    recorded.model.scale = 2.0
    for pool in recorded.model.pools:
        pool.zero_()
    with torch.no_grad():
        recorded.graphed(torch.randn(5, 8))
    assert recorded.graphed.stats.reasons[FallbackReason.MODULE_STATE_CHANGED] == 1
    assert len(recorded.calls) == 2
    assert [pool[0, 0].item() for pool in recorded.model.pools] == [how == "defined again"] * 2


@pytest.mark.parametrize("repeatable", [True, False])
def test_I7_a_result_in_static_memory_may_be_the_input_of_a_call_that_finds_a_change(repeatable):
    recorded = Recorded(f"view_{repeatable}", repeatable=repeatable, outputs="view")
    with torch.no_grad():
        for change in (lambda: None, lambda: setattr(recorded.model, "scale", 2.0)):
            result = recorded.graphed(torch.randn(5, 8))
            kept = result.clone()
            change()
            torch.testing.assert_close(recorded.graphed(result), recorded.model(kept))
    assert recorded.graphed.stats.reasons[FallbackReason.MODULE_STATE_CHANGED] == 1


def test_I6_an_error_that_a_change_explains_is_none_of_the_callers():
    recorded = Recorded("failing", repeatable=True)
    refused = []

    def impl(x, out, pool):
        # As an op that looks at a model's own state, and refuses what it does not fit.
        if recorded.model.scale != 1.0 and not refused:
            refused.append(True)
            raise ValueError("this state is not the one of the graphs")
        out.copy_(x + pool[0])

    boundary_ops.define(SCHEMA.format(name="failing"), impl, repeatable=True)
    recorded.model.scale = 2.0
    x = torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(recorded.graphed(x), recorded.model(x))
    assert refused and recorded.graphed.stats.reasons[FallbackReason.MODULE_STATE_CHANGED] == 1


def test_I6_an_error_without_a_change_is_the_callers():
    recorded = Recorded("raising", repeatable=True)

    def impl(x, out, pool):
        raise ValueError("no room")

    boundary_ops.define(SCHEMA.format(name="raising"), impl, repeatable=True)
    with torch.no_grad(), pytest.raises(ValueError, match="no room"):
        recorded.graphed(torch.randn(5, 8))


def test_I10_state_that_a_segment_writes_is_written_after_the_check():
    calls = []

    def impl(x, out, pool):
        calls.append(x.shape[0])
        out.copy_(x)

    op = boundary_ops.define(SCHEMA.format(name="counting"), impl, repeatable=True)

    class Counting(Layers):
        def __init__(self):
            super().__init__(op)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x):
            x = super().forward(x)
            self.seen.add_(1)
            return x + self.seen

    model = Counting().eval()
    graphed = piecewise.compile(model, buckets=[8], progress=False)
    with torch.no_grad():
        assert graphed.capture(torch.randn(5, 8)).ok
        graphed(torch.randn(5, 8))
        model.scale = 2.0
        graphed(torch.randn(5, 8))
    assert torch.equal(model.seen, torch.full((8,), 2.0))
    assert graphed.stats.reasons[FallbackReason.MODULE_STATE_CHANGED] == 1


def test_I10_an_op_of_nobody_known_is_called_after_the_check():
    library = torch.library.Library("test_check_position_foreign", "DEF")
    library.define("note(Tensor x) -> Tensor")
    notes = []

    def note(x):
        notes.append(x.shape[0])
        return x.sum().reshape(1) * 0 + len(notes)

    library.impl("note", note, "CPU")
    torch.library.register_fake("test_check_position_foreign::note", lambda x: x.new_empty(1), lib=library)
    op = boundary_ops.define(SCHEMA.format(name="beside"), lambda x, out, pool: out.copy_(x), repeatable=True)

    class Noting(Layers):
        def forward(self, x):
            return super().forward(x) + torch.ops.test_check_position_foreign.note(x)

    model = Noting(op).eval()
    graphed = piecewise.compile(model, buckets=[8], progress=False)
    with torch.no_grad():
        assert graphed.capture(torch.randn(5, 8)).ok
        graphed(torch.randn(5, 8))
        model.scale = 2.0
        before = len(notes)
        graphed(torch.randn(5, 8))
    assert len(notes) == before + 1
