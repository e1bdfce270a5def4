"""Decides from structure which ops may run padded, inside of graphs.

In: a trace.
Out: a verdict for each node, with its reason.
Read first: `classify.py`, then `rows/judge.py`.
"""
