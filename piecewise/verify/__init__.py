"""Compares graphed calls with eager ones and finds the first segment that differs.

In: a model, the store of its graphs, and a call.
Out: a `VerifyReport`.
Read first: `verify.py`.
A wing: the story of a call can be read without this room.
"""
