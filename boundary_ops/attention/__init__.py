"""Is the paged attention op, in torch operators and as a Triton kernel.

In: q, k, v of packed tokens and the cache of one layer.
Out: the result in `out`, K and V in the cache.
Read first: `attention.py`, then `captured.py`; `triton/` is a wing.
"""
