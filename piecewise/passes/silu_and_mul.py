"""`silu(gate) * up` becomes one op, also where both are slices of one packed linear's result."""

from __future__ import annotations

import functools

import torch
from torch import fx

from piecewise.passes import ops
from piecewise.passes.fakes import aten, geometry, value_of
from piecewise.passes.reference import DTYPES
from piecewise.torch_api.pattern_matcher import CallFunction, KeywordArg, Match, PatternSet, replace_output


@functools.cache
def silu_and_mul_patterns() -> PatternSet:
    patterns = PatternSet("silu_and_mul")
    active, up = CallFunction(aten.silu.default, KeywordArg("gate")), KeywordArg("up")
    for pair in ((active, up), (up, active)):
        patterns.add(CallFunction(aten.mul.Tensor, *pair), _is_gated, _replace)
    return patterns


def trigger(graph: fx.Graph) -> str | None:
    return "silu ops" if graph.find_nodes(op="call_function", target=aten.silu.default) else None


def _is_gated(match: Match) -> bool:
    gate, up = value_of(match.kwargs["gate"]), value_of(match.kwargs["up"])
    if not isinstance(gate, torch.Tensor) or not isinstance(up, torch.Tensor) or gate.dim() == 0:
        return False
    return gate.dtype in DTYPES and geometry(gate)[:3] == geometry(up)[:3]


def _replace(match: Match) -> None:
    replace_output(match, ops.silu_and_mul, (match.kwargs["gate"], match.kwargs["up"]))
