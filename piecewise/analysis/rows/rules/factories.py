"""Ops that make tensors of sizes: prefixes, whatever is to be in them."""

from __future__ import annotations

from piecewise.analysis.rows.layout import Layout, prefixes
from piecewise.analysis.rows.table import Call, Outcome, rule


@rule("zeros ones full new_zeros new_ones new_full", sizes="size")
def constant(call: Call) -> Layout:
    return prefixes(call.results[0][0])


@rule("zeros_like ones_like full_like")
def constant_like(call: Call) -> Layout:
    return call.layout()


@rule("empty empty_strided new_empty", sizes="size stride")
def empty(call: Call) -> Outcome:
    return Outcome([prefixes(call.results[0][0])], keeps_real=False)


@rule("empty_like")
def empty_like(call: Call) -> Outcome:
    return Outcome([call.layout()], keeps_real=False)


@rule("arange eye", sizes="end n m")
def counted(call: Call) -> Outcome:
    return Outcome([prefixes(call.results[0][0])], keeps_real=False)
