"""Holds the fusion passes: each module here is the pass of its name, and importing this loads them all.

A pass is one file: its op with a reference, its patterns, and what takes their place; `silu_and_mul.py` is
the shortest. Its kernel is one more, in `piecewise/passes/kernels`.
"""

import importlib
import pkgutil

for _each in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_each.name}")
