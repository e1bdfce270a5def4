"""Finds the bucket list of exactly the least cost for given traffic.

Let the candidate sizes ascend, `P[j]` be the number of steps of at most candidate j, and `g[j]` the cost of a
replay of candidate j, strictly ascending. The least cost of serving the steps up to j with at most k buckets,
the largest of them j, is

    D[k, j] = min over i < j of  D[k-1, i] + (P[j] - P[i]) * g[j]

The matrix over (j, i) is totally monotone (its only mixed term, -P[i] * g[j], falls in both), so the best i
never decreases as j grows: each layer is found by halving the rows, with numpy for all rows of one depth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from piecewise.errors.tools import PlanTooLarge
from piecewise.report.record import table
from piecewise.tools.buckets.step_cost import PADDED_TOKENS, Floats, GraphMemory, StepCost
from piecewise.tools.buckets.steps import Histogram
from piecewise.tools.buckets.traffic import Ints, Requests
from runners.buckets import MAX_NUM_BUCKETS

# The chosen column of each row; int32 takes half the memory of int64.
Choices = NDArray[np.int32]

# Backtracking keeps one number per layer and candidate.
_MAX_TABLE = 200_000_000


class BucketPlans:
    """Finds the best list of any number of sizes for the same steps, and reuses layers between lists.

    `cover` is the largest bucket of every list: all steps of 1 to `cover` tokens are served, even of unseen
    counts; larger steps run eagerly under any plan and are ignored.
    """

    def __init__(self, histogram: Histogram, *, cover: int, cost: StepCost = PADDED_TOKENS) -> None:
        self._sizes, costs, steps = _candidates(histogram, cover, cost)
        # Row and column 0 stand for "no bucket yet".
        self._prefix, self._price, self._best = (
            np.concatenate([[0.0], each]) for each in (steps, costs, steps * costs)
        )
        self._choices: list[Choices] = [np.zeros(len(self._best), np.int32)]
        self._is_done = False

    @property
    def num_candidates(self) -> int:
        """The number of sizes that a list may choose from."""
        return len(self._sizes)

    def of(self, max_graphs: int, *, watch: Callable[[range], Iterable[int]] = iter) -> tuple[int, ...]:
        """Returns the shortest list of at most `max_graphs` sizes (1 or more) with the least cost.

        `watch` wraps the iteration over new layers, as a progress bar does.

        Raises:
            PlanTooLarge: the table would be too large for memory.
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
    """Returns sizes that suffice for an optimal plan, their costs, and the number of steps up to each.

    These are the steps' token counts, the knots of the cost curve, and `cover`: the cost is linear between
    them, so some plan of them is optimal. A size that costs as much as a larger one is left out, since the
    larger one in its place never costs more. So the costs ascend strictly.
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

    `floor` has the previous layer's choices of i; one more bucket never lowers them.
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
    """Finds each row's column in [low, high] of the least `best - prefix * price`, and that least value."""
    lengths = high - low + 1
    starts = np.cumsum(lengths) - lengths
    columns = np.arange(int(lengths.sum())) - np.repeat(starts - low, lengths)
    costs = best[columns] - prefix[columns] * np.repeat(prices, lengths)
    least = np.minimum.reduceat(costs, starts)
    hits = np.flatnonzero(costs == np.repeat(least, lengths))
    return columns[hits[np.searchsorted(hits, starts)]], least


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """Describes the padding and cost of given steps under a bucket list.

    Attributes:
        num_graphs: number of sizes in the list.
        padding: padded tokens of graphed steps as a share of their real tokens: 0.02 is 2 %.
        worst_padding: the largest bucket ÷ real tokens of a graphed step.
        graphed_steps, graphed_tokens: shares of all steps and tokens that are replayed.
        cost: mean cost of a step, graphed or eager, in the unit of the step cost.
        memory_bytes: device memory of the graphs; None if unknown.
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
    cost: StepCost = PADDED_TOKENS,
    max_padding_ratio: float | None = None,
    memory: GraphMemory | None = None,
) -> PlanOutcome:
    """Evaluates a list; steps above the largest bucket, or padded beyond the ratio, run eagerly."""
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


# Makes the list of batch sizes for at most a given number of graphs.
PlanOf = Callable[[int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SlotRate:
    """Converts the memory of decode graphs to requests whose KV cache would fit there.

    Args:
        bytes_per_graph: of one graph, without the shared pool.
        cache_bytes_per_token: of K and V of all layers for one token.
        tokens_per_request: mean number of cached tokens of a request.
    """

    bytes_per_graph: float
    cache_bytes_per_token: float
    tokens_per_request: float

    @staticmethod
    def cached_tokens(traffic: Sequence[Requests]) -> float | None:
        """Returns the mean over time of a generating request's cached tokens (its prompt and half of its
        output), or None if the traffic lacks them."""
        weighted = weights = 0.0
        for requests in traffic:
            if requests.output_tokens is None or requests.context_tokens is None:
                return None
            # Weighted by generated tokens: a request stays in the cache for that many steps.
            held = requests.context_tokens + requests.output_tokens / 2
            weighted += float(held @ requests.output_tokens)
            weights += float(requests.output_tokens.sum())
        return weighted / weights if weights else None

    def cache_tokens(self, num_graphs: int) -> float:
        """Returns the tokens of KV cache whose memory the graphs take."""
        return num_graphs * self.bytes_per_graph / self.cache_bytes_per_token

    def slots(self, num_graphs: int) -> float:
        """Returns the requests whose KV cache the graphs displace."""
        return self.cache_tokens(num_graphs) / self.tokens_per_request

    def best(self, steps: Histogram, plan_of: PlanOf, most_graphs: int) -> tuple[int, ...]:
        """Finds the list of at most `most_graphs` sizes with the least sum of padded and displaced slots.

        Each further graph saves fewer padded slots and displaces equally many, so the sum falls up to the
        best number and rises after it: halving finds that number.
        """

        def total(num_graphs: int) -> float:
            sizes = plan_of(num_graphs)
            return padded_slots(steps, sizes) + self.slots(len(sizes))

        numbers = range(1, most_graphs)
        return plan_of(1 + bisect_left(numbers, True, key=lambda number: total(number) <= total(number + 1)))


def padded_slots(steps: Histogram, sizes: tuple[int, ...]) -> float:
    """Returns the mean number of a step's slots that hold no request."""
    return evaluate(sizes, steps).cost - steps.num_tokens / steps.num_steps


def slot_table(
    steps: Histogram, plan_of: PlanOf, most_graphs: int, chosen: int, rate: SlotRate | None
) -> str:
    """Formats a row per number of graphs: padded slots, and, with a rate, displaced ones."""
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
