"""Translates a failed CUDA capture into words: the kind of fault, the op and the user's source line.

Only what is recognised is translated; any other error passes through as it is. CUDA's texts are matched,
since torch gives the codes in some of its versions only.
"""

from __future__ import annotations

import torch

from runners.errors import (
    DeviceCrossing,
    LegacyStream,
    OtherCapture,
    OutOfDeviceMemory,
    RandomDraw,
    ReadBack,
    UnjoinedStream,
    Unrecordable,
    WaitForDevice,
)
from runners.source_lines import source_line_of

_BY_TEXT: tuple[tuple[str, type[Unrecordable]], ...] = (
    ("unless the CPU tensor is pinned", DeviceCrossing),
    ("operation not permitted when stream is capturing", WaitForDevice),
    ("operation failed due to a previous error during capture", WaitForDevice),
    ("cudaErrorStreamCaptureUnsupported", WaitForDevice),
    ("cudaErrorStreamCaptureInvalidated", WaitForDevice),
    ("unjoined work", UnjoinedStream),
    ("cudaErrorStreamCaptureUnjoined", UnjoinedStream),
    ("depend on a capturing blocking stream", LegacyStream),
    ("cudaErrorStreamCaptureImplicit", LegacyStream),
    ("dependency created on uncaptured work in another stream", OtherCapture),
    ("operation would result in a merge of separate capture sequences", OtherCapture),
    ("operation not permitted on an event last recorded in a capturing stream", OtherCapture),
    ("CUDA generator not in capture mode", RandomDraw),
    ("CUDAGeneratorImpl", RandomDraw),
    ("Offset increment outside graph capture", RandomDraw),
)


def translated(error: BaseException, segment: str) -> Unrecordable | None:
    """Says an error of a capture in words, with segment and user's line; None where it is not known."""
    if isinstance(error, torch.OutOfMemoryError):
        # torch's text says how much was asked for and who holds what.
        more = ": " + " ".join(str(error).split()[:40])
        return OutOfDeviceMemory(segment, more=more + source_line_of(error))
    if not isinstance(error, RuntimeError):
        return None
    line = source_line_of(error)
    kind = next((kind for text, kind in _BY_TEXT if text in str(error)), None)
    if kind is WaitForDevice and ".item" in line:
        kind = ReadBack
    return kind(segment, more=line) if kind is not None else None
