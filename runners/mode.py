"""Which mode the caller is in: eager only, capture window open, or in the middle of a capture.

One `ContextVar` per mode and no other state, so that a mode ends with its block whatever is raised in it, and
threads and tasks do not see each other's. Reading one costs well under 0.2 us, since each call reads two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_eager_only: ContextVar[bool] = ContextVar("piecewise_eager_only", default=False)
_capture_window: ContextVar[bool] = ContextVar("piecewise_capture_window", default=False)
_capturing: ContextVar[str | None] = ContextVar("piecewise_capturing", default=None)


@contextmanager
def eager_only() -> Iterator[None]:
    """No graph is replayed in this block: every call runs eagerly, with the reason ``eager_only``."""
    token = _eager_only.set(True)
    try:
        yield
    finally:
        _eager_only.reset(token)


def is_eager_only() -> bool:
    """Whether an `eager_only` block is open here."""
    return _eager_only.get()


@contextmanager
def capture_window() -> Iterator[None]:
    """Shapes seen in this block may be captured [I5]; outside of one, an unseen shape runs eagerly."""
    token = _capture_window.set(True)
    try:
        yield
    finally:
        _capture_window.reset(token)


def in_capture_window() -> bool:
    """Whether a `capture_window` block is open here."""
    return _capture_window.get()


@contextmanager
def capture_of(segment: str) -> Iterator[None]:
    """Marks this block as the capture of `segment`; graph engines open it around the recorded function."""
    token = _capturing.set(segment)
    try:
        yield
    finally:
        _capturing.reset(token)


def capturing() -> str | None:
    """The segment that is being captured here, or None."""
    return _capturing.get()


def is_transforming() -> bool:
    """Whether a tracer (`torch.jit.trace`) or a function transform (`vmap`, `jvp`) is at work here.

    Its tensors stand for something else, and a replay would be lost to it.
    """
    is_tracing = torch._C._get_tracing_state() is not None
    return is_tracing or torch._C._functorch.peek_interpreter_stack() is not None
