"""Finds the smallest captured bucket that holds a call's tokens.

Nothing above the largest bucket is ever captured, and zero tokens have nothing to replay.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from runners.errors import InvalidBuckets, UnlistedBucket, short, shown
from runners.whole_numbers import listed, whole_number

# Every bucket costs a capture and its static buffers; a list this long is a mistake, not a plan.
MAX_NUM_BUCKETS = 4096

# `cu_seqlens_q` and its kin are int32, so no step can hold more tokens.
MAX_BUCKET = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TokenBuckets:
    """Holds ascending token counts, and finds the bucket of a call.

    Args:
        sizes: a list, tuple, range, array or tensor of ints, strictly ascending, each in [1, 2**31 - 1],
            at most `MAX_NUM_BUCKETS` of them.

    Raises:
        InvalidBuckets: `sizes` is anything else; the message names the entry and its position.
    """

    sizes: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", checked_sizes(self.sizes))

    @property
    def max(self) -> int:
        """Returns the largest bucket; calls with more tokens run eagerly."""
        return self.sizes[-1]

    def bucket_for(self, num_tokens: int) -> int | None:
        """Finds a call's smallest bucket, in O(log buckets); None for 0 or above `max`, ValueError below."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected 0 or more, got {num_tokens}")
        index = bisect_left(self.sizes, num_tokens)
        return self.sizes[index] if num_tokens and index < len(self.sizes) else None

    def range_for(self, bucket: int) -> tuple[int, int]:
        """Returns the inclusive range of token counts that `bucket` serves; raises `UnlistedBucket`."""
        index = bisect_left(self.sizes, bucket)
        if index == len(self.sizes) or self.sizes[index] != bucket:
            raise UnlistedBucket(bucket=bucket, sizes=list(self.sizes))
        return (self.sizes[index - 1] + 1 if index else 1), bucket

    def __len__(self) -> int:
        return len(self.sizes)


class SizeProblem(NamedTuple):
    """Describes a fault of a size list; `part` is the position, such as ``[2]``, or empty for the whole."""

    part: str
    expected: str
    got: str


def find_problems(sizes: object, *, max_listed: int = 16) -> list[SizeProblem]:
    """Finds what keeps `sizes` from being a valid bucket list, at most `max_listed` problems."""
    return list(islice(_problems(sizes), max_listed))


def _problems(sizes: object) -> Iterator[SizeProblem]:
    if isinstance(sizes, (list, tuple, range)):
        items: Any = sizes  # which may be too long to be listed
    else:
        items = listed(sizes)
    if items is None:
        yield SizeProblem("", "a list of ints", shown(sizes))
    elif len(items) == 0:
        yield SizeProblem("", "at least one token count", "an empty list")
    elif len(items) > MAX_NUM_BUCKETS:
        yield SizeProblem("", f"at most {MAX_NUM_BUCKETS} token counts", f"{len(items)} of them")
    else:
        yield from _problems_of(items)


def _problems_of(items: Sequence[Any]) -> Iterator[SizeProblem]:
    seen: list[int] = [0]
    for index, item in enumerate(items):
        part, size = f"[{index}]", whole_number(item)
        if size is None:
            yield SizeProblem(part, "an int", shown(item))
        elif not 1 <= size <= MAX_BUCKET:
            yield SizeProblem(part, f"1 to {MAX_BUCKET}", short(size))
        elif size <= seen[-1]:
            what = "again (a duplicate)" if size in seen else "(out of order)"
            yield SizeProblem(part, f"more than {seen[-1]}", f"{size} {what}")
        else:
            seen.append(size)


def checked_sizes(sizes: object) -> tuple[int, ...]:
    """Returns `sizes` as a tuple of Python's ints; raises `InvalidBuckets` about the first problem."""
    for first in _problems(sizes):
        raise InvalidBuckets(part=first.part, expected=first.expected, got=first.got)
    return plain_sizes(sizes)


def plain_sizes(sizes: object) -> tuple[int, ...]:
    """Returns a valid list as a tuple of Python's ints; itself where it is one."""
    if type(sizes) is tuple and all(type(size) is int for size in sizes):
        return sizes
    return tuple(int(size) for size in listed(sizes) or ())
