"""Holds what the later rooms say about a model: segments, values, sizes, effects of nodes, keys of programs.

In: torch's graphs, and their nodes' fakes.
Out: the data types of a plan, which hold no CUDA object and no model, and the helpers that read graphs.
Read first: `plan.py`, then `nodes.py`.
"""
