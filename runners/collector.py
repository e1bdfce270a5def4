"""Pauses Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keeps the collector from starting in a block, for all threads; reference counts free as ever.

    A trace makes a million objects that live on; full collections of them take a tenth of the start-up. In a
    capture, a collection could destroy CUDA objects, which a capture forbids.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
