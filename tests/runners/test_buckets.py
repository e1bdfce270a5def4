"""Bucket lists: what is refused and why, and that every token count finds its bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.buckets import MAX_BUCKET, MAX_NUM_BUCKETS, TokenBuckets
from runners.errors import InvalidBuckets, UnlistedBucket

ascending = st.sets(st.integers(1, 5000), min_size=1, max_size=40).map(sorted)


@pytest.mark.parametrize(
    ("sizes", "where", "says"),
    [
        ([], "buckets", "empty"),
        ((), "buckets", "empty"),
        ([64, 32], "buckets[1]", "32 (out of order)"),
        ([16, 64, 64], "buckets[2]", "duplicate"),
        ([0, 8], "buckets[0]", "got 0"),
        ([8, -4], "buckets[1]", "got -4"),
        ([8, True], "buckets[1]", "True (bool)"),
        ([True, 8], "buckets[0]", "True (bool)"),
        (["8", "16"], "buckets[0]", "'8' (str)"),
        ([8, 16.0], "buckets[1]", "16.0 (float)"),
        ([8, None], "buckets[1]", "NoneType"),
        ([8, MAX_BUCKET + 1], "buckets[1]", str(MAX_BUCKET + 1)),
        ([8, 10**5000], "buckets[1]", "bits"),
        ("8,16", "buckets", "'8,16' (str)"),
        (64, "buckets", "64 (int)"),
        (None, "buckets", "None (NoneType)"),
        ({8, 16}, "buckets", "(set)"),
        (iter([8, 16]), "buckets", "iterator"),
        (range(1, 10**12), "buckets", str(10**12 - 1)),
        (range(1, MAX_NUM_BUCKETS + 2), "buckets", str(MAX_NUM_BUCKETS + 1)),
    ],
)
def test_bad_list_names_the_entry_and_its_position(sizes, where, says):
    with pytest.raises(InvalidBuckets) as caught:
        TokenBuckets(sizes)
    message = str(caught.value)
    assert message.startswith(where + ":")
    assert says in message
    assert "Rule:" in message and "Fix:" in message
    assert len(message) < 600


def test_a_config_error_is_a_value_error():
    with pytest.raises(ValueError):
        TokenBuckets([])


def test_longest_list_and_largest_bucket_are_allowed():
    assert len(TokenBuckets(range(1, MAX_NUM_BUCKETS + 1))) == MAX_NUM_BUCKETS
    assert TokenBuckets([MAX_BUCKET]).max == MAX_BUCKET


def test_edges_of_each_bucket():
    buckets = TokenBuckets([8, 16, 32])
    assert buckets.sizes == (8, 16, 32) and buckets.max == 32
    served = {n: buckets.bucket_for(n) for n in (0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 10**9)}
    assert served == {
        0: None,
        1: 8,
        7: 8,
        8: 8,
        9: 16,
        15: 16,
        16: 16,
        17: 32,
        31: 32,
        32: 32,
        33: None,
        10**9: None,
    }
    assert [buckets.range_for(size) for size in buckets.sizes] == [(1, 8), (9, 16), (17, 32)]


@given(ascending)
def test_every_token_count_gets_the_smallest_bucket_that_holds_it(sizes):
    buckets = TokenBuckets(sizes)
    assert buckets.bucket_for(0) is None
    for n in range(1, sizes[-1] + 2):
        assert buckets.bucket_for(n) == min((size for size in sizes if size >= n), default=None)


@given(ascending)
def test_ranges_cover_every_count_once(sizes):
    buckets = TokenBuckets(sizes)
    covered = []
    for size in buckets.sizes:
        low, high = buckets.range_for(size)
        assert high == size and buckets.bucket_for(low) == buckets.bucket_for(high) == size
        covered.append((low, high))
    assert covered[0][0] == 1 and covered[-1][1] == buckets.max
    assert all(low == high + 1 for (_, high), (low, _) in zip(covered, covered[1:], strict=False))


@pytest.mark.parametrize("num_tokens", [-1, -(10**9)])
def test_negative_token_count_is_an_error(num_tokens):
    with pytest.raises(ValueError, match=str(num_tokens)):
        TokenBuckets([8]).bucket_for(num_tokens)


@pytest.mark.parametrize("bucket", [0, 7, 9, 64])
def test_range_of_an_unlisted_bucket_is_an_error(bucket):
    with pytest.raises(UnlistedBucket, match=rf"bucket {bucket}\b"):
        TokenBuckets([8, 16]).range_for(bucket)


def test_the_list_is_copied_and_compared_by_value():
    sizes = [8, 16]
    buckets = TokenBuckets(sizes)
    sizes.append(4)
    assert buckets.sizes == (8, 16)
    assert buckets == TokenBuckets((8, 16)) and hash(buckets) == hash(TokenBuckets((8, 16)))
    assert buckets != TokenBuckets([8])
    assert repr(buckets) == "TokenBuckets(sizes=(8, 16))"
