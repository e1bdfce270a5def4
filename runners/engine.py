"""The contract of a graph engine: what `tape.py` (no GPU) and the CUDA engine both do.

Everything above this file uses these protocols only, so that a machine without a GPU tests the same code.
An engine records the work of a function once and repeats it on the same memory, without running the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from runners.errors import ConfigError
from runners.streams import Lanes


class CapturedGraph(Protocol):
    """The recorded work of one segment at one bucket."""

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the function returned: tensors in pool memory, or inputs, parameters and views of them, passed
        through; None and numbers pass through too. Rewritten by each replay, empty after `reset`."""
        ...

    @property
    def num_ops(self) -> int:
        """Recorded ops, or 0 where the engine cannot know."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to replay, because the segment makes views only."""
        ...

    def replay(self) -> None:
        """Repeats the recorded work, reading and writing the recorded addresses.

        Raises:
            StateError: after `reset`, or inside a capture.
        """
        ...

    def reset(self) -> None:
        """Drops the recorded work and the outputs. Idempotent."""
        ...


# Median microseconds of a replay of each graph, which take turns.
Measure = Callable[[Sequence[CapturedGraph]], Sequence[float]]


class GraphPool(Protocol):
    """Memory that the graphs of one module share, all buckets and signatures [I9]."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now: the peak over buckets, not their sum."""
        ...

    @property
    def device_bytes(self) -> int:
        """What the buckets captured so far took from the device in all, where that can be measured."""
        ...

    @property
    def lanes(self) -> Lanes:
        """What functions with parallel branches run on, in warm-ups and in captures into this pool."""
        ...

    @property
    def begin_call(self) -> Callable[[], None] | None:
        """To be called before each replay of a plan; None where there is nothing to do.

        It makes the caller's stream wait for the stream of the last call, where it is another.
        """
        ...

    def begin_bucket(self) -> None:
        """Says that the warm-ups of a bucket begin."""
        ...

    def keep_only(self, tensors: Iterable[torch.Tensor]) -> None:
        """Says that of all outputs captured since `begin_bucket` only these are read from here on.

        Segments captured later may reuse the memory of the others.
        """
        ...

    def end_bucket(self) -> None:
        """Says that a bucket is complete: the next one captured here reuses its memory [I9]."""
        ...

    def spoil(self) -> None:
        """Overwrites all its memory, as a check that no replay reads what an earlier one left there."""
        ...

    def release(self) -> None:
        """Gives the memory back; the pool cannot be captured into afterwards. Idempotent.

        Raises:
            StateError: a graph of this pool was not reset.
        """
        ...


class GraphEngine(Protocol):
    """Makes pools and graphs for one kind of device."""

    @property
    def name(self) -> str:
        """The engine's name in a configuration."""
        ...

    @property
    def measure(self) -> Measure | None:
        """Times graphs that do the same; None where a replay's time says nothing."""
        ...

    def new_pool(self, device: torch.device) -> GraphPool:
        """An empty pool on `device`."""
        ...

    def capture(self, fn: Callable[[], Sequence[Any]], *, pool: Any, segment: str) -> CapturedGraph:
        """Runs `fn` once and records its work into `pool`; `segment` names it in errors.

        Whatever `fn` raises passes through, and then leaves no graph, memory or mode behind [I8]. The RNG
        moves as in an eager run: putting it back is the caller's business.

        Raises:
            CaptureError: `fn` did something that a graph cannot repeat.
            StateError: a capture is open already, or the pool was released.
        """
        ...


def _tape() -> GraphEngine:
    from runners.tape import TapeEngine

    return TapeEngine()


def _cuda() -> GraphEngine:
    from runners.cuda_graph import CudaEngine

    return CudaEngine()


_ENGINES: dict[str, Callable[[], GraphEngine]] = {"tape": _tape, "cuda": _cuda}


def engine_for(name: str, device: torch.device | str) -> GraphEngine:
    """The graph engine of that name, or with ``"auto"`` the one that suits the device.

    Args:
        name: ``"auto"`` (real graphs on a CUDA device, else the tape), ``"tape"`` or ``"cuda"``.
        device: where the model lives.

    Raises:
        ConfigError: the name is unknown, or it is ``"cuda"`` and the device is another.
    """
    is_cuda = torch.device(device).type == "cuda"
    if name == "auto":
        name = "cuda" if is_cuda else "tape"
    if name not in _ENGINES:
        raise ConfigError(
            "field 'engine'",
            expected="'auto', 'tape' or 'cuda'",
            got=repr(name),
            rule="an engine is chosen by its name",
            fix="use 'auto'",
        )
    if name == "cuda" and not is_cuda:
        raise ConfigError(
            f"field 'engine', device {device}",
            expected="'auto' or 'tape'",
            got="'cuda'",
            rule="CUDA graphs hold work of a CUDA device",
            fix="move the model to a CUDA device, or use engine='auto'",
        )
    return _ENGINES[name]()
