"""Python's garbage collector, out of the way for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """A block in which no collection starts by itself; what reference counts free is freed as ever.

    A trace makes a million objects that live on, and each full collection on the way looks at all of them:
    a tenth of the start-up. In a capture one could destroy CUDA objects, which a capture forbids. It counts
    for all threads, as the collector does.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
