"""Turns a server's requests into its steps: chunks, packed prefill steps, batches of decode steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from piecewise.errors.tools import NoDecodeTimes
from piecewise.tools.buckets.traffic import Ints, Requests


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts steps by their number of tokens.

    Attributes:
        sizes: int64, [num_sizes], strictly ascending, from 1 up.
        counts: int64, [num_sizes], each from 1 up.
    """

    sizes: Ints
    counts: Ints

    @classmethod
    def of(cls, steps: Ints, counts: Ints | None = None) -> Histogram:
        """Counts steps in any order; each entry is one step, or `counts` steps."""
        sizes, places = np.unique(steps, return_inverse=True)
        return cls(sizes.astype(np.int64), np.bincount(places, weights=counts).astype(np.int64))

    @classmethod
    def merged(cls, parts: list[Histogram]) -> Histogram:
        """Joins the steps of all parts."""
        sizes = np.concatenate([part.sizes for part in parts])
        return cls.of(sizes, np.concatenate([part.counts for part in parts]))

    def smoothed(self, cover: int, *, share: float, width: float = 0.05) -> Histogram:
        """Spreads a share of each step evenly over nearby token counts, up to the relative distance `width`.

        A plan on the result fits future traffic better, whose token counts are not quite those seen. Steps of
        `cover` tokens stay whole, since full chunks have exactly that count. The result counts small
        fractions of steps.
        """
        if share == 0:
            return self
        fixed = self.sizes >= cover
        low = np.maximum((self.sizes * (1 - width)).astype(np.int64), 1)
        high = np.minimum((self.sizes * (1 + width)).astype(np.int64) + 1, cover)
        high = np.maximum(high, low)
        moved = np.where(fixed, 0.0, share * self.counts)
        top = max(int(self.sizes.max()), cover)
        change = np.zeros(top + 2)
        np.add.at(change, low, moved / (high - low + 1))
        np.add.at(change, high + 1, -moved / (high - low + 1))
        counts = np.cumsum(change)[: top + 1]
        counts[self.sizes] += self.counts - moved
        # Fine enough for a step spread over a million sizes; the sum stays exact as a float.
        scale = min(2**20, max(2**52 // self.num_steps, 1))
        # Cumulative sums are rounded, not counts, so that many small parts of a step still add up to it.
        sums = np.maximum.accumulate(np.rint(np.cumsum(counts * scale)))
        scaled = np.diff(sums, prepend=0.0).astype(np.int64)
        sizes = np.flatnonzero(scaled > 0).astype(np.int64)
        return Histogram(sizes, scaled[sizes])

    @property
    def num_steps(self) -> int:
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        return int(self.sizes @ self.counts)


def chunked(num_tokens: Ints, chunk: int) -> Ints:
    """Cuts each request alone into full chunks and the rest.

    `num_tokens` is int64, [num_requests], each from 1 up; the result is int64, [num_steps].
    """
    per_request = -(-num_tokens // chunk)
    steps = np.full(int(per_request.sum()), chunk, np.int64)
    last = np.cumsum(per_request) - 1
    steps[last] = num_tokens - (per_request - 1) * chunk
    return steps


def packed(
    requests: Requests,
    max_num_tokens: int,
    *,
    max_num_seqs: int | None = None,
    step_s: Callable[[int], float] | None = None,
    watch: Callable[[int], object] | None = None,
) -> Ints:
    """Packs requests as a scheduler does: in order of arrival, each step as full as possible.

    A step takes the tokens of requests that wait at its start; it cuts the last request when full, and the
    rest of that request leads the next step.

    Args:
        requests: without arrival times, or without `step_s`, all wait from the start.
        max_num_tokens: the most tokens of one step.
        max_num_seqs: the most requests in one step; None for no limit.
        step_s: seconds of a step, from its number of tokens.
        watch: called with the number of requests that each step finishes.
    """
    left = requests.num_tokens.tolist()
    arrivals = requests.arrival_s
    waits = arrivals is not None and step_s is not None
    times: list[float] = arrivals.tolist() if arrivals is not None and waits else [0.0] * len(left)
    steps: list[int] = []
    now, head, num_requests = times[0] if times else 0.0, 0, len(left)
    while head < num_requests:
        now = max(now, times[head])
        taken, num_seqs, start = 0, 0, head
        while head < num_requests and taken < max_num_tokens and times[head] <= now:
            if num_seqs == max_num_seqs:
                break
            part = min(left[head], max_num_tokens - taken)
            taken, num_seqs = taken + part, num_seqs + 1
            left[head] -= part
            if left[head]:
                break
            head += 1
        steps.append(taken)
        if step_s is not None:
            now += step_s(taken)
        if watch is not None:
            watch(head - start)
    return np.array(steps, np.int64)


def decode_batches(requests: Requests, *, step_s: float, max_num_seqs: int | None = None) -> Ints:
    """Returns the batch size of every decode step: the number of requests that generate then.

    A request generates one token per step, once it has arrived and one of `max_num_seqs` places is free.
    Steps without requests are left out.

    Raises:
        NoDecodeTimes: the requests lack arrival times or numbers of generated tokens.
    """
    if requests.arrival_s is None or requests.output_tokens is None:
        raise NoDecodeTimes()
    generated = requests.output_tokens
    arrival = np.ceil((requests.arrival_s - requests.arrival_s[0]) / step_s).astype(np.int64)
    starts = _admitted(arrival, generated, max_num_seqs)
    # +1 where a request starts, -1 where it ends: between two such steps the batch does not change.
    steps = np.concatenate([starts, starts + generated])
    change = np.concatenate([np.ones_like(starts), -np.ones_like(starts)])
    order = np.argsort(steps, kind="stable")
    sizes = np.cumsum(change[order])[:-1]
    lengths = np.diff(steps[order])
    return np.repeat(sizes[sizes > 0], lengths[sizes > 0])


def _admitted(arrival: Ints, generated: Ints, max_num_seqs: int | None) -> NDArray[np.int64]:
    """Returns the step at which each request starts, by order of arrival."""
    if max_num_seqs is None:
        return arrival
    ends: list[int] = []
    starts = []
    for step, length in zip(arrival.tolist(), generated.tolist(), strict=True):
        if len(ends) >= max_num_seqs:
            step = max(step, heapq.heappop(ends))
        heapq.heappush(ends, step + length)
        starts.append(step)
    return np.array(starts, np.int64)
