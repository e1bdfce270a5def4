"""Lists the refusals of `piecewise/lowering`."""

from __future__ import annotations

from runners.errors import CaptureError


class SegmentNotLowered(CaptureError):
    """With `strict`, a graph segment cannot be compiled."""

    what = "{segment}"
    expected = "a segment that lowering={lowering!r} can compile"
    got = "{reason}"
    rule = "with strict=True no segment silently keeps eager kernels"
    fix = "use lowering='eager', or strict=False"
