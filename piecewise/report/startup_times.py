"""Measures the time spent before the first replay, by part."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager


@dataclasses.dataclass(slots=True)
class StartupTimes:
    """Holds the seconds spent on one signature so far, by part.

    Attributes:
        trace: Dynamo and the analysis of its graph, second traces included; grows with the model's depth.
        lowering: loading Inductor, rewriting distinct graph segments, and compiling them or finding them in
            Inductor's cache.
        warm_up: the runs before captures, where kernels are compiled and tuned at their first launch.
        capture: recording graphs.
    """

    trace: float = 0.0
    lowering: float = 0.0
    warm_up: float = 0.0
    capture: float = 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - began)

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        parts = (f"{name.replace('_', '-')} {took:.1f}" for name, took in dataclasses.asdict(self).items())
        return f"{self.total:.1f} s: {', '.join(parts)}"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerReuse:
    """Describes how many layers of equal structure use the trace of another one.

    Attributes:
        num_calls, num_traced: calls of such layers, and those of them that Dynamo traced.
        reason: why Dynamo traced all of them; empty if it did not.
    """

    num_calls: int
    num_traced: int
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"all {self.num_calls} layers traced: {self.reason}"
        return f"{self.num_traced} of {self.num_calls} layers traced; the others are like them"
