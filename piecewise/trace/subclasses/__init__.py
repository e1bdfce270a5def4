"""Sees through tensor subclasses: the ops on the plain tensors inside take the place of theirs.

In: a graph with subclasses among its values.
Out: a graph of plain tensors.
Read first: `subclasses.py`.
A wing: the story of a call can be read without this room.
"""
