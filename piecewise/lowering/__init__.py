"""Lowers segments to callables: eager ops, fused ops or Inductor's kernels.

In: a `SegmentPlan`.
Out: a callable for each distinct segment.
Read first: `lowering.py`.
"""
