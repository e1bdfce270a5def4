"""Can the engines record a node at all? Asked by recording it alone, on the tape.

Fakes do not show what a custom op's kernel does inside, and the tape does: reading values back, say. The tape
records nodes of any device. A node is not also captured alone where the device has graphs of its own:
hundreds of captures that are dropped at once corrupted the heap there (torch 2.11, CUDA 13), while
captures that are kept do not. What only CUDA refuses shows when its segment is captured, and that bucket
runs eagerly [I8].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runners.errors import CaptureError
from runners.tape import TapeEngine


class Recorder:
    """A tape with a pool of its own; `release` gives the pool back."""

    def __init__(self, device: torch.device) -> None:
        self._tape = TapeEngine()
        self._pool = self._tape.new_pool(device)
        self._known: dict[Any, str | None] = {}

    def refusal_of(self, call: Callable[[], Any], *, key: Any, name: str) -> str | None:
        """Why `call` cannot be recorded, or None; asked once per `key`."""
        if key not in self._known:
            self._known[key] = self._record(call, name)
        return self._known[key]

    def _record(self, call: Callable[[], Any], name: str) -> str | None:
        try:
            self._tape.capture(lambda: [call()], pool=self._pool, segment=name).reset()
        except CaptureError as error:
            return f"{error.what}: {error.got}" if error.got else error.what
        finally:
            self._pool.end_bucket()
        return None

    def release(self) -> None:
        self._pool.release()
