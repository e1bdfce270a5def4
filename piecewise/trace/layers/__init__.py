"""Traces one of many equal layers and uses its graph for the others.

In: a model with repeated layers.
Out: the same trace as without, made in less time.
Read first: `layer_reuse.py`.
A wing: the story of a call can be read without this room.
"""
