"""[I3, I6] A fault of a rule, a declaration or a lowering costs speed: no bucket is lost, no result is wrong.

Rules are made wrong by hand here; a warm-up then finds real rows that change with padded ones.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from inspection import inspect
from toy_models import HIDDEN, Toy, compare, kinds, make_ids, reasons

import boundary_ops
import piecewise
from piecewise.analysis.rows import rules  # noqa: F401 - fills the table
from piecewise.analysis.rows.layout import Layout
from piecewise.analysis.rows.table import BOUNDS, RULES, Bounds, Entry
from piecewise.errors.capture import PaddingMatters
from piecewise.lowering.lowering import Lowering
from piecewise.passes import fuse as fusions
from runners.piecewise_runner import PiecewiseRunner

BUCKETS = (4, 8, 16)


def wrong_rule(monkeypatch, *ops):
    """Says of these ops that they keep rows apart."""

    def keeps(call) -> Layout:
        return call.layout()

    for op in ops:
        monkeypatch.setitem(RULES, op, Entry(keeps, frozenset()))


def served(head, **config):
    toy = Toy(head, num_blocks=1).eval()
    graphed = piecewise.compile(toy, buckets=BUCKETS, progress=False, **config)
    report = graphed.capture(make_ids(5), torch.arange(5))
    assert report.captured == BUCKETS, report
    with torch.no_grad():
        for n in (2, 3, 4, 5, 8, 13, 16):
            exact = n in BUCKETS and config.get("lowering") is None
            compare(graphed, toy, (make_ids(n), torch.arange(n)), exact=exact, where=f"{n} tokens")
    assert graphed.stats.eager_calls == 0
    return graphed


@contextlib.contextmanager
def faults_told(count, op=""):
    with pytest.warns(UserWarning) as caught:
        yield
    told = [str(each.message) for each in caught if str(each.message).startswith("piecewise: the rule of")]
    assert len(told) == count and all("test_faults.py" in text for text in told), told
    assert all(f"rule of '{op}" in text and "declare_rows" in text for text in told), told
    assert not any(each.filename.endswith("capture/faults.py") for each in caught)


def test_I3_an_op_with_a_wrong_rule_becomes_eager_and_every_bucket_is_captured(monkeypatch):
    wrong_rule(monkeypatch, "flip")
    with faults_told(1):
        graphed = served(lambda m, x: x.flip(0) * 2)
    assert kinds(graphed) == "gbgeg" and reasons(graphed) == {"mixes_tokens": 1}
    (reason,) = [r for s in graphed.report().plans[0].segments for r in s.reasons]
    assert "does not hold" in reason.detail and "flip" in reason.op
    assert graphed.verify(make_ids(5), torch.arange(5)).ok


def test_I3_several_wrong_rules_are_found_one_after_the_other(monkeypatch):
    wrong_rule(monkeypatch, "flip", "roll")
    with faults_told(2):
        graphed = served(lambda m, x: x.flip(0) * 2 + x.roll(1, 0))
    assert reasons(graphed) == {"mixes_tokens": 2}


def test_I3_after_three_cuts_the_whole_segment_is_eager(monkeypatch):
    wrong_rule(monkeypatch, "flip", "roll")

    def head(m, x):
        for shift in (1, 2):
            x = (x.roll(shift, 0) + 1).flip(0)
        return x.tanh()

    with faults_told(3):
        graphed = served(head)
    assert not any(
        "roll" in s.ops or "flip" in s.ops for s in graphed.report().plans[0].segments if s.kind == "graph"
    )


def test_I3_bounds_that_do_not_hold_are_an_index_error_in_a_warm_up_and_not_in_a_call(monkeypatch):
    def bound(call):
        return Bounds(call.known.constant(0), call.known.constant(5))

    monkeypatch.setitem(BOUNDS, "_to_copy", bound)

    def head(m, x):
        # Of padded rows behind a boundary op anything comes; NaN as an integer is no index.
        return x + m.places((x[:, 0].sigmoid() * 3).long())

    with faults_told(1):
        graphed = served(head)
    assert reasons(graphed) == {"mixes_tokens": 1}


def test_I6_strict_is_an_error_that_names_what_changed(monkeypatch):
    wrong_rule(monkeypatch, "flip")
    graphed = piecewise.compile(
        Toy(lambda m, x: x.flip(0), num_blocks=1).eval(), buckets=(8,), progress=False, strict=True
    )
    with pytest.raises(PaddingMatters, match="real rows that do not depend on what padded rows hold"):
        graphed.capture(make_ids(5), torch.arange(5))
    assert inspect(graphed).pool.allocated_bytes == 0


def test_I3_a_lowering_that_mixes_rows_leaves_its_segment_with_eager_kernels(monkeypatch):
    lower = Lowering.lower

    def mixed(function):
        return lambda n, *given: tuple(y + y.flip(0) * 1e-3 for y in function(n, *given))

    def mixing(self, plan, *rest):
        lowered = lower(self, plan, *rest)
        functions = dict(lowered.functions)
        for segment in plan.graph_segments():
            if segment.index == 2 and not segment.keeps_own:
                functions[2] = mixed(functions[2])
        return dataclasses.replace(lowered, functions=functions)

    monkeypatch.setattr(Lowering, "lower", mixing)
    graphed = served(lambda m, x: x * 2)
    assert kinds(graphed) == "gbg" and reasons(graphed) == {}
    plan = inspect(graphed).plan
    assert [bool(segment.keeps_own) for segment in plan.segments] == [False, False, True]


def test_I3_a_fusion_that_mixes_rows_leaves_its_segment_unfused(monkeypatch):
    made = fusions._where_valid

    def mixing(is_valid, fused, own):
        function = made(is_valid, fused, own)
        return lambda n, *given: tuple(
            y + y.flip(0) * 1e-3 if y.dim() > 1 else y for y in function(n, *given)
        )

    monkeypatch.setattr(fusions, "_where_valid", mixing)
    toy = Toy(num_blocks=1).eval()
    graphed = piecewise.compile(toy, buckets=BUCKETS, fusions=("pack_linears",), progress=False)
    assert graphed.capture(make_ids(5), torch.arange(5)).captured == BUCKETS
    assert "compiled, fused or scheduled" in str(graphed.report())
    with torch.no_grad():
        for n in (3, 8, 11):
            compare(graphed, toy, (make_ids(n), torch.arange(n)), exact=False, where=f"{n} tokens")
    assert graphed.stats.replays == 3


def test_I9_buckets_that_were_captured_before_a_fault_are_captured_again(monkeypatch):
    """An op whose rule is wrong in small buckets alone: the larger ones are in graphs by then."""
    with torch.library._scoped_library("test_faults", "FRAGMENT") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: x.flip(0) if len(x) == 4 else x * 1, "CompositeExplicitAutograd")
        torch.library.register_fake("test_faults::odd", lambda x: torch.empty_like(x), lib=library)
        boundary_ops.declare_rows("test_faults::odd", token_args={"x": 0})
        toy = Toy(lambda m, x: torch.ops.test_faults.odd(x), num_blocks=1).eval()
        graphed = piecewise.compile(toy, buckets=BUCKETS, progress=False)
        with faults_told(1):
            report = graphed.capture(make_ids(5), torch.arange(5))
        assert report.captured == BUCKETS and kinds(graphed) == "gbgeg"
        assert len({id(each.plan) for each in inspect(graphed).signature.served.values()}) == 1
        with torch.no_grad():
            for n in (2, 4, 7, 8, 12):
                compare(graphed, toy, (make_ids(n), torch.arange(n)), exact=n in BUCKETS, where=f"{n} tokens")


def test_I8_an_op_that_fails_on_padded_rows_becomes_eager():
    with torch.library._scoped_library("test_faults", "FRAGMENT") as library:

        def picky(x):
            if len(x) == 16:
                raise RuntimeError("no room for 16 rows")
            return x * 2

        library.define("picky(Tensor x) -> Tensor")
        library.impl("picky", picky, "CPU")
        torch.library.register_fake("test_faults::picky", lambda x: torch.empty_like(x), lib=library)
        boundary_ops.declare_rows("test_faults::picky", token_args={"x": 0})
        toy = Toy(lambda m, x: torch.ops.test_faults.picky(x), num_blocks=1).eval()
        graphed = piecewise.compile(toy, buckets=BUCKETS, progress=False)
        with faults_told(1, op="test_faults::picky"):
            assert graphed.capture(make_ids(5), torch.arange(5)).captured == BUCKETS
        with torch.no_grad(), pytest.raises(RuntimeError, match="no room for 16 rows"):
            graphed(make_ids(16), torch.arange(16))


def test_I8_a_failure_of_a_capture_that_no_op_explains_stays_one_of_its_bucket(monkeypatch):
    plain = PiecewiseRunner.capture

    def failing(self, rows, *rest, **options):
        if rows == 8:
            raise piecewise.CaptureError("the device", got="a bad day")
        return plain(self, rows, *rest, **options)

    monkeypatch.setattr(PiecewiseRunner, "capture", failing)
    toy = Toy(lambda m, x: x * HIDDEN, num_blocks=1).eval()
    graphed = piecewise.compile(toy, buckets=BUCKETS, progress=False)
    report = graphed.capture(make_ids(5), torch.arange(5))
    assert report.captured == (4, 16) and "a bad day" in str(report)


def test_I3_memory_that_nobody_has_written_yet_is_not_blamed(monkeypatch):
    wrong_rule(monkeypatch, "flip")

    def head(m, x):
        torch.full_like(x, float(x.shape[1])).add_(1)  # leaves garbage of its own behind
        out = torch.empty_like(x)
        out.copy_(x.flip(0))
        return out * 2

    with faults_told(1):
        graphed = served(head)
    assert [r.op for s in graphed.report().plans[0].segments for r in s.reasons] == ["flip"]
