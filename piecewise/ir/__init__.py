"""Holds what the later rooms say about a model: segments, values, sizes, effects of nodes.

In: nothing but torch's graphs.
Out: the data types of a plan; they hold no CUDA object and no model.
Read first: `plan.py`.
"""
