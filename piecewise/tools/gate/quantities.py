"""Reads from a benchmark record what a gate compares, each quantity so that smaller is better."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Threshold(NamedTuple):
    """Says when a quantity of one kind has changed.

    Attributes:
        share: a change counts beyond this share of the baseline's value,
        least: and beyond this much in the quantity's own unit.
        is_timed: whether the quantity is a time, which only equal machines and versions share.
    """

    share: float
    least: float = 0.0
    is_timed: bool = False


# Twenty equal runs on one H200 (docs/results/gate.json) differed by 2 % (standard deviation) in ratios to the
# floor and in latencies, by 17 % in ratios to eager and by 27 % in host time, which follow the host's speed.
RULES = {
    "over-floor": Threshold(0.05),
    "over-graphed": Threshold(0.05),
    "over-eager": Threshold(0.50),
    "latency": Threshold(0.10, 0.01, is_timed=True),
    "host": Threshold(1.0, 0.05, is_timed=True),
    "error": Threshold(0.25, 1e-3),
    "memory": Threshold(0.10, 8 * 2**20),
    "startup": Threshold(0.50, 5.0, is_timed=True),
    "segments": Threshold(0.0),
    "kernels": Threshold(0.01),
    "outside": Threshold(0.0, 0.001),
    "uncached": Threshold(0.0, 0.5),
}


class Quantity(NamedTuple):
    """Holds one number of a record, smaller being better, and the interval in which its true value lies."""

    kind: str
    value: float
    low: float
    high: float
    unit: str = ""

    @property
    def spread(self) -> float:
        """Half of the interval as a share of the value."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


def quantities(record: Mapping[str, Any]) -> dict[str, Quantity]:
    """Returns what is compared as numbers, by name in the order of reports."""
    found: dict[str, Quantity] = {}
    for line in record["ratios"]:
        of, over, n = line["of"], line["over"], line["num_tokens"]
        low, high = line.get("interval", (line["median"], line["median"]))
        value = float(line["median"])
        if line["quantity"] == "error":
            found[f"error of {of} ÷ {over}, {n} tokens"] = Quantity("error", value, value, value)
        elif of == "eager":  # turned around, so that smaller is better
            found[f"{over} ÷ eager, {n} tokens"] = Quantity("over-eager", 1 / value, 1 / high, 1 / low)
        elif of.startswith("graphed"):
            kind = "over-floor" if over.startswith("floor") else "over-graphed"
            found[f"{of} ÷ {over}, {n} tokens"] = Quantity(kind, value, float(low), float(high))
    for line in record["results"]:
        if not line["variant"].startswith("graphed"):
            continue
        title, error = f"{line['variant']}, {line['num_tokens']} tokens", line["max_abs_error"]
        if error is not None:
            found[f"error of {title}"] = Quantity("error", float(error), float(error), float(error))
        for kind, times in (("latency", line["latency_ms"]), ("host", line["host_ms"])):
            found[f"{kind} of {title}"] = Quantity(kind, times["median"], times["low"], times["high"], "ms")
    for name, capture in captures(record):
        found |= {f"{name}: {title}": each for title, each in _of_capture(capture)}
    return found


def captures(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each graphed variant's name and its capture."""
    for name, variant in record["variants"].items():
        if variant["capture"] is not None:
            yield name, variant["capture"]


def _of_capture(capture: Mapping[str, Any]) -> Iterator[tuple[str, Quantity]]:
    def exact(kind: str, value: float, unit: str = "") -> Quantity:
        return Quantity(kind, value, value, value, unit)

    for kind, count in sorted(capture["plan"]["segments"].items()):
        yield f"{kind} segments", exact("segments", count)
    captured = [each for each in capture["buckets"] if each["status"] == "captured"]
    worst = min((each["coverage"] for each in captured), default=capture["coverage"])
    yield "ops outside of graphs, share at the worst bucket", exact("outside", round(1 - worst, 6))
    if captured:
        most = max(captured, key=lambda each: each["bucket"])
        yield "graphs per call", exact("segments", most["num_graphs"])
        yield "ops recorded", exact("kernels", most["num_ops"])
    # The second capture's, where there is one: the first loads kernels, whose memory is not the graphs'.
    memory = capture.get("again", capture)["device_bytes"]
    yield "graph memory", exact("memory", memory, "bytes")
    times = capture["times"]
    yield "compile seconds", exact("startup", times["lowering"], "s")
    yield "capture seconds", exact("startup", times["trace"] + times["warm_up"] + times["capture"], "s")
    compiled = sum(each["num_compiled"] for each in capture.get("lowerings", ()))
    if compiled:
        cached = sum(each["num_from_disk"] for each in capture["lowerings"])
        yield "share compiled anew", exact("uncached", (compiled - cached) / compiled)


def relative(base: float, current: float) -> float:
    """Returns by which share a value grew; infinite from 0 to something."""
    if base == current:
        return 0.0
    return (current - base) / base if base else math.inf
