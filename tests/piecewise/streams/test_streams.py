"""Several streams end to end on the tape: results, verify, where they are used, reports."""

from __future__ import annotations

import json

import paged_models
import pytest
import torch
from branched_models import Experts, Gated, Reads, Writes, with_head
from inspection import inspect
from plain_decoder import Plain
from torch import nn
from toy_models import HIDDEN, Toy, check_sizes, make_ids

import piecewise
from boundary_ops import PrefillBatch
from piecewise.report.segments import BucketStreams, SegmentStreams, StreamReport
from piecewise.streams import branches, streams
from piecewise.torch_backend import piecewise_backend
from runners.engine import Streams
from runners.errors import ConfigError
from runners.mode import capturing


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
    fork = Streams.fork

    def noted(self, num_streams):
        if capturing() is not None:
            found.append(capturing())
        fork(self, num_streams)

    monkeypatch.setattr(Streams, "fork", noted)
    return found


# --- results


@pytest.mark.parametrize("num_streams", [2, 3, 8])
def test_a_decoder_on_several_streams_is_what_it_is_on_one(num_streams):
    found = check(Plain(3), num_streams)
    assert [each.branches for each in found] == [(3,), (2, 3), (2,)]
    assert [each.num_streams for each in found] == [min(num_streams, 3), min(num_streams, 3), 2]
    assert [each.num_alike for each in found] == [0, 1, 0]
    for each in found:
        assert [(bucket.bucket, bucket.kept) for bucket in each.buckets] == [(16, True), (8, True)]


def test_warm_ups_and_captures_run_the_branches(forks, monkeypatch):
    warm_ups = []
    opened = Streams.opened
    monkeypatch.setattr(Streams, "opened", lambda self: (warm_ups.append(capturing()), opened(self))[1])
    graphed(Plain(2))
    # One region in the first and in the last segment, two in the middle one.
    assert len(forks) == 2 * (1 + 2 + 1) and len(set(forks)) == 3
    assert warm_ups.count(None) == 3 * 3 * 2, "three warm-ups of three segments at two buckets [I3]"


def test_one_stream_is_the_default_and_looks_at_nothing(forks):
    made = piecewise.compile(Plain(), buckets=(8,), progress=False)
    report = made.capture(make_ids(5))
    assert report.streams == () and "stream" not in str(report) and not forks
    assert made.explain(make_ids(5)).streams is None


def test_a_shared_expert_runs_beside_the_routed_ones():
    model = Toy(num_blocks=1)
    model.experts = Experts()
    model.head = model.experts.forward
    found = check(model)
    assert found[-1].branches == (3,), "router, routed experts, shared expert"


@pytest.mark.parametrize("kind", [Writes, Reads])
def test_a_write_in_one_branch_is_ordered_with_a_read_in_another(kind):
    assert check(with_head(kind))[-1].branches == (2,)


@pytest.mark.parametrize("kind", [Writes, Reads])
def test_I3_the_tape_shows_a_dependency_that_the_schedule_misses(kind, monkeypatch):
    """What two branches touch in one memory is left out: then the other order gives other results."""

    monkeypatch.setattr(branches, "_must_wait", lambda later, earlier: False)
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


def test_branches_between_captured_boundary_ops():
    """One graph, in which each op stands between the branches before it and behind it."""
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
    from piecewise.lowering.layout import Unlowerable
    from piecewise.lowering.lowering import _Job

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


# --- where they are used


def test_large_buckets_stay_on_one_stream(forks, monkeypatch):
    """There one branch fills the device."""
    monkeypatch.setattr(streams, "MAX_ROWS", 8)
    made, report = graphed(Plain(3))
    for kind in report.streams[0].segments:
        assert kind.buckets == (
            BucketStreams(16, False, "beyond 8 rows one branch fills the device"), BucketStreams(8, True),
        )  # fmt: skip
    assert len(forks) == 1 + 2 + 2 + 1, "of four segments at one bucket"
    assert made.verify(make_inputs=lambda n: (ids_only(n), {})).ok


def test_small_is_up_to_512_rows():
    made = piecewise.compile(Plain(1), buckets=(512, 513), progress=False, num_streams=2)
    report = made.capture(make_ids(5))
    for kind in report.streams[0].segments:
        assert [(each.bucket, each.kept) for each in kind.buckets] == [(513, False), (512, True)]


def test_I8_a_form_on_streams_leaves_no_graph_and_no_change_of_state():
    model = Plain(3)
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters()]}
    caches = [layer.cache.clone() for layer in model.layers]
    made, _ = graphed(model)
    live = [tape for tape in inspect(made).pool.graphs if not tape.is_reset]
    assert len(live) == 4 * 2
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    assert all(torch.equal(cache, layer.cache) for cache, layer in zip(caches, model.layers, strict=True))


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


def test_I8_a_segment_that_writes_is_scheduled_and_right_and_its_state_is_put_back():
    model = Counts()
    found = check(model)
    assert found[0].branches == (2,) and all(bucket.kept for bucket in found[0].buckets)
    model = Counts()
    graphed(model)
    assert model.count.item() == 0


def test_chosen_again_after_refresh_and_resume(forks):
    made, _ = graphed(Plain(2))
    count = len(forks)
    made.refresh()
    assert len(forks) == 2 * count
    made.suspend()
    report = made.resume()
    assert len(forks) == 3 * count and report.streams[0].segments[0].buckets[0].kept


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


def test_the_report_says_what_runs_on_several_streams_and_why_not(monkeypatch):
    monkeypatch.setattr(streams, "MAX_ROWS", 8)
    made, report = graphed(Plain(3))
    text = str(report)
    assert "up to 2 streams: 3 of 3 distinct graph segments have independent branches" in text
    middle = "segment 2 (layers.0.o .. layers.1) and 1 like it: 2 and 3 independent branches, on 2 streams"
    assert middle in text
    assert "one stream (beyond 8 rows one branch fills the device) at 16\n" in text
    assert "several streams at 8\n" in text
    assert str(report.streams[0]) in str(made.report())
    first = json.loads(report.to_json())["streams"][0]["segments"][0]
    assert first["branches"] == [3] and first["num_streams"] == 2
    assert first["buckets"][1] == {"bucket": 8, "kept": True, "reason": ""}


def test_explain_previews_branches_and_captures_nothing(forks):
    made = piecewise.compile(Plain(3), buckets=(8, 16), progress=False, num_streams=3)
    plan = made.explain(make_ids(5))
    assert [each.branches for each in plan.streams.segments] == [(3,), (2, 3), (2,)] and not forks
    assert "3 independent branches, on 3 streams" in str(plan) and "streams at" not in str(plan)
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
