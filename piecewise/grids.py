"""Bucket lists by rule: the fixed grids that engines ship, and equal steps.

A grid ends at the largest of its sizes that fits the limit; the limit itself is not added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, takewhile

from runners.buckets import MAX_NUM_BUCKETS


@dataclass(frozen=True, slots=True)
class Grid:
    """A rule for bucket sizes.

    Args:
        name: an engine's name, a key of `ENGINE_GRIDS`, or "step".
        step: the distance of two sizes, where `name` is "step".
        max_size: the largest size allowed, inclusive; None for the limit of the settings, or without one
            for the size at which the engine itself stops.
    """

    name: str
    step: int | None = None
    max_size: int | None = None

    def sizes(self, limit: int | None = None) -> tuple[int, ...]:
        """The sizes, ascending; empty where the smallest is above the limit."""
        top = self.max_size if self.max_size is not None else limit
        if self.name == "step":
            assert self.step is not None and top is not None
            return tuple(range(self.step, top + 1, self.step))
        rule = ENGINE_GRIDS[self.name]
        return rule.sizes(top if top is not None else rule.default_max)


@dataclass(frozen=True, slots=True)
class EngineGrid:
    """What one engine captures for prefill when it is not told otherwise.

    Attributes:
        default_max: the size at which it stops by default.
        first: the sizes at the beginning, ascending.
        start, step: the sizes after them, without an end.
    """

    default_max: int
    first: Sequence[int]
    start: int
    step: int

    def sizes(self, top: int) -> tuple[int, ...]:
        """The sizes up to the largest one allowed."""
        found = takewhile(lambda size: size <= top, chain(self.first, count(self.start, self.step)))
        # A hostile limit must not make a list of 2**31 / 16 entries; one that long is refused anyway.
        return tuple(islice(found, MAX_NUM_BUCKETS + 1))


# Sources: TensorRT-LLM's default of capture_num_tokens, SGLang's of piecewise_cuda_graph_tokens, vLLM's of
# cudagraph_capture_sizes (its rule is continued above its own stop where a larger limit is given).
ENGINE_GRIDS = {
    "tensorrt-llm": EngineGrid(3072, [1 << power for power in range(8)], 256, 256),
    "sglang": EngineGrid(
        4096,
        [
            *range(4, 33, 4),
            *range(48, 257, 16),
            *range(288, 513, 32),
            *range(576, 1025, 64),
            *range(1280, 4097, 256),
        ],
        4608,
        512,
    ),
    "vllm": EngineGrid(512, [1, 2, 4, *range(8, 256, 8)], 256, 16),
}

# What decode batch sizes are compared with.
DECODE_GRIDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "every size": lambda top: tuple(range(1, top + 1)),
    "powers of two": lambda top: tuple(1 << power for power in range(top.bit_length())),
    "vllm": ENGINE_GRIDS["vllm"].sizes,
}
