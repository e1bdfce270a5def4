"""Warms up and captures one CUDA graph per segment and bucket, keeps them, and serves calls.

In: a model, settings and an example call.
Out: captured calls: a step plan for each bucket.
Read first: `call_router.py` for a call, `analyse.py` for a capture.
"""
