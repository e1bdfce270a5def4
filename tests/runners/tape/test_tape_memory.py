"""The tape's memory is poisoned, shared by buckets and given back; a failed capture leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from tapes import assert_equal, new_pool, record
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from runners.errors import (
    CaptureError,
    InsideCapture,
    NoOutputSequence,
    PoolHasGraphs,
    PoolInUse,
    PoolReleased,
    ReadBack,
    ReplayAfterReset,
)
from runners.mode import capturing


def test_I2_a_value_that_survives_from_an_earlier_call_is_caught() -> None:
    """The segment writes half of its memory; the other half must not still hold the last call's values."""
    x = torch.ones(8)

    def fn() -> tuple[Tensor]:
        y = torch.empty(8)
        y[:4] = x[:4]
        return (y,)

    graph = record(fn)
    graph.outputs[0].fill_(3)
    graph.replay()
    assert graph.outputs[0][:4].tolist() == [1.0] * 4 and graph.outputs[0][4:].isnan().all()


def test_I2_a_reader_before_the_writer_sees_garbage() -> None:
    """A later segment replayed without the earlier one, whose memory was overwritten, must not look right."""
    pool, x = new_pool(), torch.ones(4)
    first = record(lambda: (x + 1, (x + 1) > 0), pool)
    y, mask = first.outputs
    second = record(lambda: (y * 2, ~mask), pool, "segment 2")
    first.replay()
    second.replay()
    assert second.outputs[0].tolist() == [4.0] * 4 and second.outputs[1].tolist() == [False] * 4
    pool.end_bucket()
    other = record(lambda: (torch.zeros(64),), pool)
    other.replay()
    second.replay()
    assert second.outputs[0].tolist() != [4.0] * 4


def test_in_place_views_across_two_tapes() -> None:
    pool, x = new_pool(), torch.randn(4, 6)

    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        big = x * 2
        view = big[:, :3]
        view.add_(10)
        return big, big.sum(-1)

    first = record(lambda: (big := x * 2, big[:, :3]), pool, "segment 1")
    big, view = first.outputs
    second = record(lambda: (view.add_(10),), pool, "segment 2")
    third = record(lambda: (big, big.sum(-1)), pool, "segment 3")
    assert_equal(third.outputs, eager(x))
    for _ in range(2):
        x.normal_()
        for graph in (first, second, third):
            graph.replay()
        assert_equal(third.outputs, eager(x))


def sized(x: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def fn() -> tuple[Tensor, ...]:
        y = x @ x.t()
        return y, (y.exp() + 1).sum(-1), y > 0

    return fn


def test_I9_a_smaller_bucket_needs_no_more_memory() -> None:
    pool = new_pool()
    sizes = (700, 512, 300, 40)
    graphs = {}
    held = []
    for size in sizes:
        graphs[size] = [record(sized(torch.randn(size, 16)), pool) for _ in range(2)]
        pool.end_bucket()
        held.append(pool.allocated_bytes)
    assert held == [held[0]] * len(sizes)
    assert held[0] >= 2 * 700 * 700 * 4
    assert graphs[700][0].outputs[0].data_ptr() == graphs[40][0].outputs[0].data_ptr()
    # Segments of one bucket never overlap.
    assert graphs[700][0].outputs[0].data_ptr() != graphs[700][1].outputs[0].data_ptr()


def test_I9_captured_smallest_first_the_memory_grows_to_the_largest() -> None:
    small_first, large_only = new_pool(), new_pool()
    record(sized(torch.randn(40, 16)), small_first)
    small_first.end_bucket()
    before = small_first.allocated_bytes
    record(sized(torch.randn(700, 16)), small_first)
    record(sized(torch.randn(700, 16)), large_only)
    assert before < small_first.allocated_bytes <= 1.25 * large_only.allocated_bytes + before


def test_I9_another_buckets_replay_overwrites_the_outputs() -> None:
    pool = new_pool()
    large, small = torch.ones(64), torch.ones(8)
    first = record(lambda: (large + 1,), pool)
    pool.end_bucket()
    second = record(lambda: (small + 5,), pool)
    first.replay()
    assert first.outputs[0].tolist() == [2.0] * 64
    second.replay()
    assert first.outputs[0][:8].tolist() == [6.0] * 8


def test_a_large_tensor_gets_a_chunk_and_addresses_stay() -> None:
    pool, x = new_pool(), torch.randn(4)
    first = record(lambda: (x + 1,), pool)
    address = first.outputs[0].data_ptr()
    big = record(lambda: (torch.zeros(3_000_000), x + 2), pool)
    assert pool.allocated_bytes >= 12_000_000 + (1 << 20)
    first.replay()
    big.replay()
    assert first.outputs[0].data_ptr() == address
    assert torch.equal(first.outputs[0], x + 1) and torch.equal(big.outputs[1], x + 2)


def test_release_needs_every_graph_reset_and_ends_the_pool() -> None:
    pool, x = new_pool(), torch.ones(3)
    graphs = [record(lambda: (x + 1,), pool) for _ in range(2)]
    graphs[0].reset()
    with pytest.raises(PoolHasGraphs, match="1 still captured"):
        pool.release()
    graphs[1].reset()
    pool.release()
    pool.release()
    assert pool.allocated_bytes == 0
    for attempt in (lambda: record(lambda: (x + 1,), pool), pool.end_bucket):
        with pytest.raises(PoolReleased, match="released pool"):
            attempt()


def test_outputs_kept_by_the_caller_outlive_the_pool() -> None:
    pool, x = new_pool(), torch.ones(100_000)
    graph = record(lambda: (x + 1,), pool)
    kept = graph.outputs[0]
    graph.reset()
    pool.release()
    gc.collect()
    assert kept.sum().item() == 200_000


def test_reset_is_idempotent_and_ends_replay() -> None:
    x = torch.ones(3)
    graph = record(lambda: (x + 1,))
    graph.reset()
    graph.reset()
    assert graph.outputs == ()
    with pytest.raises(ReplayAfterReset, match="segment 1.*reset"):
        graph.replay()


def test_reset_lets_go_of_the_weights() -> None:
    weight = torch.randn(4, 4)
    gone = StorageWeakRef(weight.untyped_storage())
    x = torch.randn(2, 4)
    graph = record(lambda weight=weight: (x @ weight,))
    del weight
    gc.collect()
    assert not gone.expired()
    graph.replay()
    graph.reset()
    gc.collect()
    assert gone.expired()


class Boom(Exception):
    pass


def test_I8_an_error_passes_through_and_leaves_nothing() -> None:
    pool, x = new_pool(), torch.ones(600_000)
    kept = record(lambda: (x[:4] + 1,), pool)
    held = pool.allocated_bytes

    def fails() -> tuple[Tensor]:
        y = x + 1
        assert y.sum() is not None
        raise Boom

    for _ in range(5):
        with pytest.raises(Boom):
            record(fails, pool)
        assert pool.allocated_bytes == held and not pool.is_recording
        assert capturing() is None and _get_current_dispatch_mode_stack() == []
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert x[:2].tolist() == [1.0, 1.0], "reading values works again"
    # The offset was put back: the next capture begins where the failed one did.
    after = record(lambda: (x[:4] + 2,), pool)
    assert after.outputs[0].data_ptr() - kept.outputs[0].data_ptr() == 64
    kept.replay()
    assert kept.outputs[0].tolist() == [2.0] * 4 and after.outputs[0].tolist() == [3.0] * 4


def test_I8_a_failed_first_capture_holds_no_memory() -> None:
    pool, x = new_pool(), torch.ones(4)
    with pytest.raises(CaptureError):
        record(lambda: (x + 1, (x + 1).tolist()), pool)
    assert pool.allocated_bytes == 0
    pool.release()


def test_a_swallowed_refusal_still_fails_the_capture() -> None:
    x = torch.ones(4)

    def fn() -> tuple[Tensor]:
        try:
            scale = float(x.sum())
        except CaptureError:
            scale = 2.0
        return (x * scale,)

    pool = new_pool()
    with pytest.raises(ReadBack, match="Tensor.__float__"):
        record(fn, pool)
    assert pool.allocated_bytes == 0


def test_captures_and_replays_do_not_nest() -> None:
    x = torch.ones(3)
    pool, other = new_pool(), new_pool()
    graph = record(lambda: (x + 1,), other)
    with pytest.raises(InsideCapture, match="segment 2.*the capture of segment 1"):
        record(lambda: record(lambda: (x,), other, "segment 2").outputs, pool)
    with pytest.raises(InsideCapture, match="replay of segment 1.*the capture of segment 1"):
        record(lambda: (graph.replay(), x)[1:], pool)
    assert pool.allocated_bytes == 0
    graph.replay()


def test_a_pool_is_not_used_by_two_captures() -> None:
    pool, x = new_pool(), torch.ones(3)

    def fn() -> tuple[Tensor]:
        with pytest.raises(PoolInUse):
            pool.end_bucket()
        with pytest.raises(PoolInUse, match="in progress"):
            pool.release()
        return (x + 1,)

    record(fn, pool).replay()


def test_outputs_must_be_a_sequence() -> None:
    x = torch.ones(3)
    with pytest.raises(NoOutputSequence, match="segment 1.*tuple or list.*Tensor"):
        record(lambda: x + 1)


def test_an_op_that_fails_at_replay_passes_its_error_on() -> None:
    table, index = torch.randn(4, 2), torch.tensor([0, 3])
    graph = record(lambda: (table[index],))
    index.fill_(9)
    with pytest.raises(IndexError):
        graph.replay()
    index.fill_(1)
    graph.replay()
    assert torch.equal(graph.outputs[0], table[[1, 1]])
