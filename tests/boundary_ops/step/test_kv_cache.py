"""The paged cache's account: room is all or nothing, and written tokens move only with a step."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from boundary_ops import BoundaryOpError, CacheExhaustedError, PagedKVCache, PrefillBatch
from boundary_ops.errors.step import (
    NoRoom,
    TooFewBlocks,
    UnknownLayer,
    UnknownRequest,
    WrongPoolDtype,
    WrongPoolSize,
    WrongTokenCount,
    WrongTruncation,
)

SIZES = dict(num_layers=2, num_blocks=6, block_size=4, num_kv_heads=2, head_dim=8)


def make(**changes):
    return PagedKVCache(**{**SIZES, "dtype": torch.float32, **changes})


def account(cache):
    ids = cache.request_ids
    return (
        cache.num_free_blocks,
        {name: (cache.block_table(name), cache.room(name), cache.context_len(name)) for name in ids},
    )


def test_pools_have_the_documented_shape_and_can_be_written_in_and_out_of_inference_mode():
    with torch.inference_mode():
        cache = make(dtype=torch.bfloat16)
        cache.k[0][0].fill_(1)
    for pool in (*cache.k, *cache.v):
        assert pool.shape == (6, 4, 2, 8) and pool.dtype == torch.bfloat16 and not pool.is_inference()
    cache.k[0][0].fill_(2)
    assert len(cache.k) == len(cache.v) == 2 and cache.num_free_blocks == 6
    assert cache.device == cache.k[0].device


def test_I4_pools_keep_their_addresses_through_any_use():
    cache = make()
    before = [pool.data_ptr() for pool in (*cache.k, *cache.v)]
    cache.allocate("a", 24)
    cache.append("a", 24)
    cache.free("a")
    cache.allocate("b", 1)
    assert [pool.data_ptr() for pool in (*cache.k, *cache.v)] == before
    assert all(cache.owns_pool(pool) for pool in (*cache.k, *cache.v))
    assert not cache.owns_pool(cache.k[0].clone())


def test_a_deep_copy_owns_its_own_pools():
    cache = make()
    other = copy.deepcopy(cache)
    assert other.owns_pool(other.k[0]) and not other.owns_pool(cache.k[0])


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1, 2.0, True, None, "4"])
def test_sizes_that_are_no_positive_ints_are_refused(name, size):
    with pytest.raises(WrongPoolSize, match=f"argument '{name}'"):
        make(**{name: size})


@pytest.mark.parametrize("dtype", [torch.int32, "float32", None])
def test_dtypes_that_hold_no_floats_are_refused(dtype):
    with pytest.raises(WrongPoolDtype, match="'dtype'"):
        make(dtype=dtype)


def test_allocate_adds_room_and_takes_blocks_only_when_it_must():
    cache = make()
    cache.allocate("a", 3)
    assert cache.room("a") == 3 and len(cache.block_table("a")) == 1
    cache.allocate("a", 1)
    assert cache.room("a") == 4 and len(cache.block_table("a")) == 1
    cache.allocate("a", 1)
    assert cache.room("a") == 5 and len(cache.block_table("a")) == 2
    assert cache.context_len("a") == 0 and cache.num_free_blocks == 4


def test_exhaustion_is_an_error_that_loses_nothing():
    cache = make()
    cache.allocate("a", 9)
    before = account(cache)
    with pytest.raises(TooFewBlocks) as error:
        cache.allocate("b", 13)
    assert (
        "'b'" in str(error.value)
        and "4 free blocks" in str(error.value)
        and "3 free of 6" in str(error.value)
    )
    assert str(error.value).count("\n") == 2 and isinstance(error.value, CacheExhaustedError)
    assert isinstance(error.value, BoundaryOpError)
    with pytest.raises(CacheExhaustedError):
        cache.allocate("a", 16)
    assert account(cache) == before and cache.request_ids == ("a",)
    cache.allocate("b", 12)
    assert cache.num_free_blocks == 0


@pytest.mark.parametrize("method", ["allocate", "append"])
@pytest.mark.parametrize("count", [0, -1, 1.0, True, None])
def test_counts_that_are_not_positive_are_refused_and_change_nothing(method, count):
    cache = make()
    cache.allocate("a", 2)
    before = account(cache)
    with pytest.raises(WrongTokenCount, match="'num_tokens'"):
        getattr(cache, method)("a", count)
    with pytest.raises(WrongTokenCount, match="num_tokens"):
        cache.allocate("new", count)
    assert account(cache) == before


def test_append_counts_written_tokens_up_to_the_room():
    cache = make()
    cache.allocate("a", 6)
    cache.append("a", 4)
    assert cache.context_len("a") == 4
    with pytest.raises(NoRoom, match="at most 2 more"):
        cache.append("a", 3)
    cache.append("a", 2)
    assert cache.context_len("a") == 6


def test_truncate_goes_back_and_keeps_the_room():
    cache = make()
    cache.allocate("a", 6)
    cache.append("a", 5)
    cache.truncate("a", 2)
    assert cache.context_len("a") == 2 and cache.room("a") == 6
    for wrong in (3, -1, True, 1.0):
        with pytest.raises(WrongTruncation, match="0 to 2"):
            cache.truncate("a", wrong)


def test_free_makes_blocks_reusable_once():
    cache = make()
    cache.allocate("a", 24)
    blocks = set(cache.block_table("a"))
    cache.free("a")
    assert cache.num_free_blocks == 6
    with pytest.raises(UnknownRequest, match="'a'.*\n.*one free"):
        cache.free("a")
    cache.allocate("b", 24)
    assert set(cache.block_table("b")) == blocks and cache.context_len("b") == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.free("x"),
        lambda cache: cache.append("x", 1),
        lambda cache: cache.truncate("x", 0),
        lambda cache: cache.context_len("x"),
        lambda cache: cache.room("x"),
        lambda cache: cache.block_table("x"),
        lambda cache: cache.gather(0, "x"),
    ],
)
def test_unknown_requests_are_named(call):
    with pytest.raises(UnknownRequest, match="request 'x'"):
        call(make())


def test_gather_returns_copies_of_the_written_tokens_in_order():
    cache = make()
    cache.allocate("other", 4)
    cache.allocate("a", 4)
    cache.allocate("other", 4)
    cache.allocate("a", 3)
    rows = torch.randn(7, 2, 8)
    for at in range(7):
        cache.k[1][cache.block_table("a")[at // 4], at % 4] = rows[at]
        cache.v[1][cache.block_table("a")[at // 4], at % 4] = -rows[at]
    cache.append("a", 6)
    k, v = cache.gather(1, "a")
    assert torch.equal(k, rows[:6]) and torch.equal(v, -rows[:6])
    k.fill_(9)
    assert torch.equal(cache.gather(1, "a")[0], rows[:6])
    for layer in (2, -1, True):
        with pytest.raises(UnknownLayer, match="'layer'"):
            cache.gather(layer, "a")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["allocate", "free", "build"]), st.integers(1, 14))
    )
)
def test_any_history_keeps_each_block_with_one_owner(steps):
    cache = make(num_blocks=8)
    for name, action, count in steps:
        before = account(cache)
        try:
            if action == "free":
                cache.free(name)
            elif action == "build":
                with PrefillBatch.build(cache, [name], [count]):
                    PrefillBatch.current()
            else:
                cache.allocate(name, count)
        except BoundaryOpError:
            assert account(cache) == before
        held = [block for request in cache.request_ids for block in cache.block_table(request)]
        assert len(held) == len(set(held)) and len(held) + cache.num_free_blocks == 8
        for request in cache.request_ids:
            blocks, room = len(cache.block_table(request)), cache.room(request)
            assert cache.context_len(request) <= room <= blocks * 4 < room + 4
