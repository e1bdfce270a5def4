"""What a failed CUDA capture says, in words: the kind of fault, the op and the user's source line.

Only what is recognised is translated; any other error passes through as it is. CUDA's texts are matched,
since torch gives the codes in some of its versions only.
"""

from __future__ import annotations

import torch

from runners.errors import CaptureError
from runners.tape.readbacks import DEVICE_CROSSING, READ_BACK, Refusal, refused, source_line_of

SYNCHRONIZED = Refusal(
    "a wait for the device, or another call that a capture forbids",
    "a graph holds device work only: nothing in it may wait, read back or allocate outside torch's allocator",
    "take the waiting call (synchronize, .item(), .cpu(), a copy from unpinned memory) out of the op, or make"
    " it a boundary op",
)
UNJOINED = Refusal(
    "a stream that was forked from the captured one and not joined again",
    "all work of a graph ends on the stream that it began on",
    "make the first stream wait for the other one (wait_stream, wait_event) before the op returns",
)
LEGACY_STREAM = Refusal(
    "work on the legacy default stream that waits for the captured one",
    "during a capture nothing may depend on the default stream",
    "launch on torch.cuda.current_stream() instead of stream 0",
)
OTHER_CAPTURE = Refusal(
    "an event or stream of another capture",
    "captures do not exchange work",
    "record and wait for events inside one op",
)
OUT_OF_MEMORY = Refusal(
    "no memory left on the device",
    "the largest bucket's intermediates must fit beside weights and caches",
    "capture smaller buckets, make the KV cache smaller, or free memory before capture()",
)
RANDOM = Refusal(
    "a draw of random numbers",
    "graphs of this engine hold no random ops, so that captures leave the generator alone [I8]",
    "let this part of the model run eagerly",
)
ELSEWHERE = Refusal(
    "kernels that ran on another stream, so that the graph is empty",
    "a graph holds what was launched on the captured stream or on streams forked from it",
    "launch on torch.cuda.current_stream(), or make the other stream wait for it and join it again",
)

_BY_TEXT: tuple[tuple[str, Refusal], ...] = (
    ("unless the CPU tensor is pinned", DEVICE_CROSSING),
    ("operation not permitted when stream is capturing", SYNCHRONIZED),
    ("operation failed due to a previous error during capture", SYNCHRONIZED),
    ("cudaErrorStreamCaptureUnsupported", SYNCHRONIZED),
    ("cudaErrorStreamCaptureInvalidated", SYNCHRONIZED),
    ("unjoined work", UNJOINED),
    ("cudaErrorStreamCaptureUnjoined", UNJOINED),
    ("depend on a capturing blocking stream", LEGACY_STREAM),
    ("cudaErrorStreamCaptureImplicit", LEGACY_STREAM),
    ("dependency created on uncaptured work in another stream", OTHER_CAPTURE),
    ("operation would result in a merge of separate capture sequences", OTHER_CAPTURE),
    ("operation not permitted on an event last recorded in a capturing stream", OTHER_CAPTURE),
    ("CUDA generator not in capture mode", RANDOM),
    ("CUDAGeneratorImpl", RANDOM),
    ("Offset increment outside graph capture", RANDOM),
)


def recognised(error: BaseException) -> Refusal | None:
    """The kind of fault that an error during a capture stands for, or None."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    found = next((refusal for part, refusal in _BY_TEXT if part in text), None)
    if found is SYNCHRONIZED and ".item" in (source_line_of(error) or ""):
        return READ_BACK
    return found


def translated(error: BaseException, segment: str) -> CaptureError | None:
    """The error in words, naming the segment and the user's line; None where it is not recognised."""
    refusal = recognised(error)
    if refusal is None:
        return None
    # torch's text says how much was asked for and who holds what.
    more = ": " + " ".join(str(error).split()[:40]) if refusal is OUT_OF_MEMORY else ""
    return refused(segment, refusal, source_line_of(error), more=more)
