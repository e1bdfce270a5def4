"""min_coverage fails loudly and leaves nothing; the report has each listed bucket, and its share of calls."""

from __future__ import annotations

import json

import pytest
import torch
from inspection import inspect
from state_models import BUCKETS, graph, new_model, serve, tokens

import boundary_ops
import piecewise
from piecewise.capture.build_plan import PlanAssembler
from piecewise.errors.report import CoverageError, LowBucketCoverage, LowPlanCoverage, NothingCaptured
from runners.stats import FallbackReason

_library = torch.library.Library("state_coverage", "DEF")
_library.define("picky(Tensor x) -> Tensor")
# A warm-up of bucket 8 has 5 real rows, or the example's 7: an op that fails for padded ones alone would only
# become eager.
BUCKET_8 = (8, 5, 7)
_trouble: dict = {"rows": (), "error": None}


def _picky(x):
    if x.shape[0] in _trouble["rows"]:
        raise _trouble["error"]
    return x * 2


_library.impl("picky", _picky, "CPU")
_library.impl("picky", lambda x: torch.empty_like(x), "Meta")
boundary_ops.declare_rows("state_coverage::picky", token_args={"x": 0})
total_ = boundary_ops.define(
    "state_coverage::total(Tensor x, Tensor(a!) out) -> ()",
    lambda x, out: out.copy_(x),
    token_args={"x": 0, "out": 0},
)


@pytest.fixture
def picky():
    """A model with an op in a graph segment that fails at 8 rows, while the fixture's dict says so."""
    _trouble.update(rows=BUCKET_8, error=RuntimeError("no room for 8 rows"))
    yield new_model(after=lambda model, x: torch.ops.state_coverage.picky(x))
    _trouble.update(rows=(), error=None)


def mixing():
    """Two of its ops lose or mix the token dim."""
    return new_model(after=lambda model, x: x - x.mean(0) + x.flip(0))


def nothing_is_left(graphed):
    store = inspect(graphed)
    return store.pool is None and not store.buffers.allocated_bytes and not store.signatures


def test_I8_a_plan_below_min_coverage_is_an_error_that_names_the_ops():
    graphed = graph(mixing(), captured=False, min_coverage=0.99)
    with pytest.raises(LowPlanCoverage) as caught:
        graphed.capture(tokens(7))
    text = str(caught.value)
    coverage = piecewise.compile(mixing(), buckets=BUCKETS).explain(tokens(7)).coverage
    assert 0 < coverage < 0.99 and f"got {coverage:.1%}" in text and "at least 99.0%" in text
    for said in ("mean", "consumes_token_dim", "flip", "mixes_tokens", "test_coverage.py", "Rule:", "Fix:"):
        assert said in text, said
    assert nothing_is_left(graphed)
    assert serve(graphed, tokens(5)) == "not_captured"


def test_a_plan_above_min_coverage_is_captured():
    coverage = piecewise.compile(mixing(), buckets=BUCKETS).explain(tokens(7)).coverage
    graphed = graph(mixing(), min_coverage=coverage)
    assert serve(graphed, tokens(5)) == "replay"
    assert serve(graph(new_model(), min_coverage=1.0), tokens(5)) == "replay"


def test_I8_a_bucket_below_min_coverage_takes_the_whole_capture_back(picky):
    graphed = graph(picky, captured=False, min_coverage=0.5)
    with pytest.raises(
        LowBucketCoverage, match=r"(?s)bucket 8: 0.0%, failed: .*no room for 8 rows.*Rule:.*Fix:"
    ):
        graphed.capture(tokens(7))
    assert nothing_is_left(graphed) and graphed.stats.captured == ()
    assert [serve(graphed, tokens(size)) for size in (3, 12)] == ["not_captured"] * 2
    _trouble["rows"] = ()
    assert graphed.capture(tokens(7)).captured == BUCKETS


def test_I8_a_capture_taken_back_leaves_earlier_ones(picky):
    _trouble["rows"] = ()
    graphed = graph(picky, min_coverage=0.5)
    _trouble["rows"] = BUCKET_8
    with pytest.raises(CoverageError):
        graphed.capture(tokens(7).int())
    assert graphed.stats.captured == BUCKETS and len(graphed.report().plans) == 1
    assert serve(graphed, tokens(12)) == "replay"


def test_in_a_window_the_call_raises_and_later_ones_are_eager():
    graphed = graph(mixing(), captured=False, min_coverage=0.99, capture="lazy")
    with torch.no_grad(), pytest.raises(CoverageError), piecewise.capture_window():
        graphed(tokens(5))
    assert [serve(graphed, tokens(5)) for _ in range(2)] == ["low_coverage"] * 2
    assert nothing_is_left(graphed)
    assert "not captured: coverage of the plan" in str(graphed.report())
    with pytest.raises(CoverageError):
        graphed.capture(tokens(5))


def test_a_lazy_bucket_below_min_coverage_raises_at_the_call_that_captures_it(picky):
    graphed = graph(picky, captured=False, min_coverage=0.5, capture="lazy")
    _trouble["rows"] = ()
    for _ in range(3):
        serve(graphed, tokens(3))
    assert graphed.stats.captured == (4,)
    outcomes = [serve(graphed, tokens(6)) for _ in range(2)]
    _trouble["rows"] = BUCKET_8
    with torch.no_grad(), pytest.raises(CoverageError, match="bucket 8"):
        graphed(tokens(6))
    outcomes += [serve(graphed, tokens(6)) for _ in range(2)]
    assert outcomes == ["not_captured"] * 2 + ["low_coverage"] * 2
    assert serve(graphed, tokens(3)) == "replay"


def statuses(graphed, position=0):
    buckets = graphed.report().captures[position].buckets
    return {report.bucket: (report.status, report.code) for report in buckets}


def everywhere(graphed, said):
    """Whether each form of the report says it."""
    report = graphed.report()
    return all(said in text for text in (str(report), report.to_markdown(), report.to_json()))


def test_every_listed_bucket_is_captured_or_has_its_reason(picky):
    with pytest.warns(UserWarning, match="bucket 64"):
        graphed = graph(picky, captured=False, buckets=(4, 8, 16, 64), max_num_seqs=2, max_seq_len=16)
    graphed.capture(tokens(7))
    assert statuses(graphed) == {
        64: ("left out", "left_out"),
        16: ("captured", ""),
        8: ("failed", "capture_failed"),
        4: ("captured", ""),
    }
    assert everywhere(graphed, "no room for 8 rows") and everywhere(graphed, "64 is above")


def test_a_lack_of_memory_is_told_apart_from_other_failures(picky):
    _trouble["error"] = torch.OutOfMemoryError("tried to allocate 8 GiB")
    graphed = graph(picky, captured=False)
    graphed.capture(tokens(7))
    assert statuses(graphed)[8] == ("failed", "out_of_memory") and everywhere(graphed, "8 GiB")
    _trouble["rows"] = ()
    assert serve(graphed, tokens(7)) == "out_of_memory"
    assert graphed.capture(tokens(7)).ok


def test_a_bucket_that_a_guard_excludes():
    model = new_model(before=lambda model, x: x * 2 if x.shape[0] > 6 and x.shape[0] < 9 else x)
    graphed = graph(model, tokens(8), captured=False)
    graphed.capture(tokens(8))
    excluded = {bucket for bucket, (_, code) in statuses(graphed).items() if code == "shape_guard"}
    assert excluded | set(graphed.stats.captured) == set(BUCKETS)


def test_lazy_buckets_say_how_many_calls_they_have_seen():
    graphed = graph(new_model(), captured=False, capture="lazy")
    for size in (3, 3, 3, 7):
        serve(graphed, tokens(size))
    assert statuses(graphed) == {
        16: ("waiting", "not_captured"), 8: ("waiting", "not_captured"), 4: ("captured", ""),
    }  # fmt: skip
    assert everywhere(graphed, "1 of the 3 calls that a lazy capture waits for")
    assert everywhere(graphed, "0 of the 3 calls")
    assert graphed.report().captures[0].ok


def test_buckets_of_moved_weights_say_what_moved():
    graphed = graph(new_model())
    graphed.model.projection.weight.data = graphed.model.projection.weight.data.clone()
    serve(graphed, tokens(5))
    assert statuses(graphed) == dict.fromkeys(BUCKETS, ("eager", "moved_address"))
    assert everywhere(graphed, "the storage of model.projection.weight moved")


def test_a_kind_of_call_beyond_the_limit_says_so():
    graphed = graph(new_model(), max_signatures=1)
    with piecewise.capture_window():
        assert serve(graphed, tokens(5).int()) == "signature_limit"
    assert everywhere(graphed, "(int32[5]), beyond max_signatures = 1")


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        (lambda: new_model(before=lambda m, x: x if x.shape[0] > 1 else x * 2), {}, "runs another program"),
        (new_model, {"max_padding_ratio": 2.0}, "max_padding_ratio = 2 excludes it"),
    ],
)
def test_one_token_says_why_it_runs_eagerly(model, config, said):
    graphed = graph(model(), **config)
    serve(graphed, tokens(1))
    assert not graphed.report().captures[0].serves_one_token and everywhere(graphed, said)


def test_one_token_is_tried_at_the_first_such_call():
    graphed = graph(new_model())
    assert not graphed.report().captures[0].serves_one_token
    assert everywhere(graphed, "the first such call finds out whether it may replay")
    assert serve(graphed, tokens(1)) == "replay"
    assert graphed.report().captures[0].serves_one_token
    assert "calls of one token replay" in str(graphed.report())


def test_shares_of_ops_and_calls_per_bucket_and_per_reason():
    graphed = graph(mixing(), buckets=(4, 8))
    for size in (3, 3, 7, 0, 20):
        serve(graphed, tokens(size))
    with piecewise.eager_only():
        serve(graphed, tokens(3))
    serve(graphed, tokens(5).int())
    graphed.model.projection.train()
    serve(graphed, tokens(3))
    report = graphed.report()
    plan = report.plans[0]
    assert plan.coverage + sum(plan.shares().values()) == pytest.approx(1)
    assert set(plan.shares()) == {"consumes_token_dim", "mixes_tokens"}
    assert report.replayed == 3 / 8
    assert report.replayed + sum(report.shares_of_calls().values()) == pytest.approx(1)
    assert report.shares_of_calls()["above_largest_bucket"] == 1 / 8
    four, eight = report.calls_by_bucket()
    assert (four["replayed"], four["eager"], four["reasons"]) == (2, 1, {"module_state_changed": 1})
    assert four["share_of_calls"] == 3 / 8 and four["share_replayed"] == pytest.approx(2 / 3)
    assert (eight["replayed"], eight["eager"], eight["share_replayed"]) == (1, 0, 1.0)
    assert four["op_coverage"] == eight["op_coverage"] == plan.coverage
    as_json = json.loads(report.to_json())
    assert as_json["calls"]["buckets"] == [four, eight]
    assert as_json["calls"]["shares_by_reason"] == report.shares_of_calls()
    assert as_json["plans"][0]["eager_shares"] == plan.shares()
    for text in (str(report), report.to_markdown()):
        assert "bucket 4: 2 replayed, 1 eager (module_state_changed 1); 37.5% of calls, 66.7% of them" in text
        assert "eager, above_largest_bucket: 1 (12.5%)" in text
        assert f"{plan.shares()['mixes_tokens']:.1%} eager: " in text


def test_lazy_captures_stop_where_the_device_has_too_little_memory(monkeypatch):
    free = [2**30]
    monkeypatch.setattr(
        "runners.tape.tape.TapeEngine.free_memory", lambda engine, device: (free[0], 100 * 2**30)
    )
    graphed = graph(new_model(), captured=False, capture="lazy")
    assert [serve(graphed, tokens(3)) for _ in range(4)] == ["not_captured"] * 2 + ["out_of_memory"] * 2
    assert inspect(graphed).pool is None and statuses(graphed)[4] == ("eager", "out_of_memory")
    assert everywhere(graphed, "1.00 GiB of 100.00 GiB are free on cpu")
    free[0] = 50 * 2**30
    assert [serve(graphed, tokens(7)) for _ in range(3)] == ["not_captured"] * 2 + ["replay"]
    assert serve(graphed, tokens(3)) == "out_of_memory", "until somebody asks again"
    assert graphed.capture(tokens(7)).ok and serve(graphed, tokens(3)) == "replay"


def test_I5_lazy_captures_one_bucket_per_call():
    graphed = graph(new_model(), captured=False, capture="lazy")
    seen = []
    for size in [3, 7, 12] * 4:
        before = len(graphed.stats.captured)
        serve(graphed, tokens(size))
        seen.append(len(graphed.stats.captured) - before)
    assert max(seen) == 1 and sum(seen) == 3 == len(BUCKETS)


def test_every_code_of_a_bucket_is_a_fallback_reason_or_left_out():
    graphed = graph(new_model(), captured=False, capture="lazy")
    serve(graphed, tokens(3))
    codes = {code for _, code in statuses(graphed).values()}
    assert codes <= {reason.value for reason in FallbackReason} | {"", "left_out"}


def test_a_bucket_of_one_token_that_no_call_could_reach_is_not_captured():
    model = new_model(before=lambda model, x: x if x.shape[0] > 1 else x * 2)
    graphed = graph(model, captured=False, buckets=(1, 8))
    assert graphed.capture(tokens(7)).captured == (8,)
    assert statuses(graphed)[1] == ("eager", "one_token_branch") and everywhere(graphed, "another program")
    assert serve(graphed, tokens(1)) == "one_token_branch"
    assert graph(new_model(), buckets=(1, 8)).report().captures[0].captured == (1, 8)


@pytest.fixture
def hopeless(monkeypatch):
    """Lets no bucket be captured, while its list holds the error."""
    errors, capture = [RuntimeError("no kernel at all")], PlanAssembler.capture

    def failing(*args):
        if errors:
            raise errors[0]
        return capture(*args)

    monkeypatch.setattr(PlanAssembler, "capture", failing)
    return errors


@pytest.mark.parametrize("config", [{}, {"capture": "lazy"}])
def test_a_capture_without_any_graph_is_an_error_with_every_reason_once(hopeless, config):
    graphed = graph(new_model(), captured=False, **config)
    with pytest.raises(NothingCaptured) as caught:
        graphed.capture(tokens(7))
    text = str(caught.value)
    assert isinstance(caught.value, piecewise.CaptureError)
    assert "buckets 16, 8 and 4: no kernel at all" in text and "allow_eager=True" in text
    assert text.count("no kernel at all") == 1
    assert statuses(graphed) == dict.fromkeys(BUCKETS, ("failed", "capture_failed")), "to be read afterwards"
    assert serve(graphed, tokens(5)) == "capture_failed"
    hopeless.clear()
    assert graphed.capture(tokens(7)).captured == BUCKETS and serve(graphed, tokens(5)) == "replay"


def test_other_reasons_of_other_buckets_are_listed_apart(hopeless):
    def doubled_alone(model, x):
        return x * 2 if x.shape[0] == 1 else x

    graphed = graph(new_model(before=doubled_alone), captured=False, buckets=(1, 4, 8, 16))
    with pytest.raises(
        NothingCaptured, match=r"(?s)buckets 16, 8 and 4: no kernel.*bucket 1: the model runs"
    ):
        graphed.capture(tokens(8))


def test_reasons_that_differ_in_the_buckets_size_alone_are_one(picky):
    _trouble["rows"] = range(2, 17)
    graphed = graph(picky, captured=False, buckets=(4, 16))
    with pytest.raises(NothingCaptured) as caught:
        graphed.capture(tokens(7))
    text = str(caught.value)
    assert text.count("no room for 8 rows") == 1 and "buckets 16 and 4: segment 2" in text
    assert "run the model eagerly at this token count to see the error alone" in text


def test_no_op_that_can_be_in_a_graph_is_an_error_that_lists_the_ops():
    class Total(torch.nn.Module):
        def forward(self, x, out):
            total_(x, out)
            return out.sum(0)

    graphed = piecewise.compile(Total(), buckets=[8, 16], progress=False)
    with pytest.raises(
        NothingCaptured, match=r"(?s)16 and 8: no op can be in a graph:.*sum \(consumes_token"
    ):
        graphed.capture(torch.randn(7, 4), torch.empty(7, 4))


def test_a_model_that_may_run_eagerly_is_warned_of(hopeless):
    graphed = graph(new_model(), captured=False, allow_eager=True)
    with pytest.warns(piecewise.FallbackWarning, match=r"(?s)buckets 16, 8 and 4 .*run eagerly:.*no kernel"):
        report = graphed.capture(tokens(7))
    assert not report.ok and report.captured == ()
    assert serve(graphed, tokens(5)) == "capture_failed"


def test_some_buckets_without_graphs_are_a_warning_at_the_users_line(picky):
    graphed = graph(picky, captured=False)
    with pytest.warns(piecewise.FallbackWarning, match="bucket 8 has no graphs") as found:
        report = graphed.capture(tokens(7))
    assert [each.filename for each in found] == [__file__] and "no room for 8 rows" in str(found[0].message)
    assert report.captured == (4, 16)


@pytest.mark.parametrize("do", ["refresh", "resume"])
def test_graphs_that_do_not_come_back_are_an_error(hopeless, do):
    error = hopeless.pop()
    graphed = graph(new_model())
    if do == "resume":
        graphed.suspend()
    hopeless.append(error)
    with pytest.raises(NothingCaptured):
        getattr(graphed, do)()
    assert serve(graphed, tokens(5)) == ("suspended" if do == "resume" else "capture_failed")
    hopeless.clear()
    assert getattr(graphed, do)().ok and serve(graphed, tokens(5)) == "replay"


def test_a_call_that_captures_in_vain_is_served(hopeless):
    graphed = graph(new_model(), captured=False)
    with piecewise.capture_window(), pytest.warns(piecewise.FallbackWarning, match="no kernel at all"):
        assert serve(graphed, tokens(5)) == "capture_failed"
