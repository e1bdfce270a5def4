"""Makes bucket lists by rule: the fixed grids that engines ship, and equal steps.

A grid ends at the largest of its sizes that fits the limit; the limit itself is not added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from runners.buckets import MAX_BUCKET, MAX_NUM_BUCKETS


@dataclass(frozen=True, slots=True)
class Grid:
    """Describes a rule for bucket sizes.

    Args:
        name: an engine's name, a key of `ENGINE_GRIDS`, or "step".
        step: the distance between sizes, for the name "step".
        max_size: the largest size allowed, inclusive; None for the settings' limit, or else the size at which
            the engine itself stops.
    """

    name: str
    step: int | None = None
    max_size: int | None = None

    def sizes(self, limit: int | None = None) -> tuple[int, ...]:
        """Returns the sizes, ascending; none if the smallest is above the limit."""
        top = self.max_size if self.max_size is not None else limit
        if self.name == "step":
            assert self.step is not None and top is not None
            return tuple(range(self.step, top + 1, self.step))
        return ENGINE_GRIDS[self.name](*(() if top is None else (top,)))


def _grid(usual_top: int, *parts: Sequence[int]) -> Callable[..., tuple[int, ...]]:
    def sizes(top: int = usual_top) -> tuple[int, ...]:
        # A hostile limit must not make a list of 2**31 / 16 entries; one that long is refused anyway.
        return tuple(takewhile(top.__ge__, islice(chain(*parts), MAX_NUM_BUCKETS + 1)))

    return sizes


# Sizes that each engine captures for prefill by default, by the largest size allowed (by default, the size at
# which the engine itself stops).
# Sources: the defaults of TensorRT-LLM's capture_num_tokens, SGLang's piecewise_cuda_graph_tokens and vLLM's
# cudagraph_capture_sizes (its rule is continued above its own stop where a larger limit is given).
ENGINE_GRIDS: dict[str, Callable[..., tuple[int, ...]]] = {
    "tensorrt-llm": _grid(3072, [1 << power for power in range(8)], range(256, MAX_BUCKET, 256)),
    "sglang": _grid(
        4096, range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64),
        range(1280, 4097, 256), range(4608, MAX_BUCKET, 512),
    ),
    "vllm": _grid(512, [1, 2, 4], range(8, 256, 8), range(256, MAX_BUCKET, 16)),
}  # fmt: skip

# Lists that a plan of decode batch sizes is compared with.
DECODE_GRIDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "every size": lambda top: tuple(range(1, top + 1)),
    "powers of two": lambda top: tuple(1 << power for power in range(top.bit_length())),
    "vllm": ENGINE_GRIDS["vllm"],
}
