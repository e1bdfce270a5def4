"""Runs parallel branches of a captured function on CUDA streams.

Inside a capture a side stream that waits for the capturing one belongs to the capture from then on, and what
the two wait for become edges of the graph. Every fork has its join before the function ends, since a capture
with work that was not joined is no graph. Outside of captures, in warm-ups, the same calls run with real
streams.

A pool has its own side streams: free memory is kept per stream, so another one in each capture would find
none of what the capture before it has left [I9].
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from runners.engine import Streams


class CudaStreams(Streams):
    """Holds the streams of one pool on a CUDA device; no side stream is `capture_stream`."""

    def __init__(self, device: torch.device, capture_stream: torch.cuda.Stream) -> None:
        self._device, self._capture_stream = device, capture_stream
        self._sides: list[torch.cuda.Stream] = []
        self._main: torch.cuda.Stream = capture_stream
        self._num_open = 1

    @contextmanager
    def opened(self) -> Iterator[None]:
        with torch.cuda.device(self._device):  # making a stream current makes its device current, too
            self._main, self._num_open = torch.cuda.current_stream(self._device), 1
            try:
                yield
            finally:
                # After an error: memory that the host frees now may be in use on a side stream, and a capture
                # can only be ended where all is joined. One that CUDA has invalidated takes no join.
                with suppress(RuntimeError):
                    self.join()

    def fork(self, num_streams: int) -> None:
        # torch hands out a few dozen streams in turn, so the next one may be one that is in use here.
        taken = {self._capture_stream.cuda_stream, *(side.cuda_stream for side in self._sides)}
        while len(self._sides) < num_streams - 1:
            side = torch.cuda.Stream(self._device)
            if side.cuda_stream not in taken:
                taken.add(side.cuda_stream)
                self._sides.append(side)
        self._num_open = num_streams
        for side in self._sides[: num_streams - 1]:
            side.wait_stream(self._main)

    def enter(self, stream: int) -> None:
        torch.cuda.set_stream(self._sides[stream - 1] if stream else self._main)

    def join(self, *held: Any) -> None:
        torch.cuda.set_stream(self._main)
        for side in self._sides[: self._num_open - 1]:
            self._main.wait_stream(side)
        self._num_open = 1
