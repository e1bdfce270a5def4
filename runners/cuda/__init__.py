"""Captures and replays real CUDA graphs: the engine of CUDA devices.

In: a function without arguments whose kernels read and write fixed addresses, and a pool.
Out: a `CapturedGraph` in the pool's memory, or an error that names the op and the user's line.
Read first: `graph.py`, then `pool.py`. `driver.py`, `faults.py` and `side_streams.py` are a wing: failed
captures, their words, and branches on several streams.
"""
