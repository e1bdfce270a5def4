"""Weighs decode graphs: padded slots saved, against the requests whose cache they displace."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from piecewise.report.record import table
from piecewise.tools.buckets.planner import evaluate
from piecewise.tools.buckets.steps import Histogram
from piecewise.tools.buckets.traffic import Requests

# At most so many graphs, to the batch sizes.
PlanOf = Callable[[int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SlotRate:
    """How many requests a graph's memory would serve as KV cache.

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
        """The mean over time of a generating request's cached tokens: its prompt and half of its output.

        None where the traffic does not tell.
        """
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
        """Tokens of cache that so many graphs displace."""
        return num_graphs * self.bytes_per_graph / self.cache_bytes_per_token

    def slots(self, num_graphs: int) -> float:
        """Requests that so many graphs displace."""
        return self.cache_tokens(num_graphs) / self.tokens_per_request

    def best(self, steps: Histogram, plan_of: PlanOf, most_graphs: int) -> tuple[int, ...]:
        """The list of at most `most_graphs` sizes with the least padded and displaced slots together.

        One more graph saves ever fewer padded slots and always displaces as many, so the sum falls up to the
        best number and rises after it: that number is found by halving.
        """

        def total(num_graphs: int) -> float:
            sizes = plan_of(num_graphs)
            return padded_slots(steps, sizes) + self.slots(len(sizes))

        numbers = range(1, most_graphs)
        return plan_of(1 + bisect_left(numbers, True, key=lambda number: total(number) <= total(number + 1)))


def padded_slots(steps: Histogram, sizes: tuple[int, ...]) -> float:
    """Slots of a step that hold no request, on average; the cost of a step less its requests."""
    return evaluate(sizes, steps).cost - steps.num_tokens / steps.num_steps


def slot_table(
    steps: Histogram, plan_of: PlanOf, most_graphs: int, chosen: int, rate: SlotRate | None
) -> str:
    """A row per number of graphs: padded slots, and what the graphs' memory costs where a rate is known."""
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
