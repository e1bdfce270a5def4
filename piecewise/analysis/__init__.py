"""Decides which ops may run in graphs, on padded rows; what an op does to rows decides, not its name.

In: a trace.
Out: a verdict for each node with its reason, and what is known of the rows of each value.
Read first: `classify.py`, `rows/judge.py` and `rows/table.py`; `rows/rules/` op by op, when needed.
"""
