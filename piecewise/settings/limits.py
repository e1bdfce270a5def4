"""Finds the listed sizes that a server with given limits can reach, one rule each for prefill and decode.

Both rules only remove sizes: a limit never becomes a bucket, because every call between the last useful size
and the limit would be padded up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runners.buckets import checked_sizes


class Limit(NamedTuple):
    """Holds the largest reachable size, inclusive (None: no limit), and the settings that it follows from."""

    size: int | None
    reason: str


class Clamped(NamedTuple):
    """Describes a listed size above the limit."""

    size: int
    limit: int
    reason: str

    def __str__(self) -> str:
        return f"{self.size} is above {self.limit} = {self.reason}"


class Clipping(NamedTuple):
    """Holds a size list cut at a limit: the sizes up to the limit, and the others, each with its reason."""

    sizes: tuple[int, ...]
    clamped: tuple[Clamped, ...]
    limit: Limit


def prefill_limit(
    *, max_num_tokens: int | None = None, max_num_seqs: int | None = None, max_seq_len: int | None = None
) -> Limit:
    """Finds the most tokens that one prefill step can hold.

    A step holds at most `max_num_seqs` requests. Each keeps room for one generated token, so at most
    `max_seq_len - 1` of its tokens are prefilled. Source: TensorRT-LLM clips its piecewise graphs' sizes so.
    """
    found = [Limit(max_num_tokens, "max_num_tokens")]
    if max_num_seqs is not None and max_seq_len is not None:
        reason = f"max_num_seqs {max_num_seqs} * (max_seq_len {max_seq_len} - 1)"
        found.append(Limit(max_num_seqs * (max_seq_len - 1), reason))
    return _tightest(found)


def decode_limit(
    *, max_num_tokens: int | None = None, max_num_seqs: int | None = None, tokens_per_request: int = 1
) -> Limit:
    """Finds the most requests that one decode step can hold.

    Each request adds `tokens_per_request` to a step: 1, plus the draft tokens of speculative decoding.
    Source: TensorRT-LLM clips the batch sizes of its decode graphs in this way.
    """
    if tokens_per_request < 1:
        raise ValueError(f"tokens_per_request: expected 1 or more, got {tokens_per_request}")
    found = [Limit(max_num_seqs, "max_num_seqs")]
    if max_num_tokens is not None:
        reason = f"max_num_tokens {max_num_tokens} // {tokens_per_request} tokens per request"
        reason = reason if tokens_per_request > 1 else "max_num_tokens"
        found.append(Limit(max_num_tokens // tokens_per_request, reason))
    return _tightest(found)


def clip(sizes: Sequence[int], limit: Limit) -> Clipping:
    """Cuts a list at a limit; raises InvalidBuckets where `TokenBuckets` would refuse `sizes`."""
    checked, top = checked_sizes(sizes), limit.size
    if top is None:
        return Clipping(checked, (), limit)
    clamped = tuple(Clamped(size, top, limit.reason) for size in checked if size > top)
    return Clipping(checked[: len(checked) - len(clamped)], clamped, limit)


def _tightest(found: list[Limit]) -> Limit:
    known = [each for each in found if each.size is not None]
    return min(known, key=lambda each: each.size or 0, default=Limit(None, "no limit is set"))
