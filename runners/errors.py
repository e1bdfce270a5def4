"""Errors that a user or a model can cause, each in four lines: what, expected and got, rule, fix.

`PiecewiseError` is the root for `runners` and `piecewise` (which re-exports it). `boundary_ops` has a root
of its own, because neither package imports the other.
"""

from typing import Any


class PiecewiseError(Exception):
    """Root of this project's errors; the message names the user's things and says what to do.

    A refusal is a subclass whose class attributes are templates for `str.format`, filled from `names`.
    What is particular to one place is given there instead, and wins.

    Args:
        what: what failed and where: argument, op, module path, source line, bucket.
        expected: what was needed there. Left out when there is no one right value.
        got: what was found instead.
        rule: the rule that was broken.
        fix: what the reader can do about it.
        names: values for the templates.
    """

    what: str | None = None
    expected: str | None = None
    got: str | None = None
    rule: str | None = None
    fix: str | None = None

    def __init__(
        self, what: str | None = None, *, expected: str | None = None, got: str | None = None,
        rule: str | None = None, fix: str | None = None, **names: object,
    ) -> None:  # fmt: skip
        given = {"what": what, "expected": expected, "got": got, "rule": rule, "fix": fix}
        for part, text in given.items():
            template = getattr(type(self), part)
            filled = template.format(**names) if text is None and template is not None else text
            setattr(self, part, filled)
        found = [f"{word} {text}" for word, text in (("expected", self.expected), ("got", self.got)) if text]
        lines = [f"{self.what}: {', '.join(found)}" if found else str(self.what)]
        lines += [f"  {word} {text}" for word, text in (("Rule:", self.rule), ("Fix: ", self.fix)) if text]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (type(self), str(self), self.__dict__)


def _copied(kind: type[PiecewiseError], text: str, parts: dict[str, Any]) -> PiecewiseError:
    """Builds a copied or unpickled error again: its templates are filled already."""
    error = kind.__new__(kind, text)
    error.__dict__.update(parts)
    return error


class ConfigError(PiecewiseError, ValueError):
    """A configuration field, option, environment variable or bucket file is wrong."""


class TraceError(PiecewiseError):
    """The model's forward cannot be traced into one graph with this example."""


class TokenDimError(PiecewiseError):
    """The token dim is absent, ambiguous or specialised to the example's size."""


class SplitError(PiecewiseError):
    """The traced graph cannot be cut into segments, or `strict` refuses the cut."""


class CaptureError(PiecewiseError):
    """A segment cannot be recorded: it reads a value back, makes host tensors or changes shape with data."""


class StateError(PiecewiseError, RuntimeError):
    """A method was called in the wrong order, from the wrong thread or outside the capture window."""


class InsideCapture(StateError):
    what, expected, got = "{verb} of {segment}", "no capture in progress", "the capture of {other}"
    rule = "graphs are captured and replayed one after the other, not inside a capture"
    fix = "{verb} it after that capture"


class ReplayAfterReset(StateError):
    what, expected, got = "replay of {segment}", "a captured graph", "a graph that was reset"
    rule = "a graph that was reset is gone"
    fix = "capture the segment again"


class PoolReleased(StateError):
    what = "attempt to {verb} the {kind} pool on {device}"
    expected, got = "a pool that holds memory", "a released pool"
    rule = "a released pool has given its memory back"
    fix = "take a new pool"


class PoolInUse(StateError):
    what = "attempt to {verb} the {kind} pool on {device}"
    expected, got = "a pool that no capture uses", "a capture in progress"
    rule = "a pool serves one capture at a time"
    fix = "finish the other capture first"


class PoolHasGraphs(StateError):
    what = "attempt to release the {kind} pool on {device}"
    expected, got = "all graphs of the pool reset", "{count} still captured"
    rule = "a pool's memory goes after the last graph that uses it"
    fix = "reset every graph first"


class NoOutputSequence(CaptureError):
    what, expected, got = "{segment}", "a tuple or list of outputs", "{type}"
    rule = "a captured function returns the sequence of its outputs"
    fix = "return (tensor,) for a single output"


class UnknownEngine(ConfigError):
    what, expected, got = "field 'engine'", "{names}", "{name!r}"
    rule = "an engine is chosen by its name"
    fix = "use 'auto'"


class EngineOfAnotherDevice(ConfigError):
    what, expected, got = "field 'engine', device {device}", "{names}", "{name!r}"
    rule = "graphs of the engine {name!r} hold work of a {device_type} device"
    fix = "move the model to a {device_type} device, or use engine='auto'"


class ForeignAllocator(ConfigError):
    what, expected, got = "torch's CUDA allocator", "'native'", "{backend!r}"
    rule = "buckets share graph memory through torch's own allocator"
    fix = "leave 'backend' out of PYTORCH_CUDA_ALLOC_CONF"


class DriverCallFailed(StateError):
    """A call of the CUDA driver failed while a failed capture was cleaned up."""

    what, expected, got = "{name} of the CUDA driver", "success", "error {code}"
    rule = "a capture that failed is put back to a known state"
    fix = "if an earlier error broke the CUDA context, restart the process"


class InvalidBuckets(ConfigError):
    what = "buckets{part}"
    rule = "buckets are whole token counts from 1 up, strictly ascending"
    fix = "list each token count once, from small to large, such as [64, 128, 256]"


class UnlistedBucket(ConfigError):
    what, expected, got = "bucket {bucket}", "one of {sizes}", "{bucket}"
    rule = "only listed buckets have a range"
    fix = "ask bucket_for(num_tokens) which bucket serves a call"


class NegativeWarmUps(ConfigError):
    what, expected, got = "field 'warmup_steps'", "0 or more", "{steps}"
    rule = "a bucket is captured after so many eager runs"
    fix = "leave it at 3"


class WrongBucketState(StateError):
    """A bucket was warmed up, captured or replayed out of order."""

    what = "{verb} of {segment}, bucket {bucket}"
    rule = "a bucket goes from cold over its warm-ups to captured, and back by reset() only"
    fix = "call warm_up {steps} times, then capture once; reset() begins anew"


class SegmentFailed(CaptureError):
    """A segment raised an error in a warm-up or a capture."""

    what, expected = "{segment}, bucket {bucket}", "a segment that runs"
    rule = "a bucket whose capture fails is served eagerly"
    fix = "run the model eagerly at this token count to see the error alone"


class Unrecordable(CaptureError):
    """An op does something that a graph cannot repeat; the subclasses say what.

    `what` names the segment and the op; `{more}` is what else is known, such as the user's source line.
    """

    expected = "work that repeats without the host"


class ReadBack(Unrecordable):
    got = "a tensor's value read by the host{more}"
    rule = "a replay runs no Python, so a value read while recording would be frozen"
    fix = "keep the value in a tensor (torch.where, masked_fill), or let this part of the model run eagerly"


class ValueDependentShape(Unrecordable):
    got = "an output whose shape depends on values{more}"
    rule = "a graph has fixed shapes, and finding this one waits for the device"
    fix = "use a mask or a fixed size (torch.where, nonzero_static, output_size=), or run this part eagerly"


class HostTensor(Unrecordable):
    got = "a tensor made from host values{more}"
    rule = "a graph holds device work only: the values would be frozen, and CUDA captures no copy of them"
    fix = "make the tensor once outside (a buffer or an input), or use torch.full, zeros or arange"


class TensorResized(Unrecordable):
    got = "a tensor that was resized or given other memory{more}"
    rule = "recorded tensors keep their address and shape"
    fix = "allocate the tensor, or out=, at its final shape"


class DeviceCrossing(Unrecordable):
    got = "a tensor on another device than the pool's{more}"
    rule = "a graph holds work of one device; a copy between devices cannot be captured"
    fix = "move the tensor outside of the graph segment"


class UnstridedTensor(Unrecordable):
    got = "a sparse, quantized or otherwise not strided tensor{more}"
    rule = "recorded memory is plain strided memory"
    fix = "let this part of the model run eagerly"


class WaitForDevice(Unrecordable):
    got = "a wait for the device, or another call that a capture forbids{more}"
    rule = "nothing in a graph may wait for the device, read back or allocate outside torch's allocator"
    fix = (
        "take the waiting call (synchronize, .item(), .cpu(), a copy from unpinned memory) out of the op, or"
        " make it a boundary op"
    )


class UnjoinedStream(Unrecordable):
    got = "a stream that was forked from the captured one and not joined again{more}"
    rule = "all work of a graph ends on the stream that it began on"
    fix = "make the first stream wait for the other one (wait_stream, wait_event) before the op returns"


class LegacyStream(Unrecordable):
    got = "work on the legacy default stream that waits for the captured one{more}"
    rule = "during a capture nothing may depend on the default stream"
    fix = "launch on torch.cuda.current_stream() instead of stream 0"


class OtherCapture(Unrecordable):
    got = "an event or stream of another capture{more}"
    rule = "captures do not exchange work"
    fix = "record and wait for events inside one op"


class OutOfDeviceMemory(Unrecordable):
    got = "no memory left on the device{more}"
    rule = "the largest bucket's intermediates must fit beside weights and caches"
    fix = "capture smaller buckets, make the KV cache smaller, or free memory before capture()"


class RandomDraw(Unrecordable):
    got = "a draw of random numbers{more}"
    rule = "graphs of this engine hold no random ops, so that captures leave the generator alone"
    fix = "let this part of the model run eagerly"


class WorkElsewhere(Unrecordable):
    got = "kernels that ran on another stream, so that the graph is empty{more}"
    rule = "a graph holds what was launched on the captured stream or on streams forked from it"
    fix = "launch on torch.cuda.current_stream(), or make the other stream wait for it and join it again"


def one_line(error: BaseException) -> str:
    """An error of any kind in one line: its class and the first line of its text, 300 characters at most."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def short(value: object, max_chars: int = 60) -> str:
    """A user's value as text, short whatever it is: an int of more than 4300 digits has no repr, and a text
    may be megabytes."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    text = repr(value[: max_chars + 1] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def shown(value: object) -> str:
    """`value`, short, and its type."""
    return f"{short(value, 80)} ({type(value).__name__})"
