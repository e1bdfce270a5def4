"""Wraps CUDA driver calls that torch has no name for: the state of a capture, and a graph's nodes.

torch ends a capture only by way of `CUDAGraph.capture_end`, which raises on a capture that CUDA has
invalidated and, depending on its version, leaves its allocator, its pinned-memory allocator or its random
generator in capture mode, or the pool referenced for ever. Replacing the invalid capture by a fresh and empty
one (`restart_capture`) lets torch finish by its ordinary way.
"""

import ctypes
import sys
from enum import IntEnum
from functools import cache
from typing import Any

from runners.errors import DriverCallFailed

_THREAD_LOCAL = 1


class StreamCapture(IntEnum):
    """Lists the values of CUstreamCaptureStatus."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


@cache
def _library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _call(name: str, *arguments: Any) -> int:
    function = getattr(_library(), name)
    function.restype = ctypes.c_int
    return int(function(*arguments))


def _checked(name: str, *arguments: Any) -> None:
    code = _call(name, *arguments)
    if code != 0:
        raise DriverCallFailed(name=name, code=code)


def capture_status(stream: int) -> StreamCapture:
    """Whether the stream (its raw handle) is being captured."""
    status = ctypes.c_int(0)
    _checked("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
    return StreamCapture(status.value)


def end_capture(stream: int) -> None:
    """Takes the stream out of capture, whatever its state, and drops what was captured."""
    if capture_status(stream) is StreamCapture.NONE:
        return
    graph = ctypes.c_void_p()
    # An invalidated capture ends with an error code, and has ended all the same.
    _call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    if graph.value:
        _call("cuGraphDestroy", graph)


def restart_capture(stream: int) -> None:
    """Replaces the stream's capture by an empty one that is valid."""
    end_capture(stream)
    _checked("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(_THREAD_LOCAL))


def num_nodes(graph: int) -> int:
    """Counts the nodes of a raw graph: kernels, copies, fills and joins."""
    count = ctypes.c_size_t(0)
    _checked("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    return count.value
