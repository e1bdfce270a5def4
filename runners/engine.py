"""Defines what a graph engine does: it records a function's work once and repeats it on the same memory.

`engines.py` lists the engines. The tape needs no GPU, so a machine without one tests the same code.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn
from weakref import WeakSet

import torch

from runners import errors
from runners.mode import capturing


class CapturedGraph:
    """Holds the recorded work of one segment at one bucket; this base class holds none.

    Attributes:
        outputs: the function's results: tensors in pool memory, rewritten by each replay; inputs, parameters,
            views of them, None and numbers are passed through. Empty after `reset`.
        num_ops: recorded ops, or nodes of a CUDA graph.
    """

    def __init__(self, segment: str, outputs: tuple[Any, ...], num_ops: int) -> None:
        self.segment, self.outputs, self.num_ops = segment, outputs, num_ops
        self.is_reset = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to replay, because the segment makes views only."""
        return self.num_ops == 0

    def replay(self) -> None:
        """Repeats the recorded work at its addresses; raises `ReplayAfterReset` or `InsideCapture`."""

    def reset(self) -> None:
        """Drops the recorded work and the outputs. Idempotent."""
        self.is_reset, self.outputs = True, ()

    def refuse_replay(self) -> NoReturn:
        if self.is_reset:
            raise errors.ReplayAfterReset(segment=self.segment)
        raise errors.InsideCapture(verb="replay", segment=self.segment, other=capturing())


class Streams:
    """Runs a function's parallel branches on stream 0, where it was called, and on side streams.

    This base class, for a device without streams, runs them in the order of the calls.
    """

    def opened(self) -> AbstractContextManager[None]:
        """Brackets one run of a function: stream 0 is current again behind it, whatever is raised in it."""
        return nullcontext()

    def fork(self, num_streams: int) -> None:
        """Begins streams 1 to `num_streams` - 1 behind all work on stream 0, which is current."""

    def enter(self, stream: int) -> None:
        """Makes a stream current: what is called from now on runs on it."""

    def join(self, *held: Any) -> None:
        """Makes stream 0 current, behind all work on the others; `held` values live up to here."""


class GraphPool:
    """Owns the memory that the graphs of one module share, all buckets and signatures [I9].

    Attributes:
        kind: as errors name it.
        streams: run parallel branches of functions, in warm-ups and in captures into this pool.
        begin_call: called before each replay of a plan, makes the caller's stream wait for the last call's;
            None where there is nothing to do.
        graphs: those captured here, as long as somebody holds them.
    """

    kind: str
    streams: Streams
    begin_call: Callable[[], None] | None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: WeakSet[CapturedGraph] = WeakSet()
        self.is_recording = self._is_released = False

    @property
    def allocated_bytes(self) -> int:
        """Returns the bytes held now: the peak over buckets, not their sum."""
        raise NotImplementedError

    @property
    def device_bytes(self) -> int:
        """Returns the bytes that captured buckets took from the device, where that can be measured."""
        return self.allocated_bytes

    @property
    def num_live(self) -> int:
        return sum(not graph.is_reset for graph in self.graphs)

    def begin_bucket(self) -> None:
        """Begins the warm-ups of a bucket."""

    def keep_only(self, tensors: Iterable[torch.Tensor]) -> None:
        """Frees for later captures all outputs captured since `begin_bucket` but these."""

    def end_bucket(self) -> None:
        """Completes a bucket: the next one captured here reuses its memory [I9]."""

    def overwrite_with_garbage(self) -> None:
        """Overwrites all its memory, to check that no replay reads what an earlier one left there."""

    def release(self) -> None:
        """Gives the memory back for good. Idempotent; raises `PoolInUse` or `PoolHasGraphs`."""
        if self._is_released:
            return
        self.check_usable("release")
        if self.num_live:
            raise errors.PoolHasGraphs(kind=self.kind, device=self.device, count=self.num_live)
        self._is_released = True
        self._give_back()

    def _give_back(self) -> None: ...

    def check_usable(self, verb: str) -> None:
        """Raises where the pool was released, or a capture uses it."""
        if self._is_released:
            raise errors.PoolReleased(verb=verb, kind=self.kind, device=self.device)
        if self.is_recording:
            raise errors.PoolInUse(verb=verb, kind=self.kind, device=self.device)

    def check_capture(self, segment: str) -> None:
        """Raises where nothing can be captured into the pool now."""
        if (other := capturing()) is not None:
            raise errors.InsideCapture(verb="capture", segment=segment, other=other)
        self.check_usable("capture into")


class GraphEngine:
    """Makes pools and graphs, and knows its kind of device; this base class knows a CPU.

    Attributes:
        device_type: the kind of device whose work it records; None for any.
        has_triton: whether Triton's kernels run there.
        dies_of_bad_index: whether an index out of range makes the device unusable for the process.
    """

    name: str
    device_type: str | None = None
    has_triton = dies_of_bad_index = False

    def new_pool(self, device: torch.device) -> GraphPool:
        """Makes an empty pool on `device`."""
        raise NotImplementedError

    def capture(self, fn: Callable[[], Sequence[Any]], *, pool: Any, segment: str) -> CapturedGraph:
        """Runs `fn` once and records its work into `pool`; `segment` names it in errors.

        Whatever `fn` raises passes through and leaves no graph, memory or mode behind [I8]. The random state
        moves as in an eager run.

        Raises:
            CaptureError: `fn` did something that a graph cannot repeat.
            StateError: a capture is open already, or the pool was released.
        """
        raise NotImplementedError

    def free_memory(self, device: torch.device) -> tuple[int, int] | None:
        """Reads (free, total) bytes of the device, unused memory of torch's included; None for the host's."""
        return None

    def synchronize(self, device: torch.device) -> None:
        """Waits until the device has nothing left to do."""

    def fork_random_state(self, device: torch.device) -> AbstractContextManager[None]:
        """Brackets work after which the random generators of host and device are as before."""
        return torch.random.fork_rng(devices=[])

    def has_tf32(self) -> bool:
        """Whether float32 matmuls may round their inputs to TF32."""
        return False


def checked_outputs(outputs: Any, segment: str) -> tuple[Any, ...]:
    """Returns a captured function's outputs as a tuple; raises `NoOutputSequence` for anything else."""
    if not isinstance(outputs, (tuple, list)):
        raise errors.NoOutputSequence(segment=segment, type=type(outputs).__name__)
    return tuple(outputs)
