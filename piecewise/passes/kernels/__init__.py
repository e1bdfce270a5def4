"""Triton programs of the fused ops: the only place in `piecewise` that imports triton, loaded at first use on
CUDA."""
