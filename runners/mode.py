"""Tells the caller's mode: eager only, capture window open, or in the middle of a capture.

Each mode is one `ContextVar`, so it ends with its block whatever is raised, and threads and tasks have their
own. Reading one costs well under 0.2 us, since each call reads two.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
_eager_only: ContextVar[bool] = ContextVar("piecewise_eager_only", default=False)
_capture_window: ContextVar[bool] = ContextVar("piecewise_capture_window", default=False)
_capturing: ContextVar[str | None] = ContextVar("piecewise_capturing", default=None)
# Whether a block of that kind is open here; the segment that is being captured here, or None.
is_eager_only = _eager_only.get
in_capture_window = _capture_window.get
capturing = _capturing.get


@contextmanager
def during_block(mode: ContextVar[T], value: T) -> Iterator[None]:
    """Sets a mode for a block."""
    token = mode.set(value)
    try:
        yield
    finally:
        mode.reset(token)


def eager_only() -> AbstractContextManager[None]:
    """Runs every call of a block eagerly, with the reason ``eager_only``."""
    return during_block(_eager_only, True)


def capture_window() -> AbstractContextManager[None]:
    """Lets shapes seen in a block be captured [I5]; outside of one, an unseen shape runs eagerly."""
    return during_block(_capture_window, True)


def capture_of(segment: str) -> AbstractContextManager[None]:
    """Marks this block as the capture of `segment`; graph engines open it around the recorded function."""
    return during_block(_capturing, segment)
