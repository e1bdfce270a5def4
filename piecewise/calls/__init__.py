"""Binds the arguments of a call to forward's parameters and takes nested values apart.

In: the arguments of one call.
Out: flat leaves and the key that says which captured call serves them.
Read first: `binder.py`, then `structure.py`.
"""
