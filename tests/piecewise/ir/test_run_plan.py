"""Segments run in order on what came before, and each value is told as live for as long as it is read."""

from __future__ import annotations

import torch
from toy_models import Toy, make_ids

import piecewise
from piecewise.ir.plan import arguments_of, run_plan


def plan_of(model):
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    graphed.capture(make_ids(5), torch.arange(5))
    return graphed._graphs.signatures[0].plan


def given(plan, leaves):
    return {
        value.index: value.number_in(leaves) for value in plan.values if value.origin in ("input", "symbol")
    }


def run(plan, env, num_rows, **hooks):
    run_plan(
        plan, env, num_rows,
        on_segment=lambda segment, arguments: segment.function(num_rows, *arguments),
        on_boundary=lambda segment: segment.function(num_rows, *arguments_of(segment, plan.values, env)),
        **hooks,
    )  # fmt: skip


def test_a_plan_run_in_order_is_the_model():
    model, leaves = Toy(), (make_ids(6), torch.arange(6))
    plan = plan_of(model)
    env = given(plan, leaves)
    with torch.no_grad():
        run(plan, env, 6)
        (result,) = plan.result_values
        assert torch.equal(env[result], model(*leaves))


def test_what_is_not_live_is_not_read_again():
    model, leaves = Toy(), (make_ids(6), torch.arange(6))
    plan = plan_of(model)
    env, sizes = given(plan, leaves), []

    def drop(live):
        for index in env.keys() - live:
            del env[index]
        sizes.append(len(env))

    with torch.no_grad():
        run(plan, env, 6, on_live=drop)
        assert list(env) == list(plan.result_values) and len(sizes) == len(plan.segments)
        assert torch.equal(env[plan.result_values[0]], model(*leaves))
