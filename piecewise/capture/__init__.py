"""Warms up and captures one graph per segment and bucket, keeps them, and serves calls.

In: a model, settings and an example call.
Out: captured calls: a step plan for each bucket, and the router that finds the one for a call.
Read first: `call_router.py` for a call; for a capture `model_calls.py` (a new kind of call), `analyse.py`
(its plan), `bucket_capture.py` and `build_plan.py` (its buckets); `store.py` for what becomes of them.
"""
