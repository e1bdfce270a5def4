"""Tests graphed models in a user's own test suite.

In: a model and a function that makes its inputs, or the tests of a pytest run.
Out: an `AssertionError` that lists what is wrong; tests that fail where a call ran eagerly.
Read first: `assertions.py`.
A wing: the story of a call can be read without this room.
"""
