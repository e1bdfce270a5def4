"""Holds a step's metadata and the paged KV cache.

In: requests and their token counts.
Out: block tables, slot mappings and lengths on the device.
Read first: `batch.py`, then `kv_cache.py`.
"""
