"""Compares the state that a capture depends on with what is there now.

In: references with their expected values.
Out: the first difference, or none.
Read first: `state_check.py`.
"""
