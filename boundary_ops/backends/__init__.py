"""Offers the attention of other libraries for a `PagedKVCache`: chosen by name when the cache is made.

In: the name of a back end and the cache's `PoolSpec`; in a call, a `StepView` and an `AttentionCall`.
Out: an `AttentionLibrary`, which attends straight into the call's `out`; None for this package's own code.
Read first: `library.py`, then `choice.py`. Nothing imports flashinfer before a cache asks for it.
"""
