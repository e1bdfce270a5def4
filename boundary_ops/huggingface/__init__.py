"""Serves transformers models on the paged attention op: `attach(model, cache)` and `detach(model)`.

In: an unmodified transformers model and a `PagedKVCache`.
Out: the same model, whose attention layers call `piecewise::attn_inplace` on packed tokens.
Read first: `adapter.py`; then `step/decoder.py` (what a decoder must look like) and `sequence_heads.py`.
A wing: nothing else in the package needs this room, and transformers is imported only when it is used.
"""

from boundary_ops.huggingface.adapter import attach, cache_of, detach

__all__ = ["attach", "cache_of", "detach"]
