"""Rewrites of a graph segment's aten graph, one per file, each pure: a graph in, matches counted.

Only the names are here, so that settings can be checked without loading what rewrites graphs.
"""

from __future__ import annotations

# In the order in which they run; `pipeline.py` says why.
PASS_NAMES = (
    "clean_up",
    "pack_linears",
    "rms_norm",
    "add_rms_norm",
    "add_rms_norm_quant",
    "silu_and_mul",
    "rotary",
)

# What "auto" stands for with each lowering. Inductor joins the ops of norms and gated units with what is
# around them, which fused ops would hide from it: measured pass by pass, those are no gain. It rotates q and
# k by a kernel each, and one for both is. The others can be named.
AUTO = {"eager": PASS_NAMES, "inductor": ("clean_up", "pack_linears", "rotary")}


def passes_for(fusions: tuple[str, ...], lowering: str) -> tuple[str, ...]:
    """The passes that the setting `fusions` asks for."""
    return AUTO[lowering] if fusions == ("auto",) else fusions
