"""The contract of a graph engine: what `tape.py` (no GPU) and the CUDA engine both do.

Everything above this file uses these classes only, so that a machine without a GPU tests the same code.
An engine records the work of a function once and repeats it on the same memory, without running the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch

from runners.cuda.side_streams import Streams
from runners.errors import CaptureError, ConfigError, StateError
from runners.mode import capturing


class CapturedGraph:
    """The recorded work of one segment at one bucket; as it is here, none.

    Attributes:
        segment: as errors name it.
        outputs: what the function returned: tensors in pool memory, or inputs, parameters and views of them,
            passed through; None and numbers pass through too. Rewritten by each replay, empty after `reset`.
        num_ops: recorded ops, or nodes of a CUDA graph.
        is_reset: whether `reset` was called.
    """

    def __init__(self, segment: str, outputs: tuple[Any, ...], num_ops: int) -> None:
        self.segment, self.outputs, self.num_ops = segment, outputs, num_ops
        self.is_reset = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to replay, because the segment makes views only."""
        return self.num_ops == 0

    def replay(self) -> None:
        """Repeats the recorded work, reading and writing the recorded addresses.

        Raises:
            StateError: after `reset`, or inside a capture.
        """

    def reset(self) -> None:
        """Drops the recorded work and the outputs. Idempotent."""
        self.is_reset, self.outputs = True, ()

    def _wrong_replay(self) -> StateError:
        return StateError(
            f"replay of {self.segment}",
            expected="a captured graph, outside of captures",
            got="a graph that was reset" if self.is_reset else f"one inside that of {capturing()}",
            rule="a graph that was reset is gone, and graphs do not nest",
            fix="capture the segment again" if self.is_reset else "replay after the capture",
        )


class GraphPool:
    """Memory that the graphs of one module share, all buckets and signatures [I9].

    Attributes:
        kind: as errors name it.
        lanes: what functions with parallel branches run on, in warm-ups and in captures into this pool.
        begin_call: to be called before each replay of a plan; None where there is nothing to do. It makes the
            caller's stream wait for the stream of the last call, where it is another.
        graphs: those captured here, as long as somebody holds them.
        is_recording: whether a capture into it is under way.
    """

    kind: str
    lanes: Streams
    begin_call: Callable[[], None] | None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: WeakSet[CapturedGraph] = WeakSet()
        self.is_recording = self._is_released = False

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now: the peak over buckets, not their sum."""
        raise NotImplementedError

    @property
    def device_bytes(self) -> int:
        """What the buckets captured so far took from the device in all, where that can be measured."""
        return self.allocated_bytes

    @property
    def num_live(self) -> int:
        """Graphs that were not reset."""
        return sum(not graph.is_reset for graph in self.graphs)

    def begin_bucket(self) -> None:
        """Says that the warm-ups of a bucket begin."""

    def keep_only(self, tensors: Iterable[torch.Tensor]) -> None:
        """Says that of all outputs captured since `begin_bucket` only these are read from here on.

        Segments captured later may reuse the memory of the others, but need not.
        """

    def end_bucket(self) -> None:
        """Says that a bucket is complete: the next one captured here reuses its memory [I9]."""

    def spoil(self) -> None:
        """Overwrites all its memory, as a check that no replay reads what an earlier one left there."""

    def release(self) -> None:
        """Gives the memory back; the pool cannot be captured into afterwards. Idempotent.

        Raises:
            StateError: a graph of this pool was not reset, or one is being captured.
        """
        if self._is_released:
            return
        if self.num_live or self.is_recording:
            raise StateError(
                f"release of the {self.kind} pool on {self.device}",
                expected="all graphs of the pool reset",
                got="a capture in progress" if self.is_recording else f"{self.num_live} still captured",
                rule="a pool's memory goes after the last graph that uses it [I9]",
                fix="reset every graph first",
            )
        self._is_released = True
        self._give_back()

    def _give_back(self) -> None:
        """Drops the memory: no graph uses it."""

    def check_usable(self, verb: str) -> None:
        """Raises StateError when the pool was released or is being captured into."""
        if self._is_released or self.is_recording:
            raise StateError(
                f"attempt to {verb} the {self.kind} pool on {self.device}",
                expected="a pool that is neither released nor in use",
                got="a released pool" if self._is_released else "a pool that another capture uses",
                rule="a pool serves one capture at a time, and none after its release [I9]",
                fix="take a new pool" if self._is_released else "finish the other capture first",
            )


class GraphEngine(Protocol):
    """Makes pools and graphs for one kind of device."""

    @property
    def name(self) -> str:
        """The engine's name in a configuration."""
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


def check_can_capture(pool: GraphPool, segment: str) -> None:
    """Raises StateError where a capture is under way, or the pool is in use or gone."""
    if capturing() is not None:
        raise StateError(
            f"capture of {segment}",
            expected="no capture in progress",
            got=f"the capture of {capturing()}",
            rule="captures do not nest",
            fix="capture the segments one after the other",
        )
    pool.check_usable("capture into")


def checked_outputs(outputs: Any, segment: str) -> tuple[Any, ...]:
    """What a captured function returned, as a tuple.

    Raises:
        CaptureError: it is no sequence.
    """
    if not isinstance(outputs, (tuple, list)):
        raise CaptureError(
            segment,
            expected="a tuple or list of outputs",
            got=type(outputs).__name__,
            rule="a captured function returns the sequence of its outputs",
            fix="return (tensor,) for a single output",
        )
    return tuple(outputs)


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
    if name not in ("tape", "cuda"):
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
    if name == "tape":
        from runners.tape.tape import TapeEngine

        return TapeEngine()
    from runners.cuda.graph import CudaEngine

    return CudaEngine()
