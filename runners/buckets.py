"""The token counts for which graphs exist, and which of them serves a call.

A call of `num_tokens` tokens runs in the smallest bucket that holds it; nothing above the largest bucket is
ever captured, and zero tokens have nothing to replay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from runners.errors import InvalidBuckets, UnlistedBucket, short, shown
from runners.whole_numbers import listed, whole_number

# Every bucket costs a capture and its static buffers; a list this long is a mistake, not a plan.
MAX_NUM_BUCKETS = 4096

# `cu_seqlens_q` and its kin are int32, so no step can hold more tokens.
MAX_BUCKET = 2**31 - 1

SIZES_FIX = "list each token count once, from small to large, such as [64, 128, 256]"


@dataclass(frozen=True, slots=True)
class TokenBuckets:
    """An ascending set of token counts with a search that never picks a bucket smaller than the call.

    Args:
        sizes: the buckets as a list, tuple, range, array or tensor of ints, strictly ascending, each in
            [1, 2**31 - 1], at most `MAX_NUM_BUCKETS` of them.

    Raises:
        ConfigError: the list is empty, too long or of another type, or an entry is not an int, out of range,
            a duplicate or out of order; the message names the entry and its position.
    """

    sizes: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", checked_sizes(self.sizes))

    @property
    def max(self) -> int:
        """The largest bucket; calls with more tokens run eagerly."""
        return self.sizes[-1]

    def bucket_for(self, num_tokens: int) -> int | None:
        """The smallest bucket that holds `num_tokens`, in O(log buckets).

        Returns:
            A member of `sizes`; None for 0 tokens and for more than `max`.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens <= 0:
            if num_tokens < 0:
                raise ValueError(f"num_tokens: expected 0 or more, got {num_tokens}")
            return None
        index = bisect_left(self.sizes, num_tokens)
        return self.sizes[index] if index < len(self.sizes) else None

    def range_for(self, bucket: int) -> tuple[int, int]:
        """The token counts that `bucket` serves, as (lowest, highest), both inclusive.

        Raises:
            ConfigError: `bucket` is not a member of `sizes`.
        """
        index = bisect_left(self.sizes, bucket)
        if index == len(self.sizes) or self.sizes[index] != bucket:
            raise UnlistedBucket(bucket=bucket, sizes=list(self.sizes))
        return (self.sizes[index - 1] + 1 if index else 1), bucket

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True)
class SizeProblem:
    """What is wrong with a size list; `part` is the position, such as ``[2]``, or empty for the whole."""

    part: str
    expected: str
    got: str


def find_problems(sizes: object, *, max_listed: int = 16) -> list[SizeProblem]:
    """Everything that keeps `sizes` from being a valid bucket list, in its order; at most `max_listed`."""
    if isinstance(sizes, (list, tuple, range)) and len(sizes) > MAX_NUM_BUCKETS:  # before a long one is made
        return [SizeProblem("", f"at most {MAX_NUM_BUCKETS} token counts", f"{len(sizes)} of them")]
    items = listed(sizes)
    if items is None:
        return [SizeProblem("", "a list of ints", shown(sizes))]
    if len(items) == 0:
        return [SizeProblem("", "at least one token count", "an empty list")]
    if len(items) > MAX_NUM_BUCKETS:
        return [SizeProblem("", f"at most {MAX_NUM_BUCKETS} token counts", f"{len(items)} of them")]
    found: list[SizeProblem] = []
    seen: set[int] = set()
    last = 0
    for index, item in enumerate(items):
        size = whole_number(item)
        problem = _size_problem(f"[{index}]", item, size, last=last, seen=seen)
        if problem is None and size is not None:
            last = size
            seen.add(size)
            continue
        if problem is not None:
            found.append(problem)
        if len(found) == max_listed:
            break
    return found


def _size_problem(
    part: str, item: object, size: int | None, *, last: int, seen: set[int]
) -> SizeProblem | None:
    if size is None:
        return SizeProblem(part, "an int", shown(item))
    if not 1 <= size <= MAX_BUCKET:
        return SizeProblem(part, f"1 to {MAX_BUCKET}", short(size))
    if size <= last:
        what = "again (a duplicate)" if size in seen else "(out of order)"
        return SizeProblem(part, f"more than {last}", f"{size} {what}")
    return None


def checked_sizes(sizes: object) -> tuple[int, ...]:
    """`sizes` as a tuple of Python's ints that is a valid bucket list.

    Raises:
        ConfigError: as `TokenBuckets` says; about the first problem.
    """
    problems = find_problems(sizes, max_listed=1)
    if problems:
        first = problems[0]
        raise InvalidBuckets(part=first.part, expected=first.expected, got=first.got)
    return plain_sizes(sizes)


def plain_sizes(sizes: object) -> tuple[int, ...]:
    """A list in which `find_problems` finds none, as a tuple of Python's ints; itself where it is one."""
    if type(sizes) is tuple and all(type(size) is int for size in sizes):
        return sizes
    return tuple(int(size) for size in listed(sizes) or ())
