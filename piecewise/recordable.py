"""Which op of a segment cannot be recorded: each is recorded alone.

Fakes do not show what a kernel of somebody's does inside, and the tape does: reading values back, say. What
only CUDA refuses, a capture shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runners.engine import engine_for
from runners.errors import CaptureError


@contextmanager
def recorders(device: torch.device) -> Iterator[Callable[[Callable[[], Any], str], str | None]]:
    """A block in which `refusal(call, name)` says why a call cannot be recorded, or None."""
    engines = [engine_for(name, device) for name in dict.fromkeys(("tape", engine_for("auto", device).name))]
    pools = [(engine, engine.new_pool(device)) for engine in engines]

    def refusal(call: Callable[[], Any], name: str) -> str | None:
        for engine, pool in pools:
            try:
                engine.capture(lambda: [call()], pool=pool, segment=name).reset()
            except CaptureError as error:
                return f"{error.what}: {error.got}" if error.got else error.what
            except RuntimeError as error:
                return f"cannot be captured: {str(error).splitlines()[0]}"
            finally:
                pool.end_bucket()
        return None

    try:
        yield refusal
    finally:
        for _, pool in pools:
            pool.release()
