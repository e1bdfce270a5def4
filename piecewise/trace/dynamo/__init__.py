"""Runs Dynamo and reads its guards and sources.

In: a model and an example call.
Out: the captured graph, and each guard as a comparison.
Read first: `run.py`, then `guard_kinds.py`.
"""
