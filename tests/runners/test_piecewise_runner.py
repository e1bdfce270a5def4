"""One segment over its buckets: warm-ups, one capture each, replay where valid, eager everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from runners.engines import engine_for
from runners.errors import NegativeWarmUps, ReadBack, ReplayAfterReset, SegmentFailed, WrongBucketState
from runners.mode import eager_only
from runners.piecewise_runner import COLD, BucketPhase, BucketState, PiecewiseRunner

CPU = torch.device("cpu")
HIDDEN = 8


class Segment:
    """Counts its runs; optionally fails in the ways a model can."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.runs: list[int] = []
        self.modes: list[tuple[bool, bool]] = []
        self.fault: Exception | str | None = None

    def __call__(self, padded_num_tokens: int, x: Tensor, scale: float = 1.0) -> Sequence[Any]:
        self.runs.append(padded_num_tokens)
        self.modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        y = (x @ self.weight) * scale + padded_num_tokens
        if self.fault == "item":
            y = y * y.sum().item()
        elif isinstance(self.fault, BaseException):
            raise self.fault
        return [y, torch.softmax(y, -1), None, padded_num_tokens]


@pytest.fixture
def segment() -> Segment:
    return Segment()


@pytest.fixture
def runner(segment: Segment) -> PiecewiseRunner:
    engine = engine_for("tape", CPU)
    return PiecewiseRunner(
        segment,
        name="segment 3",
        engine=engine,
        pool=engine.new_pool(CPU),
        module_path="model.layers.2.mlp",
    )


def capture(runner: PiecewiseRunner, size: int, *args: Any) -> tuple[Any, ...]:
    for _ in range(runner.warmup_steps):
        runner.warm_up(size, args)
    return runner.capture(size, args)


@torch.no_grad()
def check_equal(found: Sequence[Any], segment: Segment, size: int, *args: Any) -> None:
    expected = segment(size, *args)
    assert len(found) == 4 and found[2] is None and found[3] == size
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_the_states_of_a_bucket(runner: PiecewiseRunner, segment: Segment) -> None:
    x = torch.randn(16, HIDDEN)
    assert runner.state_for(16) == COLD and runner.graph_for(16) is None
    for step in (1, 2, 3):
        check_equal(runner.warm_up(16, (x,)), segment, 16, x)
        assert runner.state_for(16) == BucketState(BucketPhase.WARMING, step)
    outputs = runner.capture(16, (x,))
    assert runner.state_for(16) == BucketState(BucketPhase.CAPTURED)
    assert runner.graph_for(16).outputs is outputs
    assert runner.captured == (16,) and runner.num_captures == 1 and runner.num_replays == 0
    assert runner.state_for(8) == COLD


def test_three_warm_ups_one_capture_then_no_runs_at_all(runner: PiecewiseRunner, segment: Segment) -> None:
    x = torch.randn(16, HIDDEN)
    outputs = capture(runner, 16, x)
    assert segment.runs == [16] * 4
    for _ in range(3):
        x.normal_()
        assert runner.replay(16) is outputs
    assert segment.runs == [16] * 4 and runner.num_replays == 3
    check_equal(outputs, segment, 16, x)


def test_each_bucket_has_its_own_graph(runner: PiecewiseRunner, segment: Segment) -> None:
    buckets = {size: torch.randn(size, HIDDEN) for size in (32, 16, 2, 1)}
    for size, x in buckets.items():
        capture(runner, size, x)
    assert runner.captured == (32, 16, 2, 1) and runner.num_captures == 4
    for size, x in reversed(buckets.items()):
        x.normal_()
        check_equal(runner(size, x), segment, size, x)
    assert runner.num_replays == 4


@pytest.mark.parametrize("num_warmups", [0, 1, 2])
def test_capture_needs_its_warm_ups(runner: PiecewiseRunner, num_warmups: int) -> None:
    x = torch.randn(4, HIDDEN)
    for _ in range(num_warmups):
        runner.warm_up(4, (x,))
    got = f"after {num_warmups} of 3 warm-ups" if num_warmups else "a cold one"
    with pytest.raises(WrongBucketState, match=rf"segment 3 \(model.layers.2.mlp\), bucket 4.*{got}"):
        runner.capture(4, (x,))
    assert runner.state_for(4).phase is (BucketPhase.WARMING if num_warmups else BucketPhase.COLD)
    assert runner.captured == ()


def test_no_warm_ups_are_needed_where_none_are_asked_for(segment: Segment) -> None:
    engine = engine_for("tape", CPU)
    runner = PiecewiseRunner(segment, name="s", engine=engine, pool=engine.new_pool(CPU), warmup_steps=0)
    runner.capture(4, (torch.randn(4, HIDDEN),))
    assert segment.runs == [4]
    with pytest.raises(NegativeWarmUps, match="warmup_steps.*-1"):
        PiecewiseRunner(segment, name="s", engine=engine, pool=engine.new_pool(CPU), warmup_steps=-1)


def test_a_captured_bucket_takes_neither_warm_up_nor_capture(runner: PiecewiseRunner) -> None:
    x = torch.randn(4, HIDDEN)
    capture(runner, 4, x)
    for attempt in (runner.warm_up, runner.capture):
        with pytest.raises(WrongBucketState, match="bucket 4.*a captured one"):
            attempt(4, (x,))
    assert runner.num_captures == 1


def test_replay_of_what_was_never_captured(runner: PiecewiseRunner) -> None:
    with pytest.raises(WrongBucketState, match="replay of segment 3.*bucket 8.*a cold one"):
        runner.replay(8)


def test_warm_up_and_capture_run_without_grad_and_inference_mode(
    runner: PiecewiseRunner, segment: Segment
) -> None:
    x = torch.randn(4, HIDDEN)
    with torch.inference_mode():
        outputs = capture(runner, 4, x)
    assert segment.modes == [(False, False)] * 4
    assert not outputs[0].is_inference()
    outputs[0].zero_()


def test_call_replays_only_with_the_captured_arguments(runner: PiecewiseRunner, segment: Segment) -> None:
    x = torch.randn(4, HIDDEN)
    outputs = capture(runner, 4, x, 2.0)
    segment.runs.clear()
    assert runner(4, x, 2.0)[0] is outputs[0]
    assert runner(4, x.view(4, HIDDEN), 2.0)[0] is outputs[0], "another object of the same memory"
    assert segment.runs == [] and runner.num_replays == 2
    wide = torch.randn(4, 2 * HIDDEN)
    elsewhere: dict[str, tuple[Any, ...]] = {
        "address": (x.clone(), 2.0),
        "value": (x, 3.0),
        "type of a value": (x, 2),
        "number of arguments": (x,),
        "tensor for a value": (x, torch.tensor(2.0)),
    }
    for what, args in elsewhere.items():
        segment.runs.clear()
        check_equal(runner(4, *args), segment, 4, *args)
        assert segment.runs == [4, 4], what
    check_equal(runner(4, wide[:, :HIDDEN], 2.0), segment, 4, wide[:, :HIDDEN], 2.0)
    assert runner.num_replays == 2


def test_call_compares_shape_stride_and_dtype_at_the_same_address(segment: Segment) -> None:
    engine = engine_for("tape", CPU)

    def double(padded_num_tokens: int, x: Tensor) -> list[Tensor]:
        segment.runs.append(padded_num_tokens)
        return [x * 2]

    runner = PiecewiseRunner(double, name="s", engine=engine, pool=engine.new_pool(CPU), warmup_steps=0)
    x = torch.randn(4, 4)
    runner.capture(4, (x,))
    segment.runs.clear()
    for other in (x.t(), x[:3], x.view(16), x.view(torch.int32)):
        assert other.data_ptr() == x.data_ptr()
        (result,) = runner(4, other)
        assert torch.equal(result, other * 2) and result.dtype == other.dtype
    assert segment.runs == [4] * 4 and runner.num_replays == 0


def test_I4_a_moved_argument_runs_eagerly(runner: PiecewiseRunner, segment: Segment) -> None:
    x = torch.randn(4, HIDDEN)
    capture(runner, 4, x)
    x.data = torch.randn(4, HIDDEN)
    check_equal(runner(4, x), segment, 4, x)
    assert runner.num_replays == 0


def test_an_unknown_bucket_runs_eagerly(runner: PiecewiseRunner, segment: Segment) -> None:
    capture(runner, 4, torch.randn(4, HIDDEN))
    x = torch.randn(5, HIDDEN)
    check_equal(runner(5, x), segment, 5, x)
    assert runner.num_replays == 0 and runner.state_for(5) == COLD


def test_eager_only_runs_eagerly(runner: PiecewiseRunner, segment: Segment) -> None:
    x = torch.randn(4, HIDDEN)
    outputs = capture(runner, 4, x)
    segment.runs.clear()
    with eager_only():
        result = runner(4, x)
    assert result[0] is not outputs[0] and segment.runs == [4] and runner.num_replays == 0
    runner(4, x)
    assert runner.num_replays == 1


@pytest.mark.parametrize("fault", ["item", ValueError("bad shape")])
def test_I8_a_failed_capture_leaves_nothing_and_the_others_go_on(
    runner: PiecewiseRunner, segment: Segment, fault: Exception | str
) -> None:
    large, small = torch.randn(64, HIDDEN), torch.randn(4, HIDDEN)
    capture(runner, 64, large)
    pool = runner._pool
    held = pool.allocated_bytes
    for _ in range(3):
        runner.warm_up(4, (small,))
    segment.fault = fault
    with pytest.raises(ReadBack if fault == "item" else SegmentFailed) as caught:
        runner.capture(4, (small,))
    message = str(caught.value)
    assert "segment 3 (model.layers.2.mlp)" in message and "bucket 4" in message
    assert ("Tensor.item" if fault == "item" else "ValueError: bad shape") in message
    assert runner.state_for(4) == BucketState(BucketPhase.EAGER_ONLY, reason=message)
    assert runner.graph_for(4) is None and runner.captured == (64,) and runner.num_captures == 1
    assert pool.allocated_bytes == held
    segment.fault = None
    check_equal(runner(4, small), segment, 4, small)
    check_equal(runner(64, large), segment, 64, large)
    assert runner.num_replays == 1
    for attempt in (runner.warm_up, runner.capture):
        with pytest.raises(WrongBucketState, match="eagerly only"):
            attempt(4, (small,))


def test_an_interrupt_is_not_a_failed_capture(runner: PiecewiseRunner, segment: Segment) -> None:
    x = torch.randn(4, HIDDEN)
    for _ in range(3):
        runner.warm_up(4, (x,))
    segment.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        runner.capture(4, (x,))
    assert runner.state_for(4) == BucketState(BucketPhase.WARMING, 3)
    assert runner._pool.allocated_bytes == 0
    segment.fault = None
    runner.capture(4, (x,))


def test_a_failed_warm_up_counts_for_nothing(runner: PiecewiseRunner, segment: Segment) -> None:
    segment.fault = ValueError("bad shape")
    with pytest.raises(SegmentFailed, match=r"segment 3.*bucket 4.*ValueError: bad shape"):
        runner.warm_up(4, (torch.randn(4, HIDDEN),))
    assert runner.state_for(4) == COLD


def test_reset_begins_anew_and_frees_the_pool(runner: PiecewiseRunner, segment: Segment) -> None:
    x = torch.randn(4, HIDDEN)
    capture(runner, 4, x)
    graph = runner.graph_for(4)
    runner.reset()
    runner.reset()
    assert runner.captured == () and runner.state_for(4) == COLD
    with pytest.raises(ReplayAfterReset):
        graph.replay()
    capture(runner, 4, x)
    check_equal(runner(4, x), segment, 4, x)
    assert runner.num_captures == 2
    runner.reset()
    runner._pool.release()


def test_I9_two_segments_share_one_pool_per_bucket() -> None:
    engine = engine_for("tape", CPU)
    pool = engine.new_pool(CPU)

    def first(padded_num_tokens: int, x: Tensor) -> list[Tensor]:
        return [x * 2, x.new_empty(x.shape[0], 2 * HIDDEN)]

    def second(padded_num_tokens: int, y: Tensor, z: Tensor) -> list[Tensor]:
        z[:, :HIDDEN] = y
        z[:, HIDDEN:] = -y
        return [z + 1]

    runners = [
        PiecewiseRunner(fn, name=f"segment {index}", engine=engine, pool=pool)
        for index, fn in enumerate((first, second))
    ]
    inputs = {size: torch.randn(size, HIDDEN) for size in (600, 100, 7)}
    held = []
    for size, x in inputs.items():
        between = capture(runners[0], size, x)
        capture(runners[1], size, *between)
        pool.end_bucket()
        held.append(pool.allocated_bytes)
    assert held == [held[0]] * 3
    for size, x in inputs.items():
        x.normal_()
        outputs = runners[1](size, *runners[0](size, x))
        assert torch.equal(outputs[0], torch.cat([x * 2, -x * 2], 1) + 1)
    assert [runner.num_replays for runner in runners] == [3, 3]


def test_a_discarded_bucket_is_served_eagerly_with_the_reason(
    runner: PiecewiseRunner, segment: Segment
) -> None:
    buckets = {size: torch.randn(size, HIDDEN) for size in (16, 4)}
    for size, x in buckets.items():
        capture(runner, size, x)
    graph = runner.graph_for(4)
    runner.discard(4, "another segment failed")
    runner.discard(2, "never captured")
    for size, reason in ((4, "another segment failed"), (2, "never captured")):
        assert runner.state_for(size) == BucketState(BucketPhase.EAGER_ONLY, reason=reason)
        assert runner.graph_for(size) is None
    with pytest.raises(ReplayAfterReset):
        graph.replay()
    for size, x in buckets.items():
        check_equal(runner(size, x), segment, size, x)
    assert runner.captured == (16,) and runner.num_replays == 1
