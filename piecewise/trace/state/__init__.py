"""Finds the state of model and program that a trace depends on.

In: the guards of a trace, and what forward read.
Out: references to state with the value expected there.
Read first: `state.py`, then `unguarded.py`.
"""
