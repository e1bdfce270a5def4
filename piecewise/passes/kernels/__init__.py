"""Holds the Triton programs of the fused ops, a file for each, loaded where one first runs on CUDA."""
