"""The clipping rules: what is cut, why, and that a limit never becomes a bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecewise.settings.limits import Limit, clip, decode_limit, prefill_limit
from runners.buckets import TokenBuckets
from runners.errors import InvalidBuckets

size_lists = st.sets(st.integers(1, 400), min_size=1, max_size=20).map(sorted)
maybe = st.none() | st.integers(1, 500)


@pytest.mark.parametrize(
    ("limits", "size", "says"),
    [
        ({}, None, "no limit"),
        ({"max_num_seqs": 64}, None, "no limit"),
        ({"max_seq_len": 4096}, None, "no limit"),
        ({"max_num_tokens": 8192}, 8192, "max_num_tokens"),
        # Each request keeps one token of room for what it generates.
        ({"max_num_seqs": 2, "max_seq_len": 512}, 1022, "max_num_seqs 2 * (max_seq_len 512 - 1)"),
        ({"max_num_seqs": 2, "max_seq_len": 512, "max_num_tokens": 1022}, 1022, "max_num_tokens"),
        ({"max_num_seqs": 2, "max_seq_len": 512, "max_num_tokens": 1023}, 1022, "max_seq_len 512"),
        ({"max_num_seqs": 9, "max_seq_len": 1}, 0, "max_seq_len 1"),
    ],
)
def test_the_prefill_limit_and_its_reason(limits, size, says):
    limit = prefill_limit(**limits)
    assert limit.size == size and says in limit.reason


@pytest.mark.parametrize(
    ("limits", "size", "says"),
    [
        ({}, None, "no limit"),
        ({"max_num_seqs": 64}, 64, "max_num_seqs"),
        ({"max_num_tokens": 63, "max_num_seqs": 64}, 63, "max_num_tokens"),
        ({"max_num_tokens": 64, "tokens_per_request": 5}, 12, "max_num_tokens 64 // 5 tokens per request"),
        ({"max_num_tokens": 64, "max_num_seqs": 13, "tokens_per_request": 5}, 12, "// 5"),
        ({"max_num_tokens": 64, "max_num_seqs": 11, "tokens_per_request": 5}, 11, "max_num_seqs"),
        ({"max_num_tokens": 4, "tokens_per_request": 5}, 0, "// 5"),
    ],
)
def test_the_decode_limit_and_its_reason(limits, size, says):
    limit = decode_limit(**limits)
    assert limit.size == size and says in limit.reason


def test_a_request_adds_at_least_one_token():
    with pytest.raises(ValueError, match="tokens_per_request: expected 1 or more, got 0"):
        decode_limit(tokens_per_request=0)


@given(size_lists, maybe)
def test_sizes_are_kept_or_returned_with_a_reason_and_the_limit_is_not_added(sizes, top):
    clipping = clip(sizes, Limit(top, "what limits"))
    assert [*clipping.sizes, *(each.size for each in clipping.clamped)] == sizes
    assert all(top is None or size <= top for size in clipping.sizes)
    for each in clipping.clamped:
        assert top is not None and each.size > top
        assert str(each) == f"{each.size} is above {top} = what limits"
    assert (top in clipping.sizes) == (top in sizes)


@given(size_lists, maybe, maybe, st.none() | st.integers(2, 500))
def test_every_count_within_the_limits_has_the_smallest_kept_bucket_that_holds_it(
    sizes, tokens, seqs, length
):
    limit = prefill_limit(max_num_tokens=tokens, max_num_seqs=seqs, max_seq_len=length)
    kept = clip(sizes, limit).sizes
    if not kept:
        assert limit.size is not None and limit.size < sizes[0]
        return
    buckets = TokenBuckets(kept)
    for num_tokens in range(0, 420):
        fits = [size for size in kept if size >= num_tokens > 0]
        assert buckets.bucket_for(num_tokens) == (fits[0] if fits else None)


def test_a_list_that_is_none_is_refused():
    with pytest.raises(InvalidBuckets, match="out of order"):
        clip([8, 4], Limit(None, ""))
