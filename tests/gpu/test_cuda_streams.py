"""Branches on real streams: the same bits, joined, no memory freed too early."""

from __future__ import annotations

import contextlib
from typing import Any

import paged_models
import pytest
import torch
from aten_segments import ROWS, segment_of
from branched_models import Experts, Gated, Reads, Writes, with_head
from inspection import inspect
from plain_decoder import Plain
from torch import Tensor, nn
from torch.nn import functional as F
from toy_models import HIDDEN, make_ids, mix

import boundary_ops
import piecewise
from boundary_ops import PrefillBatch
from piecewise.streams import streams
from piecewise.streams.streams import ScheduledFunction
from runners.engines import engine_for
from runners.errors import CaptureError

pytestmark = pytest.mark.gpu

# Long enough that no other work of a test takes as long.
_CYCLES = 20_000_000


@torch.library.custom_op("cuda_streams::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    """A copy, made by a kernel that keeps one multiprocessor busy for some milliseconds first."""
    torch.cuda._sleep(_CYCLES)
    return x.clone()


@slow.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


boundary_ops.declare_rows("cuda_streams::slow", token_args={"x": 0})


@torch.library.custom_op("cuda_streams::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    raise ValueError("not on this stream")


@fails.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def on_cuda(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    model = model.cuda().to(dtype)
    for module in model.modules():
        if isinstance(getattr(module, "cache", None), Tensor):
            module.cache = module.cache.cuda().to(dtype)
    return model


def graphed(model: Any, num_streams: int = 2, **settings: Any) -> Any:
    settings = {"buckets": (8, 16), "progress": False, **settings}
    made = piecewise.compile(model, num_streams=num_streams, **settings)
    with torch.no_grad():
        report = made.capture(make_ids(5).cuda())
    assert report.ok, report
    return made, report


def check_verified(made: Any) -> None:
    with torch.no_grad():
        found = made.verify(make_inputs=lambda n: ((make_ids(n).cuda(),), {}))
    assert found.ok, str(found)


class Trial:
    """A function's graph on one stream and the one on several, captured into one pool."""

    def __init__(self, function: Any, *tensors: Tensor, num_streams: int = 2) -> None:
        self.segment, values = segment_of(function, tensors)
        self.tensors = tensors
        self.made = ScheduledFunction.of(self.segment, values, num_rows=ROWS, num_streams=num_streams)
        assert self.made.schedule.regions, "no branches"
        self.engine = engine_for("cuda", tensors[0].device)
        self.pool = self.engine.new_pool(tensors[0].device)
        self.pool.begin_bucket()
        for _ in range(2):
            self.segment.function(ROWS, *tensors)
            self.made.run(self.pool.streams, ROWS, *tensors)
        # First, while the pool has no free blocks: which ones it then takes is known.
        self.parallel = self.engine.capture(self.on_streams, pool=self.pool, segment="several streams")
        self.serial = self.engine.capture(
            lambda: self.segment.function(ROWS, *tensors), pool=self.pool, segment="one stream"
        )

    def on_streams(self) -> Any:
        return self.made.run(self.pool.streams, ROWS, *self.tensors)

    def results(self, graph: Any) -> list[Tensor]:
        self.pool.overwrite_with_garbage()
        graph.replay()
        torch.cuda.synchronize()
        return [output.clone() for output in graph.outputs]

    def close(self) -> None:
        for graph in (self.serial, self.parallel):
            graph.reset()
        self.pool.release()


@contextlib.contextmanager
def trial(function: Any, *tensors: Tensor, num_streams: int = 2) -> Any:
    with torch.no_grad():
        made = Trial(function, *tensors, num_streams=num_streams)
        try:
            yield made
        finally:
            made.close()


def rows(width: int = 256, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, width, device="cuda", dtype=dtype)


def weight(width: int = 256, out: int = 256, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(out, width, device="cuda", dtype=dtype) / width**0.5


# --- one graph


@pytest.mark.parametrize("num_streams", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_q_k_v_and_gate_up_have_the_bits_and_the_nodes_of_one_stream(num_streams, dtype):
    def block(x, norm, q, k, v, o, gate, up, down):
        y = F.rms_norm(x, (256,), norm)
        x = x + F.linear(F.linear(y, q).sigmoid() * F.linear(y, k) + F.linear(y, v), o)
        y = F.rms_norm(x, (256,), norm)
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    weights = [weight(dtype=dtype) for _ in range(7)]
    norm = torch.ones(256, device="cuda", dtype=dtype)
    with trial(block, rows(dtype=dtype), norm, *weights, num_streams=num_streams) as made:
        assert made.made.schedule.num_branches == (3, 2)
        for _ in range(5):
            for one, other in zip(made.results(made.serial), made.results(made.parallel), strict=True):
                assert torch.equal(one, other)
        assert made.parallel.num_ops == made.serial.num_ops, "forks and joins are edges, not nodes"


def late_read(x, a, b, c):
    """The branch on the side stream reads `y` long after the host has freed it, and after the other branch
    has asked for memory of the same size."""
    y = x * 2
    first = F.linear(F.linear(y, a).exp().sin().cos(), b)
    second = F.linear(y + slow(x) * 0, c)
    return first, second


def test_memory_that_a_stream_still_reads_is_not_handed_out():
    with trial(late_read, rows(), *(weight() for _ in range(3))) as made:
        (region,) = made.made.schedule.regions
        assert len(region.streams[0]) > len(region.streams[1]), (
            "the slow branch is the one on the side stream"
        )
        for one, other in zip(made.results(made.serial), made.results(made.parallel), strict=True):
            assert torch.equal(one, other)


def test_the_test_above_sees_memory_that_is_freed_too_early(monkeypatch):
    monkeypatch.setattr(streams, "_has_memory", lambda node: False)
    with trial(late_read, rows(), *(weight() for _ in range(3))) as made:
        expected, found = made.results(made.serial), made.results(made.parallel)
        assert not all(map(torch.equal, expected, found))


def test_warm_ups_run_on_real_streams_and_come_back_to_the_callers():
    with trial(late_read, rows(), *(weight() for _ in range(3))) as made:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = made.on_streams()
            assert torch.cuda.current_stream() == stream
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, made.results(made.serial)))


def test_I8_an_error_between_fork_and_join_ends_the_capture_and_the_next_one_works():
    def breaks(x, a, b, c):
        first = F.linear(F.linear(x, a), c)
        return first, F.linear(fails(x), b)

    tensors = (rows(), *(weight() for _ in range(3)))
    with trial(late_read, *tensors) as made:
        segment, values = segment_of(breaks, tensors)
        run = ScheduledFunction.of(segment, values, num_rows=ROWS, num_streams=2).run
        assert run is not None
        before = torch.cuda.current_stream()

        def broken() -> Any:
            return run(made.pool.streams, ROWS, *tensors)

        for _ in range(2):
            with pytest.raises((ValueError, CaptureError), match="not on this stream"):
                made.engine.capture(broken, pool=made.pool, segment="broken")
            assert torch.cuda.current_stream() == before and not torch.cuda.is_current_stream_capturing()
        again = made.engine.capture(made.on_streams, pool=made.pool, segment="again")
        assert all(map(torch.equal, made.results(again), made.results(made.serial)))
        again.reset()


def test_each_capture_of_a_pool_takes_the_same_streams():
    with trial(late_read, rows(), *(weight() for _ in range(3))) as made:
        sides = list(made.pool.streams._sides)
        assert len(sides) == 1 and sides[0] != made.pool.stream
        made.on_streams()
        assert made.pool.streams._sides == sides


# --- whole models


@pytest.mark.parametrize("num_streams", [2, 3])
def test_I3_a_decoder_verifies_and_has_the_bits_of_one_stream(num_streams):
    model = on_cuda(Plain(3))
    one, _ = graphed(model, 1)
    made, report = graphed(model, num_streams)
    (found,) = report.streams
    assert [each.branches for each in found.segments] == [(3,), (2, 3), (2,)]
    assert all(bucket.kept for each in found.segments for bucket in each.buckets)
    check_verified(made)
    with torch.no_grad():
        for n in (2, 7, 8, 13, 16):
            assert torch.equal(made(make_ids(n).cuda()), one(make_ids(n).cuda()))
    assert made.stats.eager_calls == one.stats.eager_calls == 0


MODELS = {
    "experts": lambda: with_head(Experts),
    "writes": lambda: with_head(Writes),
    "reads": lambda: with_head(Reads),
    "decoder": lambda: Plain(2),
}


@pytest.mark.parametrize("fusions", [(), ("rms_norm", "add_rms_norm", "silu_and_mul")], ids=["none", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_I3_models_verify(name, dtype, fusions):
    made, report = graphed(on_cuda(MODELS[name](), dtype), fusions=fusions)
    assert any(bucket.kept for each in report.streams[0].segments for bucket in each.buckets)
    check_verified(made)


def test_branches_between_captured_boundary_ops():
    cache = paged_models.new_cache(device="cuda")
    model = paged_models.new_paged(cache=cache, between=Gated()).cuda()
    made = piecewise.compile(
        model, buckets=paged_models.BUCKETS, boundary="captured", num_streams=2, progress=False,
        **paged_models.LIMITS,
    )  # fmt: skip
    with torch.no_grad():
        report = made.capture(torch.arange(7).cuda(), torch.arange(7).cuda())
    assert report.ok and report.streams[0].segments[0].branches == (2, 2), report
    assert all(bucket.kept for bucket in report.streams[0].segments[0].buckets)
    for names, lens in (("a", (3,)), ("ab", (1, 3)), ("ba", (4, 4)), ("a", (1,)), ("b", (8,))):
        assert paged_models.serve_step(made, names, lens, close=1e-4) == "replay"
    batch = PrefillBatch.build(cache, "ab", (3, 2))
    with batch, torch.no_grad():
        found = made.verify(torch.arange(5).cuda(), batch.positions[0])
    assert found.ok, str(found)


class Wide(nn.Module):
    """One layer of a decoder, wide enough that its activations are most of the pool."""

    def __init__(self, hidden: int = 2048) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, hidden)
        self.parts = nn.ModuleDict({name: nn.Linear(hidden, hidden, bias=False) for name in "qkvo"})
        self.gate, self.up = (nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.cache = torch.zeros(8192, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids % 64)
        q, k, v = (self.parts[name](x) for name in "qkv")
        out = torch.empty_like(q)
        mix(q, k, v, out, self.cache)
        x = x + self.parts["o"](out)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_I9_the_pool_is_that_of_the_largest_bucket_and_not_doubled_by_streams(monkeypatch):
    """Each stream has a cuBLAS workspace of its own, of some 32 MiB; activations are far more."""
    monkeypatch.setattr(streams, "MAX_ROWS", 8192)

    def pool_bytes(num_streams: int, buckets: tuple[int, ...]) -> int:
        made, report = graphed(on_cuda(Wide(), torch.bfloat16), num_streams, buckets=buckets)
        print(num_streams, buckets, report, sep="\n")  # with -s: what the streams cost
        found = report.pool_bytes
        made.release()
        return found

    one, several = pool_bytes(1, (8192,)), pool_bytes(2, (8192,))
    assert one > 150 << 20 and several < 2 * one
    assert pool_bytes(2, (2048, 4096, 8192)) <= 1.15 * several


def test_suspend_and_release_give_all_of_it_back():
    made, _ = graphed(on_cuda(Plain(2)))

    def cycle() -> int:
        check_verified(made)
        made.suspend()
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated()
        made.resume()
        return left

    first = cycle()
    assert [cycle() for _ in range(3)] == [first] * 3


# --- where they are used


class Two(nn.Module):
    """Two branches, each a small matmul and what `around` makes of it."""

    def __init__(self, around: Any, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, hidden)
        self.a, self.b = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.around, self.cache = around, torch.zeros(8192, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids % 64)
        x = self.around(self.a(x)) + self.around(self.b(x))
        out = torch.empty_like(x)
        mix(x, x, x, out, self.cache)
        return out * 2


def test_branches_run_at_small_buckets_on_several_streams_and_at_large_ones_on_one_stream():
    made, report = graphed(on_cuda(Two(slow)), buckets=(16, 4096))
    first = report.streams[0].segments[0]
    assert first.branches == (2,), report
    assert [(each.bucket, each.kept) for each in first.buckets] == [(4096, False), (16, True)]
    check_verified(made)


def test_I8_each_bucket_of_a_segment_has_one_graph():
    made, _ = graphed(on_cuda(Plain(3)))
    assert inspect(made).pool.num_live == 4 * 2
    check_verified(made)
