"""The CUDA half of `piecewise::attn_inplace`: Triton programs, how they are launched, and when.

`configs` block sizes per shape · `tiles` which part of the step each program owns · `programs` the Triton
code · `launcher` the short way to a compiled program · `prefill` the op's implementation, and that of the
form for capture, whose metadata is on the device · `warm_up` compiles ahead of time.

Only `programs` and `launcher` import triton, and nothing imports those before the first CUDA call or warm-up.
"""
