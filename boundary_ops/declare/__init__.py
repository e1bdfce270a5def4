"""Says how an op becomes a boundary op: schema, token arguments, rows, captured form.

In: a schema and its implementations, or the name of an op that exists.
Out: a `BoundaryOp` in the registry.
Read first: `registry.py`.
"""
