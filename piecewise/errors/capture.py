"""Lists the refusals of captures, and of changes to what was captured."""

from runners.errors import CaptureError, ConfigError, StateError, TraceError


class SeveralDevices(TraceError):
    what, expected, got = "{other} and {first}", "one device", "{other_device} and {device}"
    rule = "a graph runs on one device"
    fix = "move the model and its inputs to the same device before capture()"


class InputsShareMemory(TraceError):
    what = "inputs '{name}' and '{other}' share memory, and forward writes '{name}'"
    rule = "what a graph reads was written for this call"
    fix = "make both of one torch tensor (views of it), or pass tensors of their own"


class StrictRefusal(CaptureError):
    """With `strict`, an op would let padded rows reach real ones, or is not known not to."""

    what = "op '{op}' in {where} {detail}"
    rule = "no padded row reaches a real row, and nothing depends on the padded count"
    fix = "rewrite it row by row, declare it (boundary_ops.declare_rows), or drop strict=True"


class PaddingMatters(CaptureError):
    """A segment fails, or its real rows change, with what padded rows hold."""

    what = "{segment}, bucket {bucket}{result}"
    rule = "no padded row reaches a real row, or is an index that is out of range"
    fix = "leave strict=False, with which the op at fault runs eagerly, and report it"


class MissingCaptureLimit(ConfigError):
    what, expected, got = "boundary='captured', op '{op}'", "a value of {missing}", "None"
    rule = "a captured step is copied into buffers whose size is fixed when it is captured"
    fix = (
        "piecewise.compile(model, boundary='captured', {first}=...), from the scheduler's limits; larger"
        " steps run eagerly"
    )


class UnknownBoundaryOp(ConfigError):
    what = "boundary op '{name}' in 'boundary_ops'"
    expected, got = "a registered op ({known})", "an unknown name{hint}"
    rule = "graphs are cut at registered ops"
    fix = "declare it with boundary_ops.define or boundary_ops.register first"


class TooManySignatures(StateError):
    what = "capture() of signature {number}"
    expected, got = "at most {limit} signatures", "one more kind of call"
    rule = "graphs are bounded in number"
    fix = "raise max_signatures, or make the calls alike"


class ChangeInsideCall(StateError):
    what = "{name}() inside a call of the same module"
    rule = "capture replaces the memory that the running call uses"
    fix = "call it between calls"


class NotSuspended(StateError):
    what, expected, got = "resume()", "a model that suspend() was called on", "one that is not suspended"
    rule = "resume() undoes suspend()"
    fix = "call capture() to capture, or refresh() to capture again"


class StillSuspended(StateError):
    what = "{name}() while suspended"
    expected, got = "graphs, or none asked for", "a model whose graphs wait for resume()"
    rule = "suspend() promised the memory to somebody else until resume()"
    fix = "call resume() first, or release() to give the graphs up for good"


class ModelDiffers(StateError):
    what = "the model and its graphs:\n{report}\n "
    expected, got = "graphs of the model as it is", "{num_changes} changes"
    rule = "what graphs read and were traced with stays as it was, or is noticed"
    fix = "call refresh(), or put back what changed"
