"""Rewrites of a graph segment's aten graph, one per file, each pure: a graph in, matches counted.

Only the names are here, so that settings can be checked without loading what rewrites graphs.
"""

from __future__ import annotations

# In the order in which they run; `pipeline.py` says why.
PASS_NAMES = ("clean_up", "pack_linears")

# What "auto" stands for with each lowering.
AUTO = {"eager": PASS_NAMES, "inductor": PASS_NAMES}


def passes_for(fusions: tuple[str, ...], lowering: str) -> tuple[str, ...]:
    """The passes that the setting `fusions` asks for."""
    return AUTO[lowering] if fusions == ("auto",) else fusions
