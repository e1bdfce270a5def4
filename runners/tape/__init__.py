"""Records ops and replays them on the same storages: the engine for machines without a GPU.

In: a function without arguments, and a pool.
Out: a `CapturedGraph` that refuses what a CUDA graph cannot hold, and poisons its memory at each replay.
Read first: `tape.py`, then `recorder.py`. A wing: the story of a call does not need this room.
"""
