"""Is the engine for machines without a GPU: it records ops and replays them on the same storages.

In: a callable and its static inputs.
Out: a tape that is as strict as a CUDA graph.
Read first: `tape.py`, then `recorder.py`.
"""
