"""Holds what a user may set: fields, kinds of values, sources, grids, limits, names of fusion passes.

In: keyword arguments, a TOML file, environment variables.
Out: a `PiecewiseConfig` that has been checked as a whole.
Read first: `config.py`, whose fields are the one table that every source is read by.
"""
