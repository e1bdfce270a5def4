"""Is the engine of real CUDA graphs.

In: a callable and its static inputs.
Out: a captured graph in one memory pool.
Read first: `graph.py`, then `pool.py`.
"""
