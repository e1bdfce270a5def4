"""Rewrites a segment's aten graph: clean-up, packed linears, fused kernels.

In: the aten graph of one segment.
Out: another graph that computes the same, and counts of what matched.
Read first: `fuse.py`, then `fusions/silu_and_mul.py` as an example.
A wing: the story of a call can be read without this room.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "fuse_segments":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from piecewise.passes.fuse import fuse

    return fuse
