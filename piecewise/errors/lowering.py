"""Lists the refusals of `piecewise/lowering`."""

from runners.errors import CaptureError


class SegmentNotLowered(CaptureError):
    what, expected, got = "{segment}", "a segment that lowering={lowering!r} can compile", "{reason}"
    rule = "with strict=True no segment silently keeps eager kernels"
    fix = "use lowering='eager', or strict=False"
