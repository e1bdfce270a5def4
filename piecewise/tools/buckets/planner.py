"""Finds, exactly, the bucket list that costs real traffic the least.

Let the candidate sizes be ascending, `P[j]` the steps of at most candidate j, and `g[j]` the cost of a replay
of candidate j, strictly ascending. The least cost of serving the steps up to j with at most k buckets, of
which j is the largest, is

    D[k, j] = min over i < j of  D[k-1, i] + (P[j] - P[i]) * g[j]

The matrix over (j, i) is totally monotone (its only mixed term, -P[i] * g[j], falls in both), so the best i
never moves back as j grows: each layer is found by halving the rows, all rows of one depth in one go of
numpy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from piecewise.errors.tools import PlanTooLarge
from piecewise.report.record import table
from piecewise.tools.buckets.step_cost import Floats, GraphMemory, PaddedTokens, StepCost
from piecewise.tools.buckets.steps import Histogram
from piecewise.tools.buckets.traffic import Ints, Requests
from runners.buckets import MAX_NUM_BUCKETS

# Columns by row; half the memory of int64.
Choices = NDArray[np.int32]

# Backtracking keeps one number per layer and candidate.
_MAX_TABLE = 200_000_000

_PADDED_TOKENS = PaddedTokens()


class BucketPlans:
    """Finds the best lists of any number of sizes for the same steps; what one of them took serves the next.

    Every step of 1 to `cover` tokens is served, also those of counts not seen; steps above it run eagerly
    under any plan and have no part in it. `cover` is the largest bucket of every list.
    """

    def __init__(self, histogram: Histogram, *, cover: int, cost: StepCost = _PADDED_TOKENS) -> None:
        self._sizes, costs, steps = _candidates(histogram, cover, cost)
        # Row and column 0 stand for "no bucket yet".
        self._prefix, self._price, self._best = (
            np.concatenate([[0.0], each]) for each in (steps, costs, steps * costs)
        )
        self._choices: list[Choices] = [np.zeros(len(self._best), np.int32)]
        self._is_done = False

    @property
    def num_candidates(self) -> int:
        """Counts the sizes that a list may be made of."""
        return len(self._sizes)

    def of(self, max_graphs: int, *, watch: Callable[[range], Iterable[int]] = iter) -> tuple[int, ...]:
        """Returns the list of at most so many sizes, from 1 up, under which the steps cost the least.

        No smaller list costs as little. `watch` wraps the iteration over the layers that are new, such as a
        progress bar does.

        Raises:
            PlanTooLarge: the problem is too large for memory.
        """
        num_layers, num_sizes = min(max_graphs, len(self._sizes), MAX_NUM_BUCKETS), len(self._sizes)
        if not self._is_done and num_layers > len(self._choices):
            entries = num_layers * num_sizes
            if entries > _MAX_TABLE:
                raise PlanTooLarge(graphs=num_layers, sizes=num_sizes, limit=_MAX_TABLE, entries=entries)
            for _ in watch(range(len(self._choices), num_layers)):
                better, choice = _layer(self._best, self._prefix, self._price, self._choices[-1])
                if better[-1] >= self._best[-1]:
                    self._is_done = True  # the gain of one more graph only falls
                    break
                self._best = better
                self._choices.append(choice)
        found, row = [], len(self._best) - 1
        for choice in reversed(self._choices[:num_layers]):
            if row == 0:  # rounding of equal costs may leave a layer idle
                break
            found.append(int(self._sizes[row - 1]))
            row = int(choice[row])
        return tuple(reversed(found))


def _candidates(histogram: Histogram, cover: int, cost: StepCost) -> tuple[Ints, Floats, Floats]:
    """Returns sizes that an optimal plan may use, their cost, and how many steps are at most so large.

    A step count that occurs, a knot of the cost curve, or `cover`: between these the cost is linear, so some
    plan on them is optimal. A size that costs as much as a larger one is of no use: dropping it, or moving to
    the larger one, never costs more. So the costs ascend strictly.
    """
    inside = histogram.sizes <= cover
    knots = cost.knots[cost.knots <= cover]
    sizes = np.unique(np.concatenate([histogram.sizes[inside], knots, [cover]])).astype(np.int64)
    costs = cost.graphed(sizes)
    least_above = np.minimum.accumulate(costs[::-1])[::-1]
    useful = np.append(costs[:-1] < least_above[1:], True)
    sizes, costs = sizes[useful], costs[useful]
    cumulated = np.concatenate([[0], np.cumsum(histogram.counts)])
    steps = cumulated[np.searchsorted(histogram.sizes, sizes, side="right")]
    return sizes, costs, steps.astype(np.float64)


def _layer(best: Floats, prefix: Floats, price: Floats, floor: Choices) -> tuple[Floats, Choices]:
    """Adds one bucket: for each row j the least `best[i] + (prefix[j] - prefix[i]) * price[j]`, i < j, and i.

    `floor` has the choices of the layer before: with one more bucket none moves back.
    """
    num_rows = len(best)
    value, choice = np.zeros(num_rows), np.zeros(num_rows, np.int32)
    stride = 1 << (num_rows - 1).bit_length()
    while stride > 1:
        half = stride // 2
        rows = np.arange(half, num_rows, stride)
        # The choices of the rows half a stride before and after, known by now, bracket these rows' own.
        low = np.maximum(choice[rows - half], floor[rows])
        after = rows + half
        known = choice[np.minimum(after, num_rows - 1)]
        high = np.minimum(np.where(after < num_rows, known, rows - 1), rows - 1)
        high = np.maximum(high, low)  # rounding of equal costs may cross them
        choice[rows], value[rows] = _least(best, prefix, low, high, price[rows])
        stride = half
    return value + prefix * price, choice


def _least(best: Floats, prefix: Floats, low: Ints, high: Ints, prices: Floats) -> tuple[Ints, Floats]:
    """Finds per row the column in [low, high] of the least `best - prefix * price`, and that; the rows'
    columns are laid end to end."""
    lengths = high - low + 1
    starts = np.cumsum(lengths) - lengths
    columns = np.arange(int(lengths.sum())) - np.repeat(starts - low, lengths)
    costs = best[columns] - prefix[columns] * np.repeat(prices, lengths)
    least = np.minimum.reduceat(costs, starts)
    hits = np.flatnonzero(costs == np.repeat(least, lengths))
    return columns[hits[np.searchsorted(hits, starts)]], least


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """Tells how some steps fare under a bucket list.

    Attributes:
        num_graphs: how many sizes it has.
        padding: padded tokens of graphed steps as a share of their real tokens: 0.02 is 2 %.
        worst_padding: the largest bucket ÷ real tokens of a graphed step.
        graphed_steps, graphed_tokens: shares of all steps and tokens that are replayed.
        cost: mean cost of a step, graphed or eager, in the unit of the cost.
        memory_bytes: device memory of the graphs; None where not known.
    """

    num_graphs: int
    padding: float
    worst_padding: float
    graphed_steps: float
    graphed_tokens: float
    cost: float
    memory_bytes: int | None = None


def evaluate(
    buckets: tuple[int, ...],
    histogram: Histogram,
    *,
    cost: StepCost = _PADDED_TOKENS,
    max_padding_ratio: float | None = None,
    memory: GraphMemory | None = None,
) -> PlanOutcome:
    """Tells how the steps fare: those above the largest bucket, or padded beyond the ratio, run eagerly."""
    sizes, counts = histogram.sizes, histogram.counts
    listed = np.array(buckets, np.int64)
    places = np.searchsorted(listed, sizes)
    served = listed[np.minimum(places, len(listed) - 1)]
    is_graphed = places < len(listed)
    if max_padding_ratio is not None:
        is_graphed &= served <= max_padding_ratio * sizes
    real = int(sizes[is_graphed] @ counts[is_graphed])
    padded = int(served[is_graphed] @ counts[is_graphed])
    each = np.where(is_graphed, cost.graphed(served), cost.eager(sizes))
    return PlanOutcome(
        num_graphs=len(buckets),
        padding=padded / real - 1 if real else 0.0,
        worst_padding=float((served[is_graphed] / sizes[is_graphed]).max()) if real else 1.0,
        graphed_steps=int(counts[is_graphed].sum()) / histogram.num_steps,
        graphed_tokens=real / histogram.num_tokens,
        cost=float(each @ counts) / histogram.num_steps,
        memory_bytes=memory.of(buckets) if memory is not None else None,
    )


# At most so many graphs, to the batch sizes.
PlanOf = Callable[[int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SlotRate:
    """Tells how many requests a graph's memory would serve as KV cache, so that decode graphs can be weighed.

    Args:
        bytes_per_graph: of one graph, besides the pool that all share.
        cache_bytes_per_token: of K and V of all layers for one token.
        tokens_per_request: cached tokens of a request on average.
    """

    bytes_per_graph: float
    cache_bytes_per_token: float
    tokens_per_request: float

    @staticmethod
    def cached_tokens(traffic: Sequence[Requests]) -> float | None:
        """Returns the mean over time of a generating request's cached tokens, its prompt and half of its
        output; None where the traffic does not tell."""
        weighted = weights = 0.0
        for requests in traffic:
            if requests.output_tokens is None or requests.context_tokens is None:
                return None
            # A request is in the cache for as many steps as it generates tokens.
            held = requests.context_tokens + requests.output_tokens / 2
            weighted += float(held @ requests.output_tokens)
            weights += float(requests.output_tokens.sum())
        return weighted / weights if weights else None

    def cache_tokens(self, num_graphs: int) -> float:
        """Returns the tokens of cache that so many graphs displace."""
        return num_graphs * self.bytes_per_graph / self.cache_bytes_per_token

    def slots(self, num_graphs: int) -> float:
        """Returns the requests that so many graphs displace."""
        return self.cache_tokens(num_graphs) / self.tokens_per_request

    def best(self, steps: Histogram, plan_of: PlanOf, most_graphs: int) -> tuple[int, ...]:
        """Finds the list of at most `most_graphs` sizes with the least padded and displaced slots together.

        One more graph saves ever fewer padded slots and always displaces as many, so the sum falls up to the
        best number and rises after it: that number is found by halving.
        """

        def total(num_graphs: int) -> float:
            sizes = plan_of(num_graphs)
            return padded_slots(steps, sizes) + self.slots(len(sizes))

        numbers = range(1, most_graphs)
        return plan_of(1 + bisect_left(numbers, True, key=lambda number: total(number) <= total(number + 1)))


def padded_slots(steps: Histogram, sizes: tuple[int, ...]) -> float:
    """Returns the slots of a step that hold no request, on average."""
    return evaluate(sizes, steps).cost - steps.num_tokens / steps.num_steps


def slot_table(
    steps: Histogram, plan_of: PlanOf, most_graphs: int, chosen: int, rate: SlotRate | None
) -> str:
    """Returns a row per number of graphs: padded slots, and what their memory costs where a rate is known."""
    numbers = sorted({1, chosen, most_graphs} | {1 << power for power in range(1, most_graphs.bit_length())})
    rows = [("graphs", "padded slots/step", "cache tokens", "slots displaced", "together", "")]
    for number in numbers:
        sizes = plan_of(number)
        if len(sizes) < number and len(sizes) != chosen:
            continue
        padded, displaced, cached = padded_slots(steps, sizes), 0.0, ("-", "-")
        if rate is not None:
            displaced = rate.slots(len(sizes))
            cached = f"{rate.cache_tokens(len(sizes)):.0f}", f"{displaced:.3f}"
        together = f"{padded + displaced:.3f}"
        mark = "chosen" if number == chosen else ""
        rows.append((str(len(sizes)), f"{padded:.3f}", *cached, together, mark))
    return table(rows)
