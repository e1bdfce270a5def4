"""A norm whose result is only ever rounded to float8 becomes one op that writes float8.

    before   normed = rms_norm(x, ...) · (normed.float() / scale).clamp(-448, 448).to(float8_e4m3fn)
    after    rms_norm_quant(x, ..., scale)

The scale is a tensor of one value, or made for each row as ``amax(abs(normed)) / 448``, with a least value
before or after the division, or in the norm's own dtype (torchao); then it is a result of the op, too. Behind
`add_rms_norm` the sum is the third.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import torch
from torch import fx

from piecewise.passes import ops
from piecewise.passes.fakes import aten, value_of
from piecewise.passes.reference import MAX_FLOAT8
from piecewise.torch_api.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, Match, PatternSet

_OPTIONS = ("weight", "eps", "offset", "round_first")


@functools.cache
def patterns() -> PatternSet:
    """Norms that become float8, with a given scale and with one per row."""
    found = PatternSet("add_rms_norm_quant")
    for with_sum, widened, kind in itertools.product(
        (True, False), (True, False), (None, "peak", "step", "none", "rounded")
    ):
        if kind == "rounded" and not widened:
            continue  # there is nothing to round
        pattern = _quantised(with_sum, widened, kind)
        found.add(
            pattern, functools.partial(_is_quantised, kind=kind), functools.partial(_replace, with_sum, kind)
        )
    return found


def trigger(graph: fx.Graph) -> str | None:
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if node.kwargs.get("dtype") is torch.float8_e4m3fn:
            return "casts to float8"
    return None


def _quantised(with_sum: bool, widened: bool, kind: str | None) -> Any:
    """`kind` is None for a given scale, else where the least value is applied."""
    users = 1 if kind is None or (widened and kind != "rounded") else 2
    options = map(KeywordArg, _OPTIONS)
    if with_sum:
        both = CallFunction(
            ops.add_rms_norm, KeywordArg("x"), KeywordArg("residual"), *options, _users=MULTIPLE
        )
        wide: Any = CallFunction(operator.getitem, both, 0, _users=users)
    else:
        wide = CallFunction(ops.rms_norm, KeywordArg("x"), *options, _users=users)
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
    peak: Any = CallFunction(
        aten.amax.default, CallFunction(aten.abs.default, wide), KeywordArg("dims"), True
    )
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
        is_one = isinstance(scale, torch.Tensor) and scale.dtype is torch.float32 and scale.numel() == 1
        return is_one and scale.dim() <= x.dim() and match.kwargs["scale"] < _norm_of(match)
    over_last = list(match.kwargs["dims"]) in ([-1], [x.dim() - 1])
    return over_last and isinstance(match.kwargs.get("least", 0.0), (int, float))


def _norm_of(match: Match) -> fx.Node:
    return next(node for node in match.nodes if node.target in (ops.rms_norm, ops.add_rms_norm))


def _replace(with_sum: bool, kind: str | None, match: Match) -> None:
    last, norm, found = match.output_node(), _norm_of(match), match.kwargs
    least = float(found.get("least", 0.0))
    scale = found.get("scale")
    inputs = ("x", "residual", *_OPTIONS) if with_sum else ("x", *_OPTIONS)
    arguments = (*(found[name] for name in inputs), scale)
    arguments += (least if kind == "peak" else 0.0, least if kind == "step" else 0.0, kind == "rounded")
    graph = last.graph
    # Where the norm was: its sum and the scales may be read before the float8 values are.
    with graph.inserting_before(norm):
        made = graph.call_function(ops.add_rms_norm_quant if with_sum else ops.rms_norm_quant, arguments)
        items = [
            graph.call_function(operator.getitem, (made, index)) for index in range(3 if with_sum else 2)
        ]
    if kind is not None:
        clamped: Any = last.args[0]
        step: Any = clamped.args[0].args[1]
        step.replace_all_uses_with(items[1], delete_user_cb=lambda user: user is not clamped.args[0])
    if with_sum:
        for user in [user for user in norm.users if user.args[1] == 1]:
            user.replace_all_uses_with(items[2])
    last.replace_all_uses_with(items[0])
    graph.erase_node(last)
