"""Measures steps by their cost, graphed and eager, and graphs by their memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecewise.errors.tools import TooFarFromMeasured, WrongBenchFile
from piecewise.tools.buckets.traffic import Ints
from runners.buckets import MAX_BUCKET, find_problems
from runners.errors import ConfigError, short

Floats = NDArray[np.float64]

_MAX_BENCH_BYTES = 16 * 1024 * 1024
BENCH_SCHEMA = "piecewise.bench/2"
# The two agree in all that is read here.
_READ_SCHEMAS = (BENCH_SCHEMA, "piecewise.bench/1")
# Latencies are extrapolated to at most this many times the largest measured size.
_MOST_EXTRAPOLATED = 8


class StepCost:
    """Interpolates what steps cost between known sizes, which ascend strictly.

    The cost is constant below the smallest size; above the largest it goes on with the slope of the last two
    sizes, but never falls.

    Args:
        graphed, eager: of a replay of each size, and of an eager step of as many tokens.
        unit: "ms" if they were measured, or "tokens".
        origin: the unit, and what was measured: the model and the device.
    """

    def __init__(
        self, num_tokens: Ints, graphed: Floats, eager: Floats, unit: str = "ms", origin: str = "ms"
    ) -> None:
        self.knots, self.unit, self.origin = num_tokens, unit, origin
        self._graphed, self._eager = graphed, eager

    def graphed(self, buckets: Ints) -> Floats:
        return self._interpolated(buckets, self._graphed)

    def eager(self, num_tokens: Ints) -> Floats:
        return self._interpolated(num_tokens, self._eager)

    def _interpolated(self, sizes: Ints, measured: Floats) -> Floats:
        inside = np.interp(sizes, self.knots, measured)
        if len(self.knots) < 2:
            return inside
        slope = max((measured[-1] - measured[-2]) / (self.knots[-1] - self.knots[-2]), 0.0)
        return inside + slope * np.maximum(sizes - self.knots[-1], 0)

    def check_reach(self, largest: int, *, path: str) -> None:
        """Raises TooFarFromMeasured for tokens far above the largest measured size, of the file at `path`."""
        measured = int(self.knots[-1])
        if largest > _MOST_EXTRAPOLATED * measured:
            least, most = -(-largest // _MOST_EXTRAPOLATED), _MOST_EXTRAPOLATED
            raise TooFarFromMeasured(path=path, largest=largest, least=least, measured=measured, most=most)

    def break_even(self) -> int | None:
        """Finds the size from which on, up to the largest measured one, graphs are no faster; None if the
        largest one's graph is faster."""
        gain = self._eager - self._graphed
        if gain[-1] > 0:
            return None
        pays = np.flatnonzero(gain > 0)
        if not len(pays):
            return int(self.knots[0])
        last = int(pays[-1])
        between = np.arange(self.knots[last], self.knots[last + 1] + 1)
        slower = self.eager(between) <= self.graphed(between)
        return int(between[np.argmax(slower)])


# A replay costs its bucket's tokens, an eager step its own.
PADDED_TOKENS = StepCost(np.arange(1, 3), np.arange(1.0, 3), np.arange(1.0, 3), "tokens", "padded tokens")


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Estimates device memory of graphs: one pool as large as the largest bucket needs [I9], and each graph's
    own share (kernel arguments, the driver's tables), which does not depend on its size."""

    bytes_per_token: float
    bytes_per_graph: float

    def of(self, buckets: tuple[int, ...]) -> int:
        """Returns the bytes of graphs of these sizes together."""
        return round(self.bytes_per_token * max(buckets, default=0) + self.bytes_per_graph * len(buckets))

    def most_graphs(self, *, largest: int, budget_bytes: int) -> int:
        """Counts the graphs that fit, `largest` among them; 0 if `largest` alone does not."""
        left = budget_bytes - self.bytes_per_token * largest
        if left < self.bytes_per_graph:
            return 0
        return int(left // self.bytes_per_graph) if self.bytes_per_graph else MAX_BUCKET


def read_bench(path: str | Path) -> tuple[StepCost, GraphMemory | None]:
    """Reads latency curves, and memory if measured, from a file of `piecewise bench`.

    Raises:
        WrongBenchFile: the file cannot be read, is of another schema, has no size measured both graphed and
            eagerly, or has a wrong value (named in the message).
    """
    content = read_json(path)
    results = content.get("results")
    if not isinstance(results, list):
        raise _wrong(path, "a list of results", results)
    curves: dict[str, dict[int, float]] = {"graphed": {}, "eager": {}}
    for index, line in enumerate(results):
        where = f"results[{index}]"
        if not isinstance(line, dict):
            raise _wrong(path, "an object", line, where)
        name = str(line.get("variant"))
        if name in curves:
            size, latency = line.get("num_tokens"), line.get("latency_ms")
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_BUCKET:
                raise _wrong(path, f"num_tokens from 1 to {MAX_BUCKET}", size, where)
            median = latency.get("median") if isinstance(latency, dict) else None
            curves[name][size] = _positive(path, median, f"{where} latency_ms.median")
    sizes = sorted(curves["graphed"].keys() & curves["eager"].keys())
    if not sizes:
        names = sorted({str(line.get("variant")) for line in results})
        raise _wrong(path, "a size with both 'graphed' and 'eager'", names)
    graphed, eager = (np.array([curves[name][size] for size in sizes]) for name in ("graphed", "eager"))
    ran = content.get("environment")
    device = ran.get("device") if isinstance(ran, dict) else None
    origin = f"ms of {content.get('spec')!s:.60} on {device!s:.60}"
    cost = StepCost(np.array(sizes, np.int64), graphed, eager, origin=origin)
    return cost, _memory(path, content.get("memory"))


def read_json(
    path: str | os.PathLike[str],
    *,
    schemas: Sequence[str] = _READ_SCHEMAS,
    refusal: type[ConfigError] = WrongBenchFile,
    parse_constant: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Reads a file of `piecewise bench`, or of what holds one, and checks its schema's name.

    Args:
        refusal: what to raise for any other file, from `where`, `wanted` and `found`.
        parse_constant: what to make of NaN and infinities, which are no numbers of JSON.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MAX_BENCH_BYTES + 1)
        is_whole = len(raw) <= _MAX_BENCH_BYTES
        too_long = f"more than {_MAX_BENCH_BYTES} bytes"
        content = json.loads(raw, parse_constant=parse_constant) if is_whole else too_long
    except (OSError, ValueError, RecursionError) as error:
        found = str(error)[:200] or "deep nesting"
        raise refusal(where=path, wanted="a readable JSON file", found=found) from error
    if not isinstance(content, dict) or content.get("schema") not in schemas:
        other = content.get("schema") if isinstance(content, dict) else content
        raise refusal(where=path, wanted=f"the schema {schemas[0]!r}", found=short(other))
    return content


def _memory(path: str | Path, memory: Any) -> GraphMemory | None:
    """Reads the memory: the largest graph's alone is the pool; the growth by others is their own share."""
    if not isinstance(memory, dict) or "largest_alone_device_bytes" not in memory:
        return None
    alone, together = (
        _positive(path, memory.get(key), f"memory.{key}")
        for key in ("largest_alone_device_bytes", "device_bytes")
    )
    buckets = memory.get("buckets")
    if not isinstance(buckets, list) or find_problems(buckets):
        raise _wrong(path, "the list of captured buckets", buckets, "memory.buckets")
    per_graph = max(together - alone, 0.0) / (len(buckets) - 1) if len(buckets) > 1 else 0.0
    return GraphMemory(max(alone - per_graph, 0.0) / max(buckets), per_graph)


def _positive(path: str | Path, value: Any, where: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e15:
        raise _wrong(path, "a number above 0", value, where)
    return float(value)


def _wrong(path: str | os.PathLike[str], wanted: str, found: Any, part: str = "") -> WrongBenchFile:
    where = f"{path}{f': {part}' if part else ''}"
    return WrongBenchFile(where=where, wanted=wanted, found=short(found))
