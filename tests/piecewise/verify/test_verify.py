"""`verify`: what is right passes and leaves no trace; each planted fault is found and named."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from dataclasses import replace

import pytest
import torch
from inspection import inspect
from small_transformers import LAYERS, attached
from torch import nn
from toy_models import CACHE_ROWS, Toy, make_ids, mix, state_of

import boundary_ops
import piecewise
from boundary_ops import PrefillBatch
from piecewise.analysis.rows.table import RULES, Entry
from piecewise.capture.build_plan import PlanAssembler
from piecewise.capture.placeholders import poison_padding_
from piecewise.ir.plan import PaddedRows, ValueSpec
from piecewise.tools import cli
from piecewise.verify import poison
from piecewise.verify.differences import Tolerance, compare_values
from piecewise.verify.verify import edge_sizes
from runners.bound_steps import BoundCall, CopyInputs

BUCKETS = (8, 16)


def arguments(n):
    return (make_ids(n), torch.arange(n)), {}


def graph(model=None, *, example=None, buckets=BUCKETS, **config):
    graphed = piecewise.compile(model or Toy(), buckets=list(buckets), progress=False, **config)
    example = example if example is not None else arguments(5)[0]
    assert graphed.capture(*example).ok
    return graphed


def plan_steps(graphed, bucket):
    return inspect(graphed).steps(bucket)


# What is right -------------------------------------------------------------------------------------------


def test_every_bucket_is_compared_around_its_edge():
    report = graph().verify(make_inputs=arguments)
    assert report.ok and report.first_difference is None, report
    assert [(c.num_tokens, c.bucket, c.path) for c in report.checks] == [
        (n, 8 if n <= 8 else 16, "graph") for n in (1, 2, 7, 8, 9, 10, 15, 16)
    ]
    padded = [check for check in report.checks if check.num_tokens != check.bucket]
    assert all(len(check.runs) == 6 for check in padded)
    assert all(check.identical for check in report.checks if check.num_tokens == check.bucket)
    # The result, two inputs and two caches.
    assert {check.num_tensors for check in report.checks} == {5}


def test_a_call_alone_verifies_its_own_size():
    report = graph().verify(*arguments(11)[0])
    assert report.ok and [check.num_tokens for check in report.checks] == [11]


def test_edge_sizes_are_those_that_a_bucket_serves():
    assert edge_sizes([4, 8]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert edge_sizes([16, 64]) == [1, 2, 15, 16, 17, 18, 63, 64]
    assert edge_sizes([16, 64], max_padding_ratio=2.0) == [8, 9, 15, 16, 32, 33, 63, 64]
    assert edge_sizes([1]) == [1]


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_I8_verify_leaves_no_trace(outputs):
    graphed = graph(outputs=outputs)
    for block in graphed.model.blocks:
        block.cache.normal_()
    (ids, positions), _ = arguments(5)
    before, inputs = state_of(graphed.model), (ids.clone(), positions.clone())
    stats, random_state = graphed.stats.asdict(), torch.get_rng_state()
    assert graphed.verify(ids, positions, make_inputs=arguments).ok
    for name, (tensor, kept) in before.items():
        assert torch.equal(tensor, kept), name
    assert torch.equal(ids, inputs[0]) and torch.equal(positions, inputs[1])
    assert graphed.stats.asdict() == stats and graphed.traffic.num_calls == 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not inspect(graphed).is_locked
    with torch.no_grad():
        torch.testing.assert_close(graphed(ids, positions), graphed.model(ids, positions))


def test_I8_an_error_of_the_model_passes_and_leaves_no_trace():
    graphed = graph()
    before = state_of(graphed.model)
    ids = make_ids(5)
    ids[3] = 10**6
    with pytest.raises(IndexError):
        graphed.verify(ids, torch.arange(5))
    assert all(torch.equal(tensor, kept) for tensor, kept in before.values())
    assert not inspect(graphed).is_locked


def test_nothing_replayed_is_not_ok():
    graphed = piecewise.compile(Toy(), buckets=list(BUCKETS), progress=False)
    report = graphed.verify(make_inputs=arguments)
    assert not report.ok and report.first_difference is None
    assert {check.path for check in report.checks} == {"not_captured"}
    assert "NOTHING COMPARED" in str(report)


def test_I4_a_moved_weight_is_told_and_changes_nothing():
    graphed = graph()
    graphed.model.projection.weight = nn.Parameter(graphed.model.projection.weight.detach().clone())
    report = graphed.verify(*arguments(5)[0])
    assert [check.path for check in report.checks] == ["moved_address"]
    assert not report.ok and not graphed.report().changes


def test_an_eager_segment_that_draws_and_loses_tokens_agrees():
    def head(model, x):
        return (x + torch.rand(x.shape[0], 1))[-1:]

    assert graph(Toy(head)).verify(make_inputs=arguments).ok


def test_verify_works_under_inference_mode():
    with torch.inference_mode():
        graphed = graph()
        assert graphed.verify(make_inputs=arguments).ok


def test_the_random_numbers_of_an_eager_segment_do_not_hide_the_fault_behind_it():
    def head(model, x):
        return x + torch.rand(x.shape[0], 1)

    graphed = graph(Toy(head))
    bound = plan_steps(graphed, 8)._bind(5)
    read = bound.results[0]
    bound.results[0] = lambda env: read(env) + 1
    assert graphed.verify(*arguments(5)[0]).first_difference.segment == "", "no segment is to blame"


@pytest.mark.gpu
def test_real_graphs_are_verified_and_a_wrong_op_is_found():
    def inputs(n):
        return (floats(n)[0][0].cuda(),), {}

    for op, ok in ((mixed, True), (whole_rows, False)):
        model = OneOp(op).cuda()
        model.cache = model.cache.cuda()
        graphed = graph(model, example=inputs(5)[0])
        assert graphed.report().engine == "cuda"
        report = graphed.verify(make_inputs=inputs)
        assert report.ok is ok and report.num_compared == 8, report
        if not ok:
            assert report.first_difference.tensor == "model.cache", report
    assert len([run for check in report.checks for run in check.runs if "nan" in run]) == 0


def packed_inputs(cache):
    """`make_inputs`, whose step runs as long as the call."""

    @contextlib.contextmanager
    def make_inputs(n):
        lens = [n] if n < 3 else [n - n // 3, n // 3]
        ids = torch.randint(0, 90, (1, n), generator=torch.Generator().manual_seed(n))
        with PrefillBatch.build(cache, list(range(len(lens))), lens) as batch:
            yield (), dict(input_ids=ids, position_ids=batch.positions)
        for name in range(len(lens)):
            cache.free(name)

    return make_inputs


def test_an_attached_transformers_model_agrees_and_its_cache_counts_nothing():
    model, cache = attached("Llama")
    graphed = piecewise.compile(model, buckets=list(BUCKETS), progress=False)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        graphed.capture(input_ids=ids, position_ids=ids.clone())
    for pool in (*cache.k, *cache.v):
        pool.normal_()
    before = [pool.clone() for pool in (*cache.k, *cache.v)]
    batch = PrefillBatch.build(cache, ["a", "b"], [4, 7])
    with batch:
        report = graphed.verify(
            input_ids=batch.pack([[1, 2, 3, 4], list(range(7))]), position_ids=batch.positions
        )
    assert report.ok, report
    assert report.checks[0].num_tensors >= 2 * LAYERS + 3
    assert cache.context_len("a") == cache.context_len("b") == 0
    assert all(map(torch.equal, before, (*cache.k, *cache.v)))
    report = graphed.verify(make_inputs=packed_inputs(cache))
    assert report.ok and report.num_compared == 8, report


def test_I8_a_cache_that_is_an_argument_is_compared_and_put_back():
    class WithCache(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("num_calls", torch.zeros(1))

        def forward(self, x, cache):
            x = self.first(x)
            out = torch.empty_like(x)
            mix(x, x, x, out, cache)
            self.num_calls.add_(1)
            return {"y": self.second(out) * self.num_calls, "rows": x.shape[0]}

    model, cache = WithCache(), torch.randn(CACHE_ROWS, 8)
    graphed = graph(model, example=(*floats(5)[0], torch.zeros(CACHE_ROWS, 8)))
    before = cache.clone()
    report = graphed.verify(*floats(5)[0], cache)
    assert report.ok, report
    assert torch.equal(cache, before) and float(model.num_calls) == 0
    bound = plan_steps(graphed, 8)._bind(5)
    call = next(step for step in bound.steps if isinstance(step, BoundCall))
    kept = call.function

    def wrong(n, *rest):
        results = kept(n, *rest)
        rest[-1][n] = 3.0  # one row behind those in use
        return results

    call.function = wrong
    found = graphed.verify(*floats(5)[0], cache).first_difference
    assert found.what == "input 'cache'" and found.rows == (5,) and found.kind == "boundary"
    assert torch.equal(cache, before)


def test_I3_eager_segments_of_a_mixture_of_experts_agree():
    model, cache = attached("Mixtral")
    graphed = piecewise.compile(model, buckets=[8], progress=False)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        graphed.capture(input_ids=ids, position_ids=ids.clone())
    assert any(segment.kind == "eager" for segment in graphed.report().plans[0].segments)
    report = graphed.verify(make_inputs=packed_inputs(cache))
    assert report.ok and report.num_compared == 4, report


def test_I2_static_memory_is_overwritten_before_a_replay():
    graphed = graph()
    pool, steps = inspect(graphed).pool, plan_steps(graphed, 8)
    with torch.no_grad():
        graphed(*arguments(5)[0])
    poison.overwrite_static_memory(steps, pool, poison.Poison("", 0))
    static = steps.results[0].tensor
    assert bool(static.isnan().all())
    for shadow in steps.copy_ins:
        assert bool((shadow.buffer == 0).all())  # token ids: a valid index
    weights = [p.detach().clone() for p in graphed.model.parameters()]
    assert not any(bool(weight.isnan().any()) for weight in weights)


def test_verify_inside_a_call_is_refused():
    graphed = graph()
    bound = plan_steps(graphed, 8)._bind(5)
    call = next(step for step in bound.steps if isinstance(step, BoundCall))
    call.function = lambda *_: graphed.verify(*arguments(5)[0])
    with torch.no_grad(), pytest.raises(piecewise.StateError, match="verify"):
        graphed(*arguments(5)[0])


# Faults that are planted ---------------------------------------------------------------------------------


def _whole_rows(x, out, cache):
    """Works on all rows that the memory of `x` holds, not on those that it was given."""
    rows = x.untyped_storage().nbytes() // x.element_size() // x.shape[1]
    whole = x.as_strided((rows, x.shape[1]), (x.shape[1], 1), 0)
    cache[:rows] = whole + 1
    out.copy_(x.cumsum(0))


def _by_address(x, out, cache):
    """Remembers, and writes to another row in each call."""
    _by_address.calls += 1
    cache[_by_address.calls % CACHE_ROWS] = x[0]
    out.copy_(x.cumsum(0))


_by_address.calls = 0
SCHEMA = "(Tensor x, Tensor(a!) out, Tensor(b!) cache) -> ()"
whole_rows = boundary_ops.define("verify_test::whole_rows" + SCHEMA, _whole_rows)
other_rows = boundary_ops.define("verify_test::other_rows" + SCHEMA, _by_address)
WRONG_OPS = {"whole_rows": whole_rows, "other_rows": other_rows}


class OneOp(nn.Module):
    def __init__(self, op, hidden=8):
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.cache, self.op = torch.zeros(CACHE_ROWS, hidden), op

    def forward(self, x):
        x = self.first(x)
        out = torch.empty_like(x)
        self.op(x, out, self.cache)
        return self.second(out)


def floats(n):
    return (torch.randn(n, 8, generator=torch.Generator().manual_seed(n)),), {}


@pytest.mark.parametrize("name", WRONG_OPS)
def test_a_boundary_op_that_writes_other_kv_rows_is_found_and_named(name):
    graphed = graph(OneOp(WRONG_OPS[name]), example=floats(5)[0])
    report = graphed.verify(*floats(5)[0])
    found = report.first_difference
    assert not report.ok and found is not None
    assert (found.kind, found.tensor) == ("boundary", "model.cache")
    assert name in found.op and found.segment.startswith("segment 1")
    assert (found.num_tokens, found.bucket) == (5, 8)
    if name == "whole_rows":
        assert found.rows == (5, 6, 7) and found.num_rows == 3  # rows that are not in use
        assert found.left_alone == (5, 6, 7) and found.num_written == 0
    else:
        assert found.num_rows == 2
    assert not bool(graphed.model.cache.any()), "the cache is put back"


def capture_with(monkeypatch, segment, change):
    """Captures with `change(function)` in the place of a segment's function; the plan keeps the true one."""
    right = PlanAssembler.function_for

    def function_for(self, each, bucket):
        function = right(self, each, bucket)
        return change(function) if each.index == segment else function

    monkeypatch.setattr(PlanAssembler, "function_for", function_for)


def test_a_difference_tells_a_wrong_plan_from_a_wrong_replay(monkeypatch):
    """The padded rows run without graphs, too: a step that calls the wrong thing is wrong there as well."""
    graphed = graph()
    call = next(step for step in plan_steps(graphed, 8)._bind(5).steps if isinstance(step, BoundCall))
    call.arguments[2], call.arguments[3] = call.arguments[3], call.arguments[2]
    found = graphed.verify(*arguments(5)[0]).first_difference
    assert found.cause == "plan" and found.run == "no graphs, padding as served"

    with monkeypatch.context() as patch:
        capture_with(patch, 2, lambda fn: lambda n, *inputs: tuple(x * 2 for x in fn(n, *inputs)))
        graphed = piecewise.compile(OneOp(mixed), buckets=[8], progress=False)
        graphed.capture(*floats(5)[0])
    report = graphed.verify(*floats(5)[0])
    found = report.first_difference
    assert found.cause == "graphs" and found.run == "padding as served"
    assert found.segment.startswith("segment 2")
    assert "cause     graphs" in str(report) and report.asdict()["first_difference"]["cause"] == "graphs"


def test_I3_padding_that_looks_like_real_rows_finds_what_other_poison_does_not(monkeypatch):
    class Guarded(nn.Module):
        """Sums all later rows that are sound: zeros, NaN and numbers out of range are not."""

        def __init__(self):
            super().__init__()
            self.linear, self.cache = nn.Linear(8, 8), torch.zeros(CACHE_ROWS, 8)

        def forward(self, x):
            x = self.linear(x)
            mixed(x, out := torch.zeros_like(x), self.cache)
            sound = torch.where((out.abs() < 100) & (out != 0), out, 0.0)
            return sound.flip(0).cumsum(0).flip(0)

    graphed = with_wrong_rule(monkeypatch, "flip", Guarded())
    found = graphed.verify(*floats(5)[0]).first_difference
    assert found.run == "padding of other rows" and found.cause == "plan" and found.kind == "graph"


def test_I3_other_rows_are_real_ones_the_same_in_all_values():
    spec = ValueSpec(0, "x", "graph", sizes=lambda n: (n, 2), token_dims=(0,), units=(1, 1))
    for n in (1, 2, 3):
        found = []
        for first in (0.0, 10.0):
            rows = first + torch.arange(14.0).reshape(7, 2)
            poison_padding_(rows, replace(spec, padded=PaddedRows(is_real=first > 0)), n, 7, variant=3)
            assert torch.equal(rows[:n], first + torch.arange(2.0 * n).reshape(n, 2))
            assert all(torch.equal(row, rows[n]) for row in rows[n:])
            found.append([index for index in range(n) if torch.equal(rows[index], rows[n])])
        assert found[0] == found[1] and len(found[0]) == 1, "each is the same real row"


def test_rows_in_use_and_rows_not_in_use_are_told_apart():
    class Stray(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = OneOp(mixed)

        def forward(self, x):
            return self.body(x)

    graphed = graph(Stray(), example=floats(5)[0])
    call = next(step for step in plan_steps(graphed, 8)._bind(5).steps if isinstance(step, BoundCall))
    right = call.function

    def wrong(n, *rest):
        results = right(n, *rest)
        cache = next(tensor for tensor in rest if tensor.shape[0] == CACHE_ROWS)
        cache[[1, 9, 11]] = 7.0
        return results

    call.function = wrong
    report = graphed.verify(*floats(5)[0])
    found = report.first_difference
    assert found.rows == (1, 9, 11) and found.tensor == "model.body.cache"
    assert (found.written, found.num_written) == ((1,), 1)
    assert (found.left_alone, found.num_left_alone) == ((9, 11), 2)
    assert "in use    1 (1 in all)" in str(report) and "not used  9, 11 (2 in all)" in str(report)


def test_I3_a_graph_that_mixes_padding_into_real_rows_is_found_and_named(monkeypatch):
    def mixing(fn):
        return lambda n, *inputs: tuple(x + x.mean(0, keepdim=True) for x in fn(n, *inputs))

    with monkeypatch.context() as patch:
        capture_with(patch, 2, mixing)
        graphed = piecewise.compile(OneOp(mixed), buckets=[8], warmup_steps=1, progress=False)
        graphed.capture(*floats(5)[0])
    assert 8 in graphed.stats.captured, graphed.report()
    found = graphed.verify(*floats(5)[0]).first_difference
    assert found.segment.startswith("segment 2") and found.kind == "graph" and found.num_rows == 5
    assert found.what == "result leaf 0" and found.size > 100 * found.allowed


def with_wrong_rule(monkeypatch, op, model):
    """Captured as if the op kept rows apart."""
    monkeypatch.setitem(RULES, op, Entry(lambda call: call.layout(), frozenset()))
    graphed = piecewise.compile(model, buckets=[8], warmup_steps=1, progress=False)
    graphed.capture(*floats(5)[0])
    assert 8 in graphed.stats.captured, graphed.report()
    return graphed


def mixed(x, out, cache):
    mix(x, x, x, out, cache)


def test_I3_a_segment_function_that_mixes_rows_is_named_by_its_op(monkeypatch):
    """The function itself mixes: the op is found by running it alone and beside padding."""

    class Flipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = OneOp(mixed)

        def forward(self, x):
            return torch.flip(self.body(x), [0])

    graphed = with_wrong_rule(monkeypatch, "flip", Flipped())
    found = graphed.verify(*floats(5)[0]).first_difference
    assert found is not None and found.op == "aten.flip.default" and found.segment.startswith("segment 2")
    assert found.rows == (0, 1, 2, 3, 4)
    assert graphed.verify(*floats(8)[0]).ok, "at bucket size nothing is padded"


def test_I3_memory_that_nobody_has_written_yet_is_not_named_in_the_place_of_the_op_behind_it(monkeypatch):
    class FlippedBefore(OneOp):
        def forward(self, x):
            out = torch.empty(x.shape[0], 2, 4)
            rows, x = out.flatten(1), torch.flip(self.first(x), [0])
            mix(x, x, x, rows, self.cache)
            return self.second(rows)

    graphed = with_wrong_rule(monkeypatch, "flip", FlippedBefore(mixed))
    assert graphed.report().plans[0].fills == {"needless": 1}
    found = graphed.verify(*floats(5)[0]).first_difference
    assert found is not None and found.op == "aten.flip.default" and found.segment.startswith("segment 0")


def test_I3_a_leak_below_rounding_is_found_by_its_bits(monkeypatch):
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = OneOp(mixed)

        def forward(self, x):
            x = self.body(x)
            return x * (1 + 1e-7 * torch.flip(x, [0]).sign().nan_to_num(0.0))

    graphed = with_wrong_rule(monkeypatch, "flip", Leaky())
    found = graphed.verify(*floats(2)[0]).first_difference
    assert found is not None and "within rounding" in found.detail
    assert found.segment.startswith("segment 2") and found.op in ("aten.flip.default", "aten.sign.default")


def test_I2_a_static_buffer_that_is_not_renewed_is_found():
    graphed = graph()
    steps = plan_steps(graphed, 8)
    with torch.no_grad():
        graphed(*arguments(5)[0])  # leaves the right values in the buffer
    (inputs,) = [step for step in steps._bind(5).steps if isinstance(step, CopyInputs)]
    copies = inputs.copies
    copies[-1].rows = copies[-1].rows.clone()  # this input's copy goes elsewhere
    found = graphed.verify(*arguments(5)[0]).first_difference
    assert found is not None and found.kind == "graph" and found.segment.startswith("segment 0")


def test_a_boundary_step_with_swapped_arguments_is_found():
    graphed = graph()
    bound = plan_steps(graphed, 8)._bind(5)
    call = [step for step in bound.steps if isinstance(step, BoundCall)][1]
    call.arguments[2], call.arguments[3] = call.arguments[3], call.arguments[2]
    report = graphed.verify(*arguments(5)[0])
    found = report.first_difference
    assert (found.kind, found.op) == ("boundary", "toy_models::mix")
    assert found.segment.startswith("segment 3") and "blocks.1" in found.segment


def test_a_boundary_op_that_fails_on_replay_is_a_difference():
    graphed = graph()
    bound = plan_steps(graphed, 8)._bind(5)
    call = next(step for step in bound.steps if isinstance(step, BoundCall))

    def fail(*_):
        raise ValueError("no rows like these")

    call.function = fail
    found = graphed.verify(*arguments(5)[0]).first_difference
    assert "no rows like these" in found.detail and found.segment.startswith("segment 1")


def test_a_wrong_result_that_no_segment_explains_is_told_as_such():
    graphed = graph()
    bound = plan_steps(graphed, 8)._bind(5)
    read = bound.results[0]
    bound.results[0] = lambda env: read(env) + 1
    found = graphed.verify(*arguments(5)[0]).first_difference
    assert found.what == "result leaf 0" and found.segment == "" and "as a whole" in found.detail
    assert found.size == pytest.approx(1, rel=1e-3) and found.num_rows == 5


# Comparison and report -----------------------------------------------------------------------------------


def test_differences_name_rows_position_and_size():
    left = torch.zeros(4, 3)
    right = left.clone()
    left[0, 0] = right[0, 0] = 2.0
    right[1, 2], right[3, 0] = 0.5, float("nan")
    found = compare_values(left, right, Tolerance(16, 1))
    assert found.rows == (1, 3) and found.num_rows == 2
    assert found.position == (3, 0) and found.size == float("inf")
    assert compare_values(left, right, Tolerance(16, 1), dim=1).rows == (0, 2)
    assert compare_values(right, right.clone(), None) is None
    assert "[4, 3]" in compare_values(left, right[:2], None).detail
    one = torch.tensor([3, 4])
    assert compare_values(one, one + 1, Tolerance(10**9, 10**9)).size == 1, "integers must be equal"


def test_the_tolerance_follows_from_dtype_reduction_length_and_depth():
    eps32, eps16 = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
    bound = Tolerance(100, 4)
    assert bound.relative(torch.float32) == pytest.approx(2 * (8 + 10) * eps32)
    assert bound.relative(torch.bfloat16) == pytest.approx(2 * (8 * eps16 + 10 * eps32))
    assert bound.relative(torch.int64) == 0.0
    assert replace(bound, has_tf32=True).relative(torch.float32) == pytest.approx(
        2 * (8 * eps32 + 10 * 2**-10)
    )


CASE = """
import torch
from torch import nn
import boundary_ops, piecewise

def mix(x, out, cache):
    rows = x.untyped_storage().nbytes() // x.element_size() // x.shape[1] if BROKEN else x.shape[0]
    cache[:rows] = 1
    out.copy_(x.cumsum(0))

BROKEN = False
mix_ = boundary_ops.define("verify_cli::mix(Tensor x, Tensor(a!) out, Tensor(b!) cache) -> ()", mix)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.cache = nn.Linear(8, 8), nn.Linear(8, 8), torch.zeros(32, 8)
    def forward(self, x):
        x = self.first(x)
        out = torch.empty_like(x)
        mix_(x, out, self.cache)
        return self.second(out)

def case():
    return piecewise.PrefillCase(Model(), lambda n: ((torch.ones(n, 8),), {}))

def broken():
    global BROKEN
    BROKEN = True
    return case()
"""


def test_the_command_says_by_exit_code_and_json_what_differs(tmp_path, monkeypatch, capsys):
    (tmp_path / "verify_case.py").write_text(CASE)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "report.json"
    assert cli.main(["verify", "verify_case:case", "--buckets", "4,8", "--json", str(out)]) == 0
    assert "Graphed equals eager" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["ok"] is True and found["first_difference"] is None and len(found["checks"]) == 8
    assert cli.main(["verify", "verify_case:broken", "--buckets", "4,8", "--json", str(out)]) == 1
    found = json.loads(out.read_text())
    assert found["ok"] is False and found["first_difference"]["tensor"] == "model.cache"
    assert "verify_cli" in found["first_difference"]["op"]
    text = capsys.readouterr().out
    assert "DIFFERENT" in text and "model.cache" in text and "rows" in text
    assert cli.main(["verify", "verify_case:nothing"]) == 2
    sys.modules.pop("verify_case", None)


def test_the_report_is_plain_data():
    graphed = graph()
    report = graphed.verify(*arguments(3)[0])
    assert json.loads(report.to_json()) == json.loads(json.dumps(report.asdict()))
    copied = copy.deepcopy(report)
    assert copied == report and copied.ok and len({report, copied}) == 1
