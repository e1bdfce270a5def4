"""Fuses an RMS norm whose only reader rounds it to float8 into one op that writes float8.

    before   normed = rms_norm(x, ...) · (normed.float() / scale).clamp(-448, 448).to(float8_e4m3fn)
    after    rms_norm_quant(x, ..., scale)

The scale is a tensor of one value, or ``amax(abs(normed)) / 448`` per row, with a least value before or after
the division, or in the norm's own dtype (torchao). Scales per row are a second result of the op, and behind
`add_rms_norm` the sum is the third.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import torch
from torch import Tensor, fx

from piecewise.passes.fakes import aten, value_of
from piecewise.passes.fusion_pass import MAX_FLOAT8, fused_op, fusion_pass
from piecewise.passes.fusions import add_rms_norm, rms_norm
from piecewise.torch_api.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, Match, PatternSet

_OPTIONS = ("weight", "eps", "offset", "round_first")


def reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    round_first: bool,
    scale: Tensor | None,
    least_peak: float,
    least_step: float,
    round_step: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns (the norm in float8, the scale per row [..., 1] in float32, empty where `scale` is given).

    The normed value is rounded to x's dtype, divided by the scale in float32, clamped to float8's range and
    rounded. With `round_step` the scales per row are rounded to x's dtype (torchao's float8 rows).
    """
    wide = rms_norm.reference(x, weight, eps, offset, round_first).float()
    step, scales = scale, x.new_empty(0, dtype=torch.float32)
    if step is None:
        peak = wide.abs().amax(-1, keepdim=True).clamp(min=least_peak)
        step = (peak / MAX_FLOAT8).clamp(min=least_step)
        step = scales = step.to(x.dtype).float() if round_step else step
    return (wide / step).clamp(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn), scales


def sum_reference(x: Tensor, residual: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of `reference` for x + residual, and x + residual."""
    total = x + residual
    return (*reference(total, *options), total)


def _fake(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    sizes = (0,) if scale is not None else (*x.shape[:-1], 1)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(sizes, dtype=torch.float32)


_ARGUMENTS = (
    "Tensor weight, float eps, float offset, bool round_first, "
    "Tensor? scale, float least_peak, float least_step, bool round_step=False"
)
op = fused_op(
    f"rms_norm_quant(Tensor x, {_ARGUMENTS}) -> (Tensor, Tensor)", reference=reference,
    kernel="piecewise.passes.kernels.norm:rms_norm_quant",
    fake=lambda x, weight, eps, offset, first, scale, *_: _fake(x, scale),
)  # fmt: skip
sum_op = fused_op(
    f"add_rms_norm_quant(Tensor x, Tensor residual, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    reference=sum_reference, kernel="piecewise.passes.kernels.norm:add_rms_norm_quant",
    fake=lambda x, residual, weight, eps, offset, first, scale, *_: (*_fake(x, scale), torch.empty_like(x)),
)  # fmt: skip


@fusion_pass(
    "add_rms_norm_quant", needs=("add_rms_norm",), expects="casts to float8", ops=(aten._to_copy.default,),
    where=lambda cast: cast.kwargs.get("dtype") is torch.float8_e4m3fn,
)  # fmt: skip
def add_rms_norm_quant(patterns: PatternSet) -> None:
    kinds = (None, "peak", "step", "none", "rounded")
    for with_sum, widened, kind in itertools.product((True, False), (True, False), kinds):
        if kind != "rounded" or widened:  # else there is nothing to round
            is_match = functools.partial(_is_quantised, kind=kind)
            rewrite = functools.partial(_replace, with_sum, kind)
            patterns.add(_quantised(with_sum, widened, kind), is_match, rewrite)


def _quantised(with_sum: bool, widened: bool, kind: str | None) -> Any:
    """Makes a pattern; `kind` is None for a given scale, else says where the least value is applied."""
    users = 1 if kind is None or (widened and kind != "rounded") else 2
    if with_sum:
        inputs = map(KeywordArg, ("x", "residual", *_OPTIONS))
        both = CallFunction(add_rms_norm.op, *inputs, _users=MULTIPLE)
        wide: Any = CallFunction(operator.getitem, both, 0, _users=users)
    else:
        wide = CallFunction(rms_norm.op, *map(KeywordArg, ("x", *_OPTIONS)), _users=users)
    narrow = wide
    if widened:
        count = 1 if kind in (None, "rounded") else 2
        wide = CallFunction(aten._to_copy.default, wide, dtype=torch.float32, _users=count)
    scale = KeywordArg("scale") if kind is None else _step(narrow if kind == "rounded" else wide, kind)
    scaled = CallFunction(aten.div.Tensor, wide, scale)
    clamped = CallFunction(aten.clamp.default, scaled, -MAX_FLOAT8, MAX_FLOAT8)
    return CallFunction(aten._to_copy.default, clamped, dtype=torch.float8_e4m3fn)


def _step(wide: Any, kind: str) -> Any:
    least = [aten.clamp.default, aten.clamp_min.default]
    absolute = CallFunction(aten.abs.default, wide)
    peak: Any = CallFunction(aten.amax.default, absolute, KeywordArg("dims"), True)
    if kind == "peak":
        peak = CallFunction(least, peak, KeywordArg("least"))
    is_last = kind in ("peak", "none")
    step = CallFunction(aten.div.Tensor, peak, MAX_FLOAT8, _users=MULTIPLE if is_last else 1)
    if kind == "rounded":
        return CallFunction(aten._to_copy.default, step, dtype=torch.float32, _users=MULTIPLE)
    return CallFunction(least, step, KeywordArg("least"), _users=MULTIPLE) if kind == "step" else step


def _is_quantised(match: Match, *, kind: str | None) -> bool:
    x = value_of(match.kwargs["x"])
    scaled: Any = match.output_node().args[0]
    scaled = scaled.args[0]
    if value_of(scaled).dtype is not torch.float32:
        return False
    if kind is None:
        scale = value_of(match.kwargs["scale"])
        is_one = isinstance(scale, Tensor) and scale.dtype is torch.float32 and scale.numel() == 1
        return is_one and scale.dim() <= x.dim() and match.kwargs["scale"] < _norm_of(match)
    over_last = list(match.kwargs["dims"]) in ([-1], [x.dim() - 1])
    return over_last and isinstance(match.kwargs.get("least", 0.0), (int, float))


def _norm_of(match: Match) -> fx.Node:
    return next(node for node in match.nodes if node.target in (rms_norm.op, add_rms_norm.op))


def _replace(with_sum: bool, kind: str | None, match: Match) -> None:
    last, norm, found = match.output_node(), _norm_of(match), match.kwargs
    least = float(found.get("least", 0.0))
    scale = found.get("scale")
    inputs = ("x", "residual", *_OPTIONS) if with_sum else ("x", *_OPTIONS)
    arguments = (*(found[name] for name in inputs), scale)
    arguments += (least if kind == "peak" else 0.0, least if kind == "step" else 0.0, kind == "rounded")
    graph = last.graph
    # In the norm's place: readers of its sum and scales may come before the cast to float8.
    with graph.inserting_before(norm):
        made = graph.call_function(sum_op if with_sum else op, arguments)
        items = [graph.call_function(operator.getitem, (made, index)) for index in range(2 + with_sum)]
    if kind is not None:
        clamped: Any = last.args[0]
        step: Any = clamped.args[0].args[1]
        step.replace_all_uses_with(items[1], delete_user_cb=lambda user: user is not clamped.args[0])
    if with_sum:
        for user in [user for user in norm.users if user.args[1] == 1]:
            user.replace_all_uses_with(items[2])
    last.replace_all_uses_with(items[0])
    graph.erase_node(last)
