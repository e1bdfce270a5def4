"""Puts independent branches of a segment on parallel CUDA streams.

In: the aten graph of one segment.
Out: the same ops in another order, with forks and joins.
Read first: `branches.py`.
A wing: the story of a call can be read without this room.
"""
