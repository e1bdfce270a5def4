"""Serves the attention ops on CUDA: a Triton program, how it is launched, and when it is compiled.

In: calls of `attn_inplace` and `attn_captured` whose metadata are at hand.
Out: the same effects as torch operators', or why the program cannot serve a call.
Read first: `prefill.py`; then `plans.py`, `tiles.py` (which part of the step a program owns), `programs.py`.
A wing. Only `programs` and `launcher` import triton, and nothing imports those before the first CUDA call.
"""
