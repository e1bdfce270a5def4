"""Can the engines record a node at all? Asked by recording it alone.

Fakes do not show what a custom op's kernel does inside, and the tape does: reading values back, say. On a
CUDA device a node is also captured alone, after the tape has run it once: that finds what only CUDA refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runners.engine import GraphEngine, engine_for
from runners.errors import CaptureError


def _engines_for(device: torch.device) -> list[GraphEngine]:
    """The engines that must be able to record a node: the tape, and the device's own."""
    return [engine_for(name, device) for name in dict.fromkeys(("tape", engine_for("auto", device).name))]


class Recorders:
    """The engines, each with a pool of its own; `release` gives the pools back."""

    def __init__(self, device: torch.device) -> None:
        self._recorders = [(engine, engine.new_pool(device)) for engine in _engines_for(device)]
        self._known: dict[Any, str | None] = {}

    def refusal_of(self, call: Callable[[], Any], *, key: Any, name: str) -> str | None:
        """Why `call` cannot be recorded, or None; asked once per `key`."""
        if key not in self._known:
            self._known[key] = self._record(call, name)
        return self._known[key]

    def _record(self, call: Callable[[], Any], name: str) -> str | None:
        refused = None
        for engine, pool in self._recorders:
            try:
                engine.capture(lambda: [call()], pool=pool, segment=name).reset()
            except CaptureError as error:
                refused = refused or (f"{error.what}: {error.got}" if error.got else error.what)
            except RuntimeError as error:
                if engine.name == "tape":
                    raise  # the node fails by itself
                refused = refused or f"cannot be captured: {str(error).splitlines()[0]}"
            pool.end_bucket()
        return refused

    def release(self) -> None:
        for _, pool in self._recorders:
            pool.release()
