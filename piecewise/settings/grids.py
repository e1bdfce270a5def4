"""Makes bucket lists by rule: the fixed grids that engines ship, and equal steps.

A grid ends at the largest of its sizes that fits the limit; the limit itself is not added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from runners.buckets import MAX_NUM_BUCKETS


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


def _tensorrt_llm(top: int = 3072) -> tuple[int, ...]:
    return _up_to(top, [1 << power for power in range(8)], range(256, top + 1, 256))


def _sglang(top: int = 4096) -> tuple[int, ...]:
    return _up_to(
        top,
        range(4, 33, 4),
        range(48, 257, 16),
        range(288, 513, 32),
        range(576, 1025, 64),
        range(1280, 4097, 256),
        range(4608, top + 1, 512),
    )


def _vllm(top: int = 512) -> tuple[int, ...]:
    return _up_to(top, [1, 2, 4], range(8, 256, 8), range(256, top + 1, 16))


def _up_to(top: int, *parts: range | list[int]) -> tuple[int, ...]:
    # A hostile limit must not make a list of 2**31 / 16 entries; one that long is refused anyway.
    found: list[int] = []
    for size in chain(*parts):
        if size > top or len(found) > MAX_NUM_BUCKETS:
            break
        found.append(size)
    return tuple(found)


# Sizes that each engine captures for prefill by default, by the largest size allowed (by default, the size at
# which the engine itself stops).
# Sources: the defaults of TensorRT-LLM's capture_num_tokens, SGLang's piecewise_cuda_graph_tokens and vLLM's
# cudagraph_capture_sizes (its rule is continued above its own stop where a larger limit is given).
ENGINE_GRIDS: dict[str, Callable[..., tuple[int, ...]]] = {
    "tensorrt-llm": _tensorrt_llm,
    "sglang": _sglang,
    "vllm": _vllm,
}

# Lists that a plan of decode batch sizes is compared with.
DECODE_GRIDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "every size": lambda top: tuple(range(1, top + 1)),
    "powers of two": lambda top: tuple(1 << power for power in range(top.bit_length())),
    "vllm": _vllm,
}
