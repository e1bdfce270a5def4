"""Holds what a user may set: fields, checks, TOML files, grids of buckets, names of fusion passes.

In: keyword arguments, a TOML file, environment variables.
Out: a `PiecewiseConfig` that has been checked as a whole.
Read first: `config.py`.
"""
