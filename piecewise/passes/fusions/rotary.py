"""Fuses the rotary embedding of q and k, as transformers writes it, into one op for both.

    before   q * cos + cat(-q[half:], q[:half]) * sin · the same with k
    after    rotate([q, k], cos, sin)

q and k may be slices of a packed linear's result, and normed heads (Qwen3).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from piecewise.passes.fakes import aten, geometry, value_of
from piecewise.passes.fusion_pass import DTYPES, fused_op, fusion_pass
from piecewise.torch_api import pattern_matcher
from piecewise.torch_api.pattern_matcher import CallFunction, KeywordArg, Match, PatternSet, replace_output


def reference(tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Rotates each tensor [..., width] by cos and sin, which expand to it. Both products and their sum are
    rounded, as in transformers' `rotate_half` formulation."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((-right, left), dim=-1)

    return [each * cos + turned(each) * sin for each in tensors]


op = fused_op(
    "rotate(Tensor[] tensors, Tensor cos, Tensor sin) -> Tensor[]", reference=reference,
    kernel="piecewise.passes.kernels.rotary:rotate",
    fake=lambda tensors, cos, sin: [torch.empty_like(each) for each in tensors],
)  # fmt: skip


def _is_turned(cat: fx.Node) -> bool:
    parts: Any = cat.args[0]
    return any(isinstance(part, fx.Node) and part.target is aten.neg.default for part in parts)


def _join_pairs(graph: fx.Graph) -> None:
    pattern_matcher.find_regions(graph)
    alone: dict[Any, fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=op)):
        tensors, cos, sin = node.args
        if len(tensors) > 1:  # type: ignore[arg-type]
            continue
        first = alone.get((cos, sin))
        # All readers of the first rotation must come after the second one.
        readers = [reader for item in first.users for reader in item.users] if first is not None else []
        can_move = first is not None and all(node < reader for reader in readers)
        if first is None or not can_move or not pattern_matcher.same_mutation_regions(first, node):
            alone[cos, sin] = node
            continue
        del alone[cos, sin]
        with graph.inserting_before(node):
            both = graph.call_function(op, ([*first.args[0], *tensors], cos, sin))  # type: ignore[misc]
            for position, single in enumerate((first, node)):
                item = graph.call_function(operator.getitem, (both, position))
                for user in list(single.users):
                    user.replace_all_uses_with(item)
                    graph.erase_node(user)
                graph.erase_node(single)


@fusion_pass(
    "rotary", auto=("eager", "inductor"), expects="halves that are turned (neg, cat)",
    ops=(aten.cat.default,), where=_is_turned, then=_join_pairs,
)  # fmt: skip
def rotary(patterns: PatternSet) -> None:
    right = CallFunction(aten.slice.Tensor, KeywordArg("x"), KeywordArg("dim1"), KeywordArg("begin"),
                         KeywordArg("end"))  # fmt: skip
    left = CallFunction(aten.slice.Tensor, KeywordArg("x"), KeywordArg("dim2"), 0, KeywordArg("middle"))
    turned = CallFunction(aten.cat.default, [CallFunction(aten.neg.default, right), left], KeywordArg("dim3"))
    cos, sin = KeywordArg("cos"), KeywordArg("sin")
    straights = [CallFunction(aten.mul.Tensor, *pair) for pair in _orders(KeywordArg("x"), cos)]
    turneds = [CallFunction(aten.mul.Tensor, *pair) for pair in _orders(turned, sin)]
    for straight, other in itertools.product(straights, turneds):
        for pair in _orders(straight, other):
            patterns.add(CallFunction(aten.add.Tensor, *pair), _is_rotation, _replace)


def _orders(one: Any, other: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (one, other), (other, one)


def _is_rotation(match: Match) -> bool:
    found = match.kwargs
    x, cos, sin = (value_of(found[name]) for name in ("x", "cos", "sin"))
    if not all(isinstance(each, torch.Tensor) for each in (x, cos, sin)):
        return False
    result = value_of(match.output_node())
    width, last = x.shape[-1], x.dim() - 1
    if isinstance(width, torch.SymInt) or width % 2 or x.dtype not in DTYPES:
        return False
    dims = all(found[name] in (last, -1) for name in ("dim1", "dim2", "dim3"))
    halves = found["begin"] == found["middle"] == width // 2 and found["end"] >= width
    fits = all(t.dtype is x.dtype and t.shape[-1] == width and t.dim() <= x.dim() for t in (cos, sin))
    return dims and halves and fits and geometry(result)[2] == geometry(x)[2]


def _replace(match: Match) -> None:
    found = match.kwargs
    replace_output(match, op, ([found["x"]], found["cos"], found["sin"]), item=0)
