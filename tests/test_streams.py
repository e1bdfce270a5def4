"""Several streams end to end on the tape: results, verify, what is kept with an injected measure, reports."""

from __future__ import annotations

import json

import paged_models
import pytest
import torch
from test_fusions import Plain
from torch import nn
from torch.nn import functional as F
from toy_models import HIDDEN, Toy, check_sizes, make_ids

import piecewise
from boundary_ops import PrefillBatch
from piecewise import branches
from piecewise.backend import piecewise_backend
from piecewise.stream_report import BucketStreams, SegmentStreams, StreamReport
from piecewise.streams import StreamForms
from runners.errors import ConfigError
from runners.mode import capturing
from runners.streams import Lanes
from runners.tape import TapeEngine


def ids_only(n):
    return (make_ids(n),)


def graphed(model, num_streams=2, **settings):
    made = piecewise.compile(model, buckets=(8, 16), progress=False, num_streams=num_streams, **settings)
    return made, made.capture(make_ids(5))


def check(model, num_streams=2, **settings):
    """Values at every size and under poison, and `verify`; returns the kinds of segments."""
    made = check_sizes(model, arguments=ids_only, num_streams=num_streams, **settings)
    verified = made.verify(make_inputs=lambda n: (ids_only(n), {}))
    assert verified.ok, verified
    (capture,) = made.report().captures
    return capture.streams[0].segments


@pytest.fixture
def forks(monkeypatch):
    """The segments in whose captures a fork was recorded, one entry per fork."""
    found = []
    fork = Lanes.fork

    def noted(self, num_lanes):
        if capturing() is not None:
            found.append(capturing())
        fork(self, num_lanes)

    monkeypatch.setattr(Lanes, "fork", noted)
    return found


@pytest.fixture
def measure(monkeypatch):
    """Lets a test say what replays take: `measure.times` is (one stream, several), or an error to raise."""

    class Measure:
        times = (40.0, 30.0)
        seen = []

        def __call__(self, graphs):
            assert all(not graph.is_reset for graph in graphs)
            self.seen.append([graph.segment for graph in graphs])
            for graph in graphs:
                graph.replay()
            if isinstance(self.times, Exception):
                raise self.times
            return self.times(len(self.seen)) if callable(self.times) else self.times

    made = Measure()
    made.seen = []
    monkeypatch.setattr(TapeEngine, "measure", made)
    return made


# --- results


@pytest.mark.parametrize("num_streams", [2, 3, 8])
def test_a_decoder_on_several_streams_is_what_it_is_on_one(num_streams):
    found = check(Plain(3), num_streams)
    assert [each.branches for each in found] == [(3,), (2, 3), (2,)]
    assert [each.num_streams for each in found] == [min(num_streams, 3), min(num_streams, 3), 2]
    assert [each.num_alike for each in found] == [0, 1, 0]
    for each in found:
        assert [(bucket.bucket, bucket.kept) for bucket in each.buckets] == [(16, True), (8, True)]
        assert all("not measured" in bucket.reason for bucket in each.buckets)


def test_warm_ups_and_captures_run_the_branches(forks, monkeypatch):
    warm_ups = []
    opened = Lanes.opened
    monkeypatch.setattr(Lanes, "opened", lambda self: (warm_ups.append(capturing()), opened(self))[1])
    graphed(Plain(2))
    # One region in the first and in the last segment, two in the middle one.
    assert len(forks) == 2 * (1 + 2 + 1) and len(set(forks)) == 3
    assert warm_ups.count(None) == 3 * 3 * 2, "three warm-ups of three segments at two buckets [I3]"


def test_one_stream_is_the_default_and_looks_at_nothing(forks):
    made = piecewise.compile(Plain(), buckets=(8,), progress=False)
    report = made.capture(make_ids(5))
    assert report.streams == () and "stream" not in str(report) and not forks
    assert made.explain(make_ids(5)).streams is None


class Experts(nn.Module):
    """A shared expert beside the routed ones, which are all computed and weighted."""

    def __init__(self, num_experts=3):
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.routed = nn.Parameter(torch.randn(num_experts, HIDDEN, HIDDEN) / HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, model, x):
        weights = torch.softmax(self.router(x), -1)
        routed = torch.einsum("nh,ehk->nek", x, self.routed)
        return x + (routed * weights.unsqueeze(-1)).sum(1) + self.down(F.gelu(self.up(x)))


def test_a_shared_expert_runs_beside_the_routed_ones():
    model = Toy(num_blocks=1)
    model.experts = Experts()
    model.head = model.experts.forward
    found = check(model)
    assert found[-1].branches == (3,), "router, routed experts, shared expert"


class Writes(nn.Module):
    """One branch writes in place what the other one has to read before."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, model, x):
        y = x * 2
        first, second = self.a(y), self.b(y)
        y.copy_(second)
        return first * y


class Reads(Writes):
    """One branch reads, in memory that no edge of the graph leads to, what the other one has written."""

    def forward(self, model, x):
        y = x * 2
        y.view(-1).copy_(self.a(x).view(-1))
        return self.b(x) * y


def with_head(kind):
    model = Toy(num_blocks=1)
    model.part = kind()
    model.head = model.part.forward
    return model


@pytest.mark.parametrize("kind", [Writes, Reads])
def test_a_write_in_one_branch_is_ordered_with_a_read_in_another(kind):
    assert check(with_head(kind))[-1].branches == (2,)


@pytest.mark.parametrize("kind", [Writes, Reads])
def test_I3_the_tape_shows_a_dependency_that_the_schedule_misses(kind, monkeypatch):
    """What two branches touch in one memory is left out: then the other order gives other results."""

    def only_results(ops):
        return [set(op.takes) for op in ops]

    monkeypatch.setattr(branches, "_direct", only_results)
    made, _ = graphed(with_head(kind))
    verified = made.verify(make_ids(16))
    assert not verified.ok and verified.checks[0].difference.cause == "graphs"


def test_autocast_regions_and_other_settings_are_what_they_are_on_one_stream():
    class Cast(Plain):
        def forward(self, ids):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids).float()

    made, report = graphed(Cast())
    assert [each.branches for each in report.streams[0].segments] == [(3,), (2, 3), (2,)]
    with torch.no_grad():
        for n in (8, 16):
            assert torch.equal(made(make_ids(n)), made._forward(make_ids(n)))


def test_the_same_weights_written_in_place_serve():
    model = Plain()
    made, _ = graphed(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
        replays = made.stats.replays
        assert torch.equal(made(make_ids(16)), model(make_ids(16)))
    assert made.stats.replays == replays + 1


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(paged_models.HIDDEN, paged_models.HIDDEN) for _ in range(2))

    def forward(self, x):
        return x + F.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("times", [None, (40.0, 30.0)], ids=["not measured", "kept"])
def test_branches_between_captured_boundary_ops(times, monkeypatch):
    """One graph, in which each op stands between the branches before it and behind it."""
    if times is not None:
        monkeypatch.setattr(TapeEngine, "measure", lambda self, graphs: times)
    made = paged_models.capture(paged_models.new_paged(between=Gated()), num_streams=2)
    (report,) = made.report().captures
    (found,) = report.streams[0].segments
    assert found.branches == (2, 2) and all(bucket.kept for bucket in found.buckets)
    for names, lens in (("a", (3,)), ("ab", (1, 3)), ("ba", (4, 4)), ("a", (1,)), ("b", (8,))):
        assert paged_models.serve_step(made, names, lens) == "replay"
    batch = PrefillBatch.build(made.model.cache, "ab", (3, 2))
    with batch, torch.no_grad():
        verified = made.verify(torch.arange(5), batch.positions[0])
    assert verified.ok, verified


# --- what has no branches, and says why


def test_packed_linears_leave_no_branches():
    _, report = graphed(Plain(), fusions=("pack_linears",))
    assert {each.reason for each in report.streams[0].segments} == {"no independent branches"}


def test_other_fusions_leave_them():
    found = check(Plain(), fusions=("rms_norm", "add_rms_norm", "silu_and_mul"))
    assert [each.branches for each in found] == [(3,), (2, 3), (2,)]


def test_a_compiled_segment_is_one_callable(forks):
    made, report = graphed(Plain(1), lowering="inductor")
    (found,) = report.streams
    assert {each.reason for each in found.segments} == {"compiled by Inductor: one callable"} and not forks
    assert {each.reason for each in made.explain(make_ids(5)).streams.segments} == {found.segments[0].reason}


def test_a_segment_that_inductor_leaves_alone_is_scheduled(monkeypatch):
    from piecewise.lowering import _Job
    from piecewise.segment_layout import Unlowerable

    def fail(self, *args, **kwargs):
        return Unlowerable("not today")

    monkeypatch.setattr(_Job, "_compile", fail)
    _, report = graphed(Plain(1), lowering="inductor")
    assert [each.branches for each in report.streams[0].segments] == [(3,), (2,)]


def test_a_block_of_one_chain_says_so():
    assert {each.reason for each in check(Toy(num_blocks=1))} == {"no independent branches"}


def test_one_token_has_a_bucket_on_one_stream():
    made = piecewise.compile(Plain(1), buckets=(1, 8), progress=False, num_streams=2)
    report = made.capture(make_ids(5))
    first = report.streams[0].segments[0]
    assert [(each.bucket, each.kept) for each in first.buckets] == [(8, True), (1, False)]
    assert "does not hold" in first.buckets[1].reason
    verified = made.verify(make_inputs=lambda n: (ids_only(n), {}))
    assert verified.ok, verified


# --- what is kept


def test_what_is_faster_is_kept_and_measured_once_per_distinct_segment(measure, forks):
    made, report = graphed(Plain(3))
    found = report.streams[0].segments
    assert len(measure.seen) == 3 * 2, "three distinct segments at two buckets, of four segments"
    for kind in found:
        assert kind.buckets == tuple(BucketStreams(bucket, True, 40.0, 30.0) for bucket in (16, 8))
    # At each bucket: forks of the three trials, 1 + 2 + 1, and of the four graphs that serve, 1 + 2 + 2 + 1.
    assert len(forks) == 2 * (4 + 6)
    assert made.verify(make_ids(16)).ok


@pytest.mark.parametrize(
    ("times", "reason"),
    [((38.0, 41.0), "slower"), ((40.0, 39.0), "less than 3% faster"), ((40.0, 38.8), "less than 3% faster")],
)
def test_what_is_not_faster_by_a_margin_stays_on_one_stream(measure, forks, times, reason):
    measure.times = times
    made, report = graphed(Plain(3))
    for kind in report.streams[0].segments:
        assert [(each.kept, each.reason) for each in kind.buckets] == [(False, reason)] * 2
    assert len(forks) == 2 * 4, "in trials alone"
    assert made.verify(make_ids(16)).ok


def test_each_bucket_has_its_own_verdict(measure):
    measure.times = lambda count: (40.0, 30.0) if count <= 3 else (30.0, 40.0)
    _, report = graphed(Plain(3))
    for kind in report.streams[0].segments:
        assert [(each.bucket, each.kept) for each in kind.buckets] == [(16, True), (8, False)]


@pytest.mark.parametrize("times", [(40.0, 30.0), (30.0, 40.0), RuntimeError("no clock")])
def test_I8_trials_leave_no_graph_and_no_change_of_state(measure, times):
    measure.times = times
    model = Plain(3)
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters()]}
    caches = [layer.cache.clone() for layer in model.layers]
    made, _ = graphed(model)
    live = [tape for tape in made._graphs.pool.graphs if not tape.is_reset]
    assert len(live) == 4 * 2
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    assert all(torch.equal(cache, layer.cache) for cache, layer in zip(caches, model.layers, strict=True))


def test_a_trial_that_fails_leaves_the_segment_on_one_stream(measure):
    measure.times = RuntimeError("no clock here")
    made, report = graphed(Plain(1))
    assert report.ok
    reasons = {bucket.reason for kind in report.streams[0].segments for bucket in kind.buckets}
    assert reasons == {"not measured: RuntimeError: no clock here"}
    with pytest.raises(RuntimeError, match="no clock here"):
        graphed(Plain(1), strict=True)


class Counts(Toy):
    """Its first segment writes a buffer of the model."""

    def __init__(self):
        super().__init__(num_blocks=1)
        self.register_buffer("count", torch.zeros(1))
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids):
        x = self.embedding(ids)
        self.count.add_(1)
        x = self.a(x) * self.b(x).relu() + self.count
        return self.projection(self.blocks[0](x))


def test_I8_a_segment_that_writes_its_inputs_is_not_measured(measure):
    model = Counts()
    made, report = graphed(model)
    first = report.streams[0].segments[0]
    assert first.branches == (2,) and not measure.seen
    assert {(each.kept, each.reason) for each in first.buckets} == {
        (False, "not measured: it writes its inputs")
    }
    assert model.count.item() == 0


def test_without_a_measure_a_segment_that_writes_is_scheduled_and_right():
    found = check(Counts())
    assert found[0].branches == (2,) and all(bucket.kept for bucket in found[0].buckets)


def test_weights_are_not_overwritten_for_a_trial_where_a_view_of_them_is_an_input(measure):
    """Zeros go to static memory only: a view of the model's own tensor is none."""

    class Looks(Toy):
        def __init__(self):
            super().__init__(num_blocks=1)
            self.table = nn.Parameter(torch.randn(HIDDEN, 2 * HIDDEN))

        def forward(self, ids):
            first, second = self.table.split(HIDDEN, dim=1)
            x = self.embedding(ids)
            x = self.blocks[0](x @ first + x @ second)
            return self.projection(x @ first + x @ second)

    model = Looks()
    before = model.table.detach().clone()
    made, report = graphed(model)
    assert measure.seen and torch.equal(model.table, before)
    assert made.verify(make_ids(13)).ok


def test_what_a_segment_reads_is_kept_through_its_trial(measure, monkeypatch):
    """The pool may give all else to the trials' results."""
    tried = StreamForms._tried

    def noted(self, segment, bucket, arguments, forms, trials, needed):
        kept = {tensor.untyped_storage().data_ptr() for tensor in needed}
        for index, tensor in zip(segment.inputs, arguments, strict=True):
            if self.schedules.plan.values[index].origin != "state":
                assert tensor.untyped_storage().data_ptr() in kept
        return tried(self, segment, bucket, arguments, forms, trials, needed)

    monkeypatch.setattr(StreamForms, "_tried", noted)
    _, report = graphed(Plain(2))
    assert report.ok and len(measure.seen) == 2 * 3


def test_measured_again_after_refresh_and_resume(measure):
    made, _ = graphed(Plain(2))
    count = len(measure.seen)
    made.refresh()
    assert len(measure.seen) == 2 * count
    made.suspend()
    report = made.resume()
    assert len(measure.seen) == 3 * count and report.streams[0].segments[0].buckets[0].kept


def test_the_compile_backend_uses_them(forks):
    model = Plain(2)
    options = {"buckets": (8, 16), "num_streams": 2, "progress": False}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=piecewise_backend, options=options)
    ids = make_ids(5)
    torch._dynamo.mark_dynamic(ids, 0)
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids)
        assert torch.equal(compiled(make_ids(16)), model(make_ids(16)))
    assert forks and piecewise.handle(compiled).stats.replays == 2
    torch._dynamo.reset()


# --- reports


def test_the_report_says_what_was_kept_with_times_and_why_not(measure):
    measure.times = lambda count: (40.0, 30.0) if count <= 3 else (38.0, 41.0)
    made, report = graphed(Plain(3))
    text = str(report)
    assert "up to 2 streams: 3 of 3 distinct graph segments have independent branches" in text
    middle = "segment 2 (layers.0.o .. layers.1) and 1 like it: 2 and 3 independent branches, on 2 streams"
    assert middle in text
    assert "kept at 16 (30.0 µs against 40.0)" in text
    assert "one stream at 8 (slower: 41.0 µs against 38.0)" in text
    assert str(report.streams[0]) in str(made.report())
    first = json.loads(report.to_json())["streams"][0]["segments"][0]
    assert first["branches"] == [3] and first["num_streams"] == 2
    assert first["buckets"][1] == {
        "bucket": 8, "kept": False, "one_stream_us": 38.0, "streams_us": 41.0, "reason": "slower",
    }  # fmt: skip


def test_explain_foresees_branches_and_captures_nothing(measure):
    made = piecewise.compile(Plain(3), buckets=(8, 16), progress=False, num_streams=3)
    plan = made.explain(make_ids(5))
    assert [each.branches for each in plan.streams.segments] == [(3,), (2, 3), (2,)] and not measure.seen
    assert "3 independent branches, on 3 streams" in str(plan) and "kept" not in str(plan)
    assert "* up to 3 streams" in plan.to_markdown()
    assert json.loads(plan.to_json())["streams"]["num_streams"] == 3


def test_a_kind_without_branches_has_one_line():
    one = SegmentStreams("segment 4", 30, reason="no independent branches")
    text = str(StreamReport(2, (one,)))
    assert text.splitlines() == [
        "up to 2 streams: 0 of 1 distinct graph segments have independent branches",
        "  segment 4 and 30 like it: one stream: no independent branches",
    ]


# --- settings


@pytest.mark.parametrize("value", [0, 9, 1.5, True, "2"])
def test_a_wrong_number_of_streams_is_refused(value):
    with pytest.raises(ConfigError, match="num_streams"):
        piecewise.PiecewiseConfig(num_streams=value)


def test_the_setting_comes_from_a_file_and_from_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "settings.toml"
    path.write_text("[capture]\nnum_streams = 3\n")
    assert piecewise.PiecewiseConfig.from_toml(path).num_streams == 3
    monkeypatch.setenv("PIECEWISE_NUM_STREAMS", "2")
    assert piecewise.PiecewiseConfig.from_any(path).num_streams == 2
