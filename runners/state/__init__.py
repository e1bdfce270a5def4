"""Compares the Python state and the addresses that a capture depends on with what is there now.

In: places (`StateRef`) and what a trace saw of them (`StateFacts`).
Out: whether all is unchanged, at each call; the first difference in words where it is not.
Read first: `state_check.py`. `watched_dicts.py` makes it quick, `same_value.py` compares values.
"""
