"""Fuses an RMS norm, as `rms_norm` leaves it, with the sum before it into one op, which returns both.

before   h = a + b · rms_norm(h, weight, eps) · h is read again
after    normed, h = add_rms_norm(a, b, weight, eps)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from piecewise.passes.fakes import aten, geometry, value_of
from piecewise.passes.fusion_pass import fused_op, fusion_pass
from piecewise.passes.fusions import rms_norm
from piecewise.torch_api.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, Match, PatternSet


def reference(x: torch.Tensor, residual: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm of x + residual, x + residual); the sum is rounded to x's dtype before it is normed."""
    total = x + residual
    return rms_norm.reference(total, *options), total


op = fused_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset, bool round_first)"
    " -> (Tensor, Tensor)",
    reference=reference, kernel="piecewise.passes.kernels.norm:add_rms_norm",
    fake=lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)  # fmt: skip


def _is_read_again(added: fx.Node) -> bool:
    return len(added.users) > 1 and any(node.target in rms_norm.NORMS for node in added.graph.nodes)


@fusion_pass(
    "add_rms_norm", needs=("rms_norm",), expects="sums that are read again, and norms",
    ops=(aten.add.Tensor,), where=_is_read_again,
)  # fmt: skip
def add_rms_norm(patterns: PatternSet) -> None:
    total = CallFunction(aten.add.Tensor, KeywordArg("x"), KeywordArg("residual"), _users=MULTIPLE)
    names = ("weight", "eps", "offset", "round_first")
    patterns.add(CallFunction(rms_norm.op, total, *map(KeywordArg, names)), _is_norm_of_sum, _join)


def _is_norm_of_sum(match: Match) -> bool:
    x, residual = value_of(match.kwargs["x"]), value_of(match.kwargs["residual"])
    total = value_of(match.output_node().args[0])
    if not isinstance(x, torch.Tensor) or not isinstance(residual, torch.Tensor):
        return False
    same = geometry(x)[0:3] == geometry(residual)[0:3] == geometry(total)[0:3]
    weight, added = match.kwargs["weight"], match.output_node().args[0]
    # The fused op takes the sum's place in the graph, so all its inputs must come before.
    return same and weight < added


def _join(match: Match) -> None:
    normed, found = match.output_node(), match.kwargs
    added: Any = normed.args[0]
    names = ("x", "residual", "weight", "eps", "offset", "round_first")
    with added.graph.inserting_before(added):
        both = added.graph.call_function(op, tuple(found[name] for name in names))
        first, second = (added.graph.call_function(operator.getitem, (both, each)) for each in (0, 1))
    normed.replace_all_uses_with(first)
    added.graph.erase_node(normed)
    added.replace_all_uses_with(second)
    added.graph.erase_node(added)
