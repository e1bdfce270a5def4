"""Inductor's kernels in real CUDA graphs: eager's to rounding, compiled and tuned before captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_models import SIZES, check_equal, compiled, inputs, make
from inspection import inspect
from torch import Tensor, nn

import piecewise
from piecewise import torch_api
from piecewise.capture import model_calls
from piecewise.prefill_case import PrefillCase
from piecewise.tools.bench.variants import VariantMaker

pytestmark = pytest.mark.gpu


def check_close(graphed: Any, n: int) -> None:
    args = inputs(n)
    with torch.no_grad():
        with piecewise.eager_only():
            expected = graphed(*args)
        before = graphed.stats.replays
        found = graphed(*args)
    assert graphed.stats.replays == before + 1, graphed.report()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.stride() == expected.stride()


def test_every_size_equals_eager_to_rounding_and_segments_are_compiled_once() -> None:
    graphed, report = compiled(make(num_layers=6), lowering="inductor")
    (lowering,) = report.lowerings
    assert report.ok and (lowering.num_segments, lowering.num_distinct) == (7, 3)
    assert lowering.num_compiled == 3 and lowering.kept_eager == ()
    for n in SIZES:
        check_close(graphed, n)
    verified = graphed.verify(*inputs(13))
    assert verified.ok, verified
    report = graphed.refresh()
    assert report.ok and report.lowerings[0].num_compiled == 0 and report.lowerings[0].num_reused == 3
    check_close(graphed, 9)


def test_nothing_is_compiled_or_tuned_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first launch tunes: it measures, which waits for the device; in a capture that is an error."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    during: list[bool] = []
    original = CachingAutotuner.benchmark_all_configs

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        during.append(torch.cuda.is_current_stream_capturing())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", noted)
    with torch._inductor.config.patch("force_disable_caches", True):
        graphed, report = compiled(make(num_layers=2), lowering="inductor", warmup_steps=1, strict=True)
    assert report.ok and not any(during)
    check_close(graphed, 7)


def test_the_processes_that_compile_kernels_start_before_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    asked: list[str] = []

    def noting(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (asked.append(name), original(*a, **k))[1])

    noting(AsyncCompile, "wakeup")
    noting(model_calls, "trace_model")
    compiled(make(num_layers=1), lowering="inductor")
    assert asked.index("wakeup") < asked.index("trace_model")
    asked.clear()
    compiled(make(num_layers=1))
    assert asked == ["trace_model"]


def test_fewer_kernels_than_eager() -> None:
    def num_nodes(**options: Any) -> int:
        graphed, _ = compiled(make(num_layers=2), **options)
        runners = inspect(graphed).runners
        return sum(runner.graph_for(16).num_ops for runner in runners)

    assert num_nodes(lowering="inductor") < num_nodes(lowering="eager")


def test_compiled_for_one_size_and_one_token() -> None:
    graphed, report = compiled(make(), buckets=(1, 8, 16), lowering="inductor", compile_sizes=(16,))
    assert report.ok and report.lowerings[0].num_compiled == 3 * 3
    for n in (1, 2, 8, 9, 16):
        check_close(graphed, n)


def test_I6_a_segment_that_cannot_be_compiled_keeps_eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_api.compile_aten_graph

    def refuses(graph: Any, arguments: Any, fake_mode: Any) -> Any:
        if graph.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
            raise NotImplementedError("no embedding")
        return original(graph, arguments, fake_mode)

    monkeypatch.setattr(torch_api, "compile_aten_graph", refuses)
    graphed, report = compiled(make(), lowering="inductor")
    (kept,) = report.lowerings[0].kept_eager
    assert report.ok and "no embedding" in kept.reason
    check_close(graphed, 7)


class Counting(nn.Module):
    """Writes a buffer, and a view of it that is a tensor of its own, inside a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make(num_layers=1)
        self.caches = self.inner.caches
        self.table = torch.linspace(-1, 1, 4 * 64, device="cuda").reshape(4, 64)
        self.row = self.table[1]

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.inner(ids, positions)
        self.table.mul_(0.5)
        x = x + self.row
        self.row.add_(1)
        return x + self.table[1]


def test_aliased_inputs_that_are_written_move_as_in_eager() -> None:
    model = Counting()
    start = model.table.clone()
    graphed, report = compiled(model, lowering="inductor")
    (kept,) = report.lowerings[0].kept_eager
    assert report.ok and "share memory that it writes" in kept.reason and torch.equal(model.table, start)
    args = inputs(11)
    with torch.no_grad():
        expected = [model(*args) for _ in range(3)]
        table = model.table.clone()
        model.table.copy_(start)
        found = [graphed(*args) for _ in range(3)]
    assert graphed.stats.replays == 3
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.table, table)


def test_the_floor_has_the_same_kernels() -> None:
    case = PrefillCase(make(), lambda n: (inputs(n), {}))
    config = piecewise.PiecewiseConfig(buckets=(16,), progress=False)
    with torch.inference_mode():
        maker = VariantMaker(case, config, [16])
        graphed, floor = maker.prepare("graphed-inductor"), maker.prepare("floor-inductor")
        args = inputs(16)
        (found,) = floor.prepare(16, args, {})()
        torch.testing.assert_close(found, graphed.prepare(16, args, {})(), rtol=0, atol=0)
        floor.close()
        graphed.close()


def test_eager_lowering_stays_bit_for_bit() -> None:
    graphed, _ = compiled(make())
    check_equal(graphed, 16)
