"""Records a segment's ops and replays them on the same memory: the graph engine that needs no GPU.

Eager torch on a CPU has no list of kernels with frozen arguments, but its dispatcher sees every op. Under a
dispatch mode each op that makes a tensor is run, its result copied into the pool's arena, and *that* tensor
handed on to the model: the addresses that later ops take are the tape's own. What a capture cannot hold is
refused (`readbacks.py`). What becomes of an op (`recorder.py`):

=====================  ====================================================================================
views, metadata        run once, not replayed: the recorded ops hold tensors that are viewed already
in place, ``out=``     run again on the recorded tensors
``empty*``             not replayed; the memory is garbage at each replay, as it may be
``zeros``, ``full``    become a fill of the recorded tensor
all others             run again, the result copied into the recorded tensor
=====================  ====================================================================================

The recorded tensors are aliases of the model's, taken at the time of the op: a later ``unsqueeze_`` or
``.data =`` on the model's object changes nothing here. A kernel that writes through an address without being
an op (compiled code called directly) comes as an `OpaqueCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from runners._torch import keys_above_kernels, without_keys, without_torch_function
from runners.engine import CapturedGraph, GraphEngine, GraphPool, Streams, checked_outputs
from runners.mode import capture_of, capturing
from runners.opaque_call import recording_calls
from runners.tape.arena import Arena
from runners.tape.readbacks import HostReads, Watch
from runners.tape.recorder import Recorder, Step


class TapePool(GraphPool):
    """Owns arena memory shared by the tapes of one module, all buckets and signatures [I9].

    Within a bucket no memory is reused, so that a late reader is not fooled.
    """

    kind = "tape"
    begin_call = None  # a CPU has no streams

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.arena = Arena(device)
        self.streams = Streams()
        self.begin_bucket()

    @property
    def allocated_bytes(self) -> int:
        return self.arena.allocated_bytes

    def begin_bucket(self) -> None:
        """Notes what the arena holds, to return to should no tape of the bucket be kept."""
        self._of_bucket: WeakSet[TapeGraph] = WeakSet()
        self._before_bucket = self.arena.begin()

    def add(self, tape: TapeGraph) -> None:
        self.graphs.add(tape)
        self._of_bucket.add(tape)

    def end_bucket(self) -> None:
        """Returns to the arena's first byte [I9]; a bucket that failed leaves no memory [I8]."""
        self.check_usable("end a bucket of")
        if all(tape.is_reset for tape in self._of_bucket):
            self.arena.rewind(self._before_bucket)
        self.arena.restart()

    def overwrite_with_garbage(self) -> None:
        self.arena.overwrite_with_garbage()

    def _give_back(self) -> None:
        self.arena.clear()


class TapeGraph(CapturedGraph):
    """Holds the recorded ops of one segment at one bucket, as argumentless calls."""

    def __init__(self, segment: str, outputs: tuple[Any, ...], fills: list[Step], calls: list[Step]) -> None:
        super().__init__(segment, outputs, len(calls))
        self._steps = [*fills, *calls]

    def replay(self) -> None:
        """Runs the recorded ops on the recorded tensors, behind fills of the tape's memory with garbage.

        The caller's grad, inference, autocast and modes have no effect, and random ops draw anew.
        """
        if self.is_reset or capturing() is not None:
            self.refuse_replay()
        with without_keys(keys_above_kernels()), without_torch_function():
            for step in self._steps:
                step()

    def reset(self) -> None:
        super().reset()
        self._steps = []


class TapeEngine(GraphEngine):
    """Makes tapes; see the module's docstring."""

    name = "tape"

    def new_pool(self, device: torch.device) -> TapePool:
        return TapePool(torch.empty(0, device=device).device)

    def capture(self, fn: Callable[[], Sequence[Any]], *, pool: TapePool, segment: str) -> TapeGraph:
        pool.check_capture(segment)
        mark = pool.arena.begin()
        watch = Watch(segment)
        recorder = Recorder(pool.arena, watch)
        pool.is_recording = True
        try:
            # Outside inference mode, as tensors made in it could not be written by a replay outside.
            with capture_of(segment), torch.inference_mode(False), torch.no_grad():
                with HostReads(watch), recorder, recording_calls(recorder.record_call):
                    outputs = fn()
                fills, calls = recorder.steps()
                graph = TapeGraph(segment, checked_outputs(outputs, segment), fills, calls)
                pool.add(graph)
                return graph
        except BaseException:
            # The traceback keeps the recorder's frames alive, but not the recorded tensors.
            recorder.clear()
            pool.arena.rewind(mark)
            raise
        finally:
            pool.is_recording = False
