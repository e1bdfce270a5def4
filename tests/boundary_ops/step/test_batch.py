"""A step's metadata, and the rule by which its tokens come to count as written."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from boundary_ops import CacheExhaustedError, PagedKVCache, PrefillBatch
from boundary_ops.errors.step import (
    LengthsDiffer,
    NoRunningBatch,
    NotTokenIds,
    RepeatedRequest,
    StaleBatch,
    WrongPrompts,
    WrongTokenCount,
)

META = ("cu_seqlens_q", "seq_lens", "block_tables", "slot_mapping", "positions")


@pytest.fixture
def cache():
    return PagedKVCache(
        num_layers=1, num_blocks=16, block_size=4, num_kv_heads=1, head_dim=2, dtype=torch.float32
    )


def run(batch):
    """What a model call does to a batch: an op reads it."""
    with batch:
        return PrefillBatch.current()


def test_a_first_step_is_described_exactly(cache):
    cache.allocate("other", 5)
    batch = PrefillBatch.build(cache, ["a", "b"], [5, 2])
    first, second = cache.block_table("a"), cache.block_table("b")
    assert batch.cu_seqlens_q.tolist() == [0, 5, 7] and batch.cu_seqlens_q.dtype == torch.int32
    assert batch.seq_lens.tolist() == [5, 2] and batch.seq_lens.dtype == torch.int32
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1]] and batch.positions.dtype == torch.int64
    assert batch.block_tables.tolist() == [list(first), [second[0], 0]]
    assert batch.block_tables.dtype == torch.int32
    expected = [first[0] * 4 + i for i in range(4)] + [first[1] * 4, second[0] * 4, second[0] * 4 + 1]
    assert batch.slot_mapping.tolist() == expected and batch.slot_mapping.dtype == torch.int64
    assert (batch.max_seqlen_q, batch.max_seqlen_k, batch.num_tokens, batch.num_seqs) == (5, 5, 7, 2)
    assert batch.query_lens == (5, 2) and batch.context_lens == (0, 0)
    assert batch.last_token_indices.tolist() == [4, 6]


def test_a_later_step_continues_from_what_was_written(cache):
    run(PrefillBatch.build(cache, ["a", "b"], [5, 2]))
    batch = PrefillBatch.build(cache, ["b", "c", "a"], [3, 1, 4])
    assert batch.context_lens == (2, 0, 5) and batch.seq_lens.tolist() == [5, 1, 9]
    assert batch.positions.tolist() == [[2, 3, 4, 0, 5, 6, 7, 8]]
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (4, 9) and batch.block_tables.shape == (3, 3)
    table = cache.block_table("a")
    assert batch.slot_mapping[-4:].tolist() == [table[i // 4] * 4 + i % 4 for i in range(5, 9)]


def test_room_that_was_reserved_is_used_and_only_the_rest_is_allocated(cache):
    cache.allocate("a", 10)
    blocks = cache.block_table("a")
    run(PrefillBatch.build(cache, ["a"], [6]))
    run(PrefillBatch.build(cache, ["a"], [4]))
    assert cache.block_table("a") == blocks and cache.room("a") == 10
    run(PrefillBatch.build(cache, ["a"], [5]))
    assert cache.context_len("a") == 15 and cache.room("a") == 15


def test_building_twice_for_one_step_gives_the_same_step(cache):
    first, second = (PrefillBatch.build(cache, ["a", "b"], [5, 2]) for _ in range(2))
    for name in META:
        assert torch.equal(getattr(first, name), getattr(second, name))
    free = cache.num_free_blocks
    run(first)
    run(second)
    assert cache.context_len("a") == 5 and cache.context_len("b") == 2 and cache.num_free_blocks == free


def test_running_a_batch_again_runs_the_same_step_and_counts_once(cache):
    batch = PrefillBatch.build(cache, ["a"], [5])
    run(batch)
    run(batch)
    assert cache.context_len("a") == 5
    later = PrefillBatch.build(cache, ["a"], [3])
    run(later)
    assert cache.context_len("a") == 8
    # The first step again: what followed it is void, and the later step fits on it again.
    run(batch)
    assert cache.context_len("a") == 5
    run(later)
    assert cache.context_len("a") == 8


def test_truncate_lets_a_step_be_built_again(cache):
    run(PrefillBatch.build(cache, ["a"], [5]))
    cache.truncate("a", 0)
    assert PrefillBatch.build(cache, ["a"], [5]).context_lens == (0,)


def test_an_exception_in_the_step_counts_nothing_and_restores_the_outer_batch(cache):
    batch = PrefillBatch.build(cache, ["a"], [5])
    with pytest.raises(RuntimeError, match="boom"), batch:
        PrefillBatch.current()
        raise RuntimeError("boom")
    assert cache.context_len("a") == 0 and PrefillBatch.peek() is None
    run(batch)
    assert cache.context_len("a") == 5


def test_I8_a_block_in_which_no_op_read_the_batch_counts_nothing(cache):
    batch = PrefillBatch.build(cache, ["a"], [5])
    with batch:
        assert PrefillBatch.peek() is batch
    assert cache.context_len("a") == 0


def test_blocks_nest_and_restore(cache):
    outer = PrefillBatch.build(cache, ["a"], [2])
    inner = PrefillBatch.build(cache, ["b"], [3])
    with outer:
        with inner:
            assert PrefillBatch.current() is inner
            with inner:
                assert PrefillBatch.current() is inner
        assert PrefillBatch.peek() is outer
    assert PrefillBatch.peek() is None
    assert cache.context_len("b") == 3 and cache.context_len("a") == 0


def test_a_batch_is_current_in_its_own_thread_only(cache):
    seen = []
    with PrefillBatch.build(cache, ["a"], [2]):
        thread = threading.Thread(target=lambda: seen.append(PrefillBatch.peek()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_without_a_batch_current_says_what_to_do():
    with pytest.raises(NoRunningBatch, match="ns::op") as error:
        PrefillBatch.current("ns::op")
    assert "PrefillBatch.build" in str(error.value) and str(error.value).count("\n") == 2


def test_a_batch_whose_blocks_are_gone_cannot_run(cache):
    batch = PrefillBatch.build(cache, ["a"], [5])
    cache.free("a")
    cache.allocate("a", 5)
    with pytest.raises(StaleBatch, match="freed"), batch:
        pytest.fail("entered")
    assert PrefillBatch.peek() is None


def test_a_batch_whose_context_was_taken_back_cannot_run(cache):
    run(PrefillBatch.build(cache, ["a"], [5]))
    batch = PrefillBatch.build(cache, ["a"], [5])
    cache.truncate("a", 3)
    with pytest.raises(StaleBatch, match="5 context tokens.*3 tokens written"), batch:
        pytest.fail("entered")


def test_a_request_freed_inside_the_block_is_left_alone(cache):
    with PrefillBatch.build(cache, ["a"], [5]):
        PrefillBatch.current()
        cache.free("a")
    assert cache.num_free_blocks == 16 and cache.request_ids == ()


def test_exhaustion_in_build_changes_nothing(cache):
    cache.allocate("a", 4)
    before = (cache.num_free_blocks, cache.request_ids, cache.room("a"))
    with pytest.raises(CacheExhaustedError, match="'a', 'b'"):
        PrefillBatch.build(cache, ["a", "b"], [8, 60])
    assert (cache.num_free_blocks, cache.request_ids, cache.room("a")) == before


@pytest.mark.parametrize(
    ("ids", "lens", "refusal", "text"),
    [
        (["a"], [0], WrongTokenCount, "request 'a'"),
        (["a", "b"], [1, -2], WrongTokenCount, "request 'b'"),
        (["a"], [1.0], WrongTokenCount, "1.0"),
        (["a"], [True], WrongTokenCount, "True"),
        (["a"], ["3"], WrongTokenCount, "'3'"),
        (["a", "b", "a"], [1, 1, 1], RepeatedRequest, "request 'a'.*each request once"),
        (["a", "b"], [1], LengthsDiffer, "2 request_ids and 1 query_lens"),
    ],
)
def test_bad_steps_are_refused_and_change_nothing(cache, ids, lens, refusal, text):
    with pytest.raises(refusal, match=text):
        PrefillBatch.build(cache, ids, lens)
    assert cache.num_free_blocks == 16 and cache.request_ids == ()


def test_an_empty_step_is_valid(cache):
    batch = PrefillBatch.build(cache, [], [])
    assert batch.num_tokens == 0 and batch.positions.shape == (1, 0) and batch.cu_seqlens_q.tolist() == [0]
    assert batch.block_tables.shape == (0, 0) and batch.pack([]).shape == (1, 0)
    assert batch.last_token_indices.shape == (0,)
    run(batch)


def test_pack_takes_lists_and_tensors(cache):
    batch = PrefillBatch.build(cache, ["a", "b", "c"], [3, 1, 2])
    ids = batch.pack([[5, 6, 7], torch.tensor([8], dtype=torch.int32), torch.tensor([[9, 1]])])
    assert ids.tolist() == [[5, 6, 7, 8, 9, 1]] and ids.dtype == torch.int64
    assert ids.shape == batch.positions.shape


@pytest.mark.parametrize(
    ("prompts", "refusal", "text"),
    [
        ([[1, 2, 3]], WrongPrompts, "2 prompts"),
        ([[1, 2, 3], [4, 5]], WrongPrompts, "request 'b'.*1 token ids.*\\[2\\]"),
        ([[1, 2], [4]], WrongPrompts, "request 'a'.*3 token ids"),
        ([torch.ones(3, 1), [4]], NotTokenIds, "request 'a'"),
    ],
)
def test_pack_checks_lengths(cache, prompts, refusal, text):
    batch = PrefillBatch.build(cache, ["a", "b"], [3, 1])
    with pytest.raises(refusal, match=text):
        batch.pack(prompts)


def test_a_batch_is_frozen_and_usable_in_and_out_of_inference_mode(cache):
    with torch.inference_mode():
        batch = PrefillBatch.build(cache, ["a"], [3])
    assert not any(getattr(batch, name).is_inference() for name in META)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.num_tokens = 4
