"""Fuses `silu(gate) * up` into one op, also where both are slices of one packed linear's result."""

from __future__ import annotations

import torch

from piecewise.passes.fakes import aten, geometry, value_of
from piecewise.passes.fusion_pass import DTYPES, fused_op, fusion_pass
from piecewise.torch_api.pattern_matcher import CallFunction, KeywordArg, Match, PatternSet, replace_output


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up: silu in float32, both results rounded."""
    return torch.nn.functional.silu(gate) * up


op = fused_op(
    "silu_and_mul(Tensor gate, Tensor up) -> Tensor", reference=reference,
    kernel="piecewise.passes.kernels.gated:silu_and_mul", fake=lambda gate, up: torch.empty_like(gate),
)  # fmt: skip


@fusion_pass("silu_and_mul", expects="silu ops", ops=(aten.silu.default,))
def silu_and_mul(patterns: PatternSet) -> None:
    active, up = CallFunction(aten.silu.default, KeywordArg("gate")), KeywordArg("up")
    for pair in ((active, up), (up, active)):
        patterns.add(CallFunction(aten.mul.Tensor, *pair), _is_gated, _replace)


def _is_gated(match: Match) -> bool:
    gate, up = value_of(match.kwargs["gate"]), value_of(match.kwargs["up"])
    if not isinstance(gate, torch.Tensor) or not isinstance(up, torch.Tensor) or gate.dim() == 0:
        return False
    return gate.dtype in DTYPES and geometry(gate)[:3] == geometry(up)[:3]


def _replace(match: Match) -> None:
    replace_output(match, op, (match.kwargs["gate"], match.kwargs["up"]))
