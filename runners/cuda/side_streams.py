"""Lanes on which parts of a captured function run at the same time: CUDA streams, or none.

Lane 0 is the stream that the function was called on, the others are side streams. Inside a capture a side
stream that waits for the capturing one belongs to the capture from then on, and what the two wait for become
edges of the graph. Every fork has its join before the function ends, since a capture with work that was not
joined is no graph. Outside of captures, in warm-ups, the same calls run with real streams.

A pool has its own side streams: free memory is kept per stream, so another one in each capture would find
none of what the capture before it has left [I9].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch


class Streams:
    """What a scheduled function runs on; as it is here, a device without streams: what is called runs at
    once, in the order of the calls."""

    def opened(self) -> AbstractContextManager[None]:
        """A block for one run of a function: whatever is raised in it, lane 0 is current again behind it."""
        return nullcontext()

    def fork(self, num_lanes: int) -> None:
        """Begins lanes 1 to `num_lanes` - 1 behind all that lane 0, which is current, has been given."""

    def enter(self, lane: int) -> None:
        """Makes a lane current: what is called from now on runs on it."""

    def join(self, *held: Any) -> None:
        """Makes lane 0 current, behind all that the others have been given.

        Args:
            held: what was made or read since the fork; it stays alive up to here.
        """


class CudaStreams(Streams):
    """Lanes of a CUDA device.

    Args:
        device: with an index.
        capture_stream: the stream of the pool's captures; no side stream is this one.
    """

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
                # After an error: what the host frees now may still be in use on a lane, and a capture can
                # only be ended where all is joined. One that CUDA has invalidated takes no join.
                with suppress(RuntimeError):
                    self.join()

    def fork(self, num_lanes: int) -> None:
        # torch hands out a few dozen streams in turn, so the next one may be one that is in use here.
        taken = {self._capture_stream.cuda_stream, *(side.cuda_stream for side in self._sides)}
        while len(self._sides) < num_lanes - 1:
            stream = torch.cuda.Stream(self._device)
            if stream.cuda_stream not in taken:
                taken.add(stream.cuda_stream)
                self._sides.append(stream)
        self._num_open = num_lanes
        for side in self._sides[: num_lanes - 1]:
            side.wait_stream(self._main)

    def enter(self, lane: int) -> None:
        torch.cuda.set_stream(self._sides[lane - 1] if lane else self._main)

    def join(self, *held: Any) -> None:
        torch.cuda.set_stream(self._main)
        for side in self._sides[: self._num_open - 1]:
            self._main.wait_stream(side)
        self._num_open = 1
