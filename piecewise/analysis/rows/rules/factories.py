"""Ops that make tensors of sizes: prefixes, whatever is to be in them."""

from __future__ import annotations

from piecewise.analysis.rows.layout import Layout, prefixes
from piecewise.analysis.rows.table import Call, Outcome, rule


@rule("zeros ones full new_zeros new_ones new_full", sizes="size")
@rule("zeros_like ones_like full_like")
def constant(call: Call) -> Layout:
    return call.layout() if call.name.endswith("_like") else prefixes(call.results[0][0])


@rule("empty empty_strided new_empty arange eye", sizes="size stride end n m")
@rule("empty_like")
def unlike(call: Call) -> Outcome:
    """Rows of which none is like another."""
    return Outcome([constant(call)], keeps_real=False)
