"""Cuts the graph into segments at boundary ops and at ops that must run eagerly.

In: a trace and the verdicts.
Out: a `SegmentPlan`.
Read first: `split.py`, then `segment_writer.py`, which also numbers what crosses a border.
"""
