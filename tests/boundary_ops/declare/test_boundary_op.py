"""Boundary ops called again with arguments of equal geometry: past the dispatcher, with equal results."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import boundary_ops
import piecewise

SCHEMA = "test_bound_op::{name}(Tensor x, Tensor(a!) out, Tensor(b!) pool, float factor=1.0) -> ()"


class Scaled(nn.Module):
    """`out = x * factor + pool[0]`, and the pool's rows become x."""

    def __init__(self, op, *, factor=2.0):
        super().__init__()
        self.op, self.factor = op, factor
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("pool", torch.zeros(64, 8))

    def forward(self, x):
        x = self.first(x)
        out = torch.empty_like(x)
        self.op(x, out, self.pool, self.factor)
        return self.last(out)


class Log:
    """Implementations that note how they were called."""

    def __init__(self):
        self.plain, self.again, self.shapes = [], [], []

    def impl(self, x, out, pool, factor=1.0):
        self.plain.append(factor)
        out.copy_(x * factor + pool[0])
        pool[: x.shape[0]] = x

    def bind(self, x, out, pool, factor=1.0):
        self.shapes.append(tuple(x.shape))

        def call(x, out, pool, factor=1.0):
            self.again.append(factor)
            out.copy_(x * factor + pool[0])
            pool[: x.shape[0]] = x

        return call


def graphed_with(op, **options):
    model = Scaled(op, **options).eval()
    graphed = piecewise.compile(model, buckets=[8, 16], progress=False)
    with torch.no_grad():
        assert graphed.capture(torch.randn(5, 8)).ok
    return model, graphed


def check(model, graphed, n):
    x = torch.randn(n, 8)
    with torch.no_grad():
        before = model.pool.clone()
        expected = model(x)
        written = model.pool.clone()
        model.pool.copy_(before)
        replays = graphed.stats.replays
        found = graphed(x)
    assert graphed.stats.replays == replays + 1
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.pool, written)


def test_the_second_call_of_a_row_count_goes_to_what_bind_returned():
    log = Log()
    op = boundary_ops.define(SCHEMA.format(name="again"), log.impl, bind={"cpu": log.bind})
    model, graphed = graphed_with(op)
    for n in (5, 5, 5, 7, 7):
        check(model, graphed, n)
    assert log.shapes == [(5, 8), (7, 8)]
    assert log.again == [2.0] * 3
    assert log.plain == [2.0] * 7  # five eager calls, and the first of each row count


def test_a_default_is_left_out_as_the_dispatcher_does():
    calls = []

    def impl(x, out, pool, *factor):
        calls.append(factor)
        out.copy_(x)

    op = boundary_ops.define(SCHEMA.format(name="defaults"), impl)
    model, graphed = graphed_with(op, factor=1.0)
    for _ in range(3):
        check(model, graphed, 5)
    assert calls == [()] * 6


def test_what_bind_declines_is_served_by_the_implementation():
    log = Log()
    op = boundary_ops.define(SCHEMA.format(name="declined"), log.impl, bind={"cpu": lambda *args: None})
    model, graphed = graphed_with(op)
    for _ in range(3):
        check(model, graphed, 5)
    assert log.plain == [2.0] * 6


def test_defining_the_op_again_reaches_calls_that_are_bound():
    log = Log()
    op = boundary_ops.define(SCHEMA.format(name="reloaded"), log.impl, bind={"cpu": log.bind})
    model, graphed = graphed_with(op)
    for _ in range(2):
        check(model, graphed, 5)

    def negated(x, out, pool, factor=1.0):
        out.copy_(-x)

    boundary_ops.define(SCHEMA.format(name="reloaded"), negated)
    num_calls = len(log.again), len(log.plain)
    for _ in range(2):
        check(model, graphed, 5)
    assert (len(log.again), len(log.plain)) == num_calls


def test_a_pool_assigned_between_two_calls_is_the_one_that_is_written():
    log = Log()
    op = boundary_ops.define(SCHEMA.format(name="moved_pool"), log.impl, bind={"cpu": log.bind})
    model, graphed = graphed_with(op)
    for _ in range(2):
        check(model, graphed, 5)
    old, old_rows = model.pool, model.pool.clone()
    model.pool = torch.randn(64, 8)
    check(model, graphed, 5)
    assert torch.equal(old, old_rows)
    assert log.shapes == [(5, 8)]


def test_I6_an_error_in_a_bound_call_leaves_the_next_call_right():
    log = Log()
    op = boundary_ops.define(SCHEMA.format(name="raising"), log.impl, bind={"cpu": log.bind})
    model, graphed = graphed_with(op)
    for _ in range(2):
        check(model, graphed, 5)
    log.again = None  # the next bound call cannot note itself
    with torch.no_grad(), pytest.raises(AttributeError):
        graphed(torch.randn(5, 8))
    log.again = []
    check(model, graphed, 5)
    assert log.again == [2.0]


def test_an_op_whose_arguments_may_look_different_is_never_bound():
    log = Log()
    schema = "test_bound_op::rows(Tensor x, Tensor(a!) out, Tensor wanted) -> ()"
    op = boundary_ops.define(
        schema, lambda x, out, wanted: out.copy_(x + wanted.sum()), bind={"cpu": log.bind}
    )

    class WithRows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, wanted):
            x = self.linear(x)
            out = torch.empty_like(x)
            op(x, out, wanted)
            return out * 2

    model = WithRows().eval()
    graphed = piecewise.compile(model, buckets=[8], progress=False)
    with torch.no_grad():
        assert graphed.capture(torch.randn(5, 8), torch.randn(3)).ok
        for count in (3, 3, 4, 2):
            x, wanted = torch.randn(5, 8), torch.randn(count)
            torch.testing.assert_close(graphed(x, wanted), model(x, wanted))
    assert graphed.stats.replays == 4
    assert log.shapes == []


def test_an_op_of_another_library_keeps_going_through_the_dispatcher():
    library = torch.library.Library("test_bound_op_foreign", "DEF")
    library.define("double(Tensor x, Tensor(a!) out) -> ()")
    calls = []

    def double(x, out):
        calls.append(tuple(x.shape))
        out.copy_(x * 2)

    library.impl("double", double, "CPU")
    torch.library.register_fake("test_bound_op_foreign::double", lambda x, out: None, lib=library)
    op = boundary_ops.register("test_bound_op_foreign::double")
    x, out = torch.randn(3, 2), torch.empty(3, 2)
    op.bind(x, out).function(x, out)
    assert torch.equal(out, x * 2) and calls == [(3, 2)]
    boundary_ops.unregister("test_bound_op_foreign::double")


@pytest.mark.parametrize("num_calls", [1, 3])
def test_I4_no_call_keeps_the_pool_that_it_was_given(num_calls):
    log = Log()
    op = boundary_ops.define(SCHEMA.format(name=f"kept_{num_calls}"), log.impl, bind={"cpu": log.bind})
    model, graphed = graphed_with(op)
    model.pool = torch.zeros(64, 8)
    for _ in range(num_calls):
        check(model, graphed, 5)
    former = weakref.ref(model.pool)
    model.pool = torch.zeros(64, 8)
    gc.collect()
    assert former() is None
