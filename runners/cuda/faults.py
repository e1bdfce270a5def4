"""Translates a failed CUDA capture into words: the kind of fault, the op and the user's source line.

Only what is recognised is translated; any other error passes through as it is. CUDA's texts are matched,
since torch gives the codes in some of its versions only.
"""

import torch

from runners import errors
from runners.source_lines import source_line_of

_BY_TEXT: tuple[tuple[str, type[errors.Unrecordable]], ...] = (
    ("unless the CPU tensor is pinned", errors.DeviceCrossing),
    ("operation not permitted when stream is capturing", errors.WaitForDevice),
    ("operation failed due to a previous error during capture", errors.WaitForDevice),
    ("cudaErrorStreamCaptureUnsupported", errors.WaitForDevice),
    ("cudaErrorStreamCaptureInvalidated", errors.WaitForDevice),
    ("unjoined work", errors.UnjoinedStream),
    ("cudaErrorStreamCaptureUnjoined", errors.UnjoinedStream),
    ("depend on a capturing blocking stream", errors.LegacyStream),
    ("cudaErrorStreamCaptureImplicit", errors.LegacyStream),
    ("dependency created on uncaptured work in another stream", errors.OtherCapture),
    ("operation would result in a merge of separate capture sequences", errors.OtherCapture),
    ("operation not permitted on an event last recorded in a capturing stream", errors.OtherCapture),
    ("CUDA generator not in capture mode", errors.RandomDraw),
    ("CUDAGeneratorImpl", errors.RandomDraw),
    ("Offset increment outside graph capture", errors.RandomDraw),
)


def translated(error: BaseException, segment: str) -> errors.Unrecordable | None:
    """Says an error of a capture in words, with segment and user's line; None where it is not known."""
    if isinstance(error, torch.OutOfMemoryError):
        # torch's text says how much was asked for and who holds what.
        more = ": " + " ".join(str(error).split()[:40])
        return errors.OutOfDeviceMemory(segment, more=more + source_line_of(error))
    if not isinstance(error, RuntimeError):
        return None
    line = source_line_of(error)
    kind = next((kind for text, kind in _BY_TEXT if text in str(error)), None)
    if kind is errors.WaitForDevice and ".item" in line:
        kind = errors.ReadBack
    return kind(segment, more=line) if kind is not None else None
