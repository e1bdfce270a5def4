"""Marks calls of compiled code, which is no sequence of dispatcher ops, for graph engines.

A CUDA graph records whatever kernels such a call launches. The tape sees the dispatcher's ops only: while it
records, the call is handed to its recorder, which notes one step on the recorded memory.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from runners.mode import during_block

# Runs `function(*args)`, notes how to repeat it, and returns its results in recorded memory.
CallRecorder = Callable[[Callable[..., Sequence[Any]], tuple[Any, ...]], Sequence[Any]]
_recorder: ContextVar[CallRecorder | None] = ContextVar("piecewise_call_recorder", default=None)


def recording_calls(record: CallRecorder) -> AbstractContextManager[None]:
    """Hands the opaque calls of this block to `record`."""
    return during_block(_recorder, record)


class OpaqueCall:
    """Wraps a function of numbers and tensors that is recorded as one step.

    It returns a sequence of new tensors or views of its arguments, may write its arguments, reads no other
    tensor, and does the same on each call with equal shapes.
    """

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Sequence[Any]:
        record = _recorder.get()
        return self.function(*args) if record is None else record(self.function, args)
