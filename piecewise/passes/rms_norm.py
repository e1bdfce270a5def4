"""RMS norms become one op each; a norm of a sum becomes one op that returns both.

    before   t = x.float() · s = pow(t, 2) · m = mean(s) · r = rsqrt(m + eps) · (t * r).to(x) * weight
    after    rms_norm(x, weight, eps)

    before   h = a + b · rms_norm(h, weight, eps) · h is read again
    after    normed, h = add_rms_norm(a, b, weight, eps)

The formulations differ in where they round and in what they multiply with (see `reference.py`); each that is
known is a pattern below. The statistics must be in float32.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from piecewise.passes import ops
from piecewise.passes.fakes import aten, geometry, value_of
from piecewise.passes.reference import DTYPES, MAX_WIDTH
from piecewise.torch_api.pattern_matcher import (
    MULTIPLE,
    CallFunction,
    KeywordArg,
    Match,
    PatternSet,
    replace_output,
)


@functools.cache
def rms_norm_patterns() -> PatternSet:
    """The formulations of a norm."""
    patterns = PatternSet("rms_norm")
    for pattern, offset, round_first in _formulations():
        patterns.add(pattern, _is_norm, functools.partial(_replace, offset, round_first))
    return patterns


@functools.cache
def add_rms_norm_patterns() -> PatternSet:
    """A norm, as `rms_norm` leaves it, of a sum."""
    total = CallFunction(aten.add.Tensor, KeywordArg("x"), KeywordArg("residual"), _users=MULTIPLE)
    names = ("weight", "eps", "offset", "round_first")
    patterns = PatternSet("add_rms_norm")
    patterns.add(CallFunction(ops.rms_norm, total, *map(KeywordArg, names)), _is_norm_of_sum, _join)
    return patterns


def trigger(graph: fx.Graph) -> str | None:
    found = any(node.target in (aten.rsqrt.default, aten._fused_rms_norm.default) for node in graph.nodes)
    return "ops of a norm (rsqrt)" if found else None


def add_trigger(graph: fx.Graph) -> str | None:
    added = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    read = trigger(graph) is not None and any(len(node.users) > 1 for node in added)
    return "sums that are read again, and norms" if read else None


def _formulations() -> Iterator[tuple[Any, float, bool]]:
    """(pattern, offset, round_first), the longest first for each kind of last op."""
    weight = KeywordArg("weight")
    for widened, squared in itertools.product((True, False), ("pow", "mul")):
        wide: Any = KeywordArg("x")
        if widened:
            wide = CallFunction(aten._to_copy.default, wide, dtype=torch.float32, _users=MULTIPLE)

        def normed(wide: Any = wide, squared: str = squared) -> Any:
            square = (
                CallFunction(aten.pow.Tensor_Scalar, wide, 2)
                if squared == "pow"
                else CallFunction(aten.mul.Tensor, wide, wide)
            )
            mean = CallFunction(aten.mean.dim, square, KeywordArg("dims"), True)
            root = CallFunction(
                aten.rsqrt.default, CallFunction([aten.add.Tensor, aten.add.Scalar], mean, KeywordArg("eps"))
            )
            return [CallFunction(aten.mul.Tensor, wide, root), CallFunction(aten.mul.Tensor, root, wide)]

        wide_weight = CallFunction(aten._to_copy.default, weight, dtype=torch.float32, _users=MULTIPLE)
        raised = [CallFunction(aten.add.Tensor, each, 1.0, _users=MULTIPLE) for each in (wide_weight, weight)]
        for factor, offset in [(each, 1.0) for each in raised] + [(wide_weight, 0.0), (weight, 0.0)]:
            for core, swapped in itertools.product((0, 1), (False, True)):
                pair = (normed()[core], factor)
                product = CallFunction(aten.mul.Tensor, *(reversed(pair) if swapped else pair))
                if widened:
                    product = CallFunction(aten._to_copy.default, product, dtype=KeywordArg("dtype"))
                yield product, offset, False
        if widened:
            for core, swapped in itertools.product((0, 1), (False, True)):
                rounded = CallFunction(aten._to_copy.default, normed()[core], dtype=KeywordArg("dtype"))
                pair = (rounded, weight)
                yield CallFunction(aten.mul.Tensor, *(reversed(pair) if swapped else pair)), 0.0, True
    whole = CallFunction(
        aten._fused_rms_norm.default, KeywordArg("x"), KeywordArg("dims"), weight, KeywordArg("eps")
    )
    yield CallFunction(operator.getitem, whole, 0), 0.0, False


def _is_norm(match: Match) -> bool:
    x, weight, result = (
        value_of(each) for each in (match.kwargs["x"], match.kwargs["weight"], match.output_node())
    )
    dims, eps = match.kwargs["dims"], match.kwargs["eps"]
    if not all(isinstance(each, torch.Tensor) for each in (x, weight)) or not isinstance(eps, float):
        return False
    width = x.shape[-1]
    if isinstance(width, torch.SymInt) or not 1 < width <= MAX_WIDTH or x.dtype not in DTYPES:
        return False
    # The one op takes the sizes that it norms over, a mean takes dims.
    is_whole = any(node.target is aten._fused_rms_norm.default for node in match.nodes)
    over_last = list(dims or ()) in ([[width]] if is_whole else [[-1], [x.dim() - 1]])
    return (
        over_last
        and result.dtype is x.dtype
        and weight.dtype in DTYPES
        and tuple(weight.shape) == (width,)
        and weight.stride(0) == 1
        and _computes_in_float32(match)
    )


def _computes_in_float32(match: Match) -> bool:
    """Whether all that the match computes with is float32 up to the rounding of the normed value."""
    weight = match.kwargs["weight"]
    for node in match.nodes:
        # `1 + weight` in a narrow dtype rounds.
        is_factor = node.target is aten.add.Tensor and node.args[0] is weight
        is_statistic = node.target in (aten.rsqrt.default, aten.pow.Tensor_Scalar, aten.mean.dim)
        if (is_factor or is_statistic) and value_of(node).dtype is not torch.float32:
            return False
    return True


def _replace(offset: float, round_first: bool, match: Match) -> None:
    found = match.kwargs
    replace_output(match, ops.rms_norm, (found["x"], found["weight"], found["eps"], offset, round_first))


def _is_norm_of_sum(match: Match) -> bool:
    x, residual = value_of(match.kwargs["x"]), value_of(match.kwargs["residual"])
    total = value_of(match.output_node().args[0])
    if not isinstance(x, torch.Tensor) or not isinstance(residual, torch.Tensor):
        return False
    same = geometry(x)[0:3] == geometry(residual)[0:3] == geometry(total)[0:3]
    weight, added = match.kwargs["weight"], match.output_node().args[0]
    # Both results are made where the sum was: all inputs must be there already.
    return same and weight < added


def _join(match: Match) -> None:
    normed, found = match.output_node(), match.kwargs
    added: Any = normed.args[0]
    names = ("x", "residual", "weight", "eps", "offset", "round_first")
    with added.graph.inserting_before(added):
        both = added.graph.call_function(ops.add_rms_norm, tuple(found[name] for name in names))
        first, second = (added.graph.call_function(operator.getitem, (both, each)) for each in (0, 1))
    normed.replace_all_uses_with(first)
    added.graph.erase_node(normed)
    added.replace_all_uses_with(second)
    added.graph.erase_node(added)
