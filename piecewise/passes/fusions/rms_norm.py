"""Fuses an RMS norm into one op.

    before   t = x.float() · s = pow(t, 2) · m = mean(s) · r = rsqrt(m + eps) · (t * r).to(x) * weight
    after    rms_norm(x, weight, eps)

Formulations differ in where they round and in the factor; each known one is a pattern. All compute the
statistics in float32.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from piecewise.passes.fakes import aten, value_of
from piecewise.passes.fusion_pass import DTYPES, MAX_WIDTH, fused_op, fusion_pass
from piecewise.torch_api import pattern_matcher
from piecewise.torch_api.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, Match, PatternSet

# Ops that a norm contains, or that are a whole norm.
NORMS = (aten.rsqrt.default, aten._fused_rms_norm.default)


def reference(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    """Norms x [..., width] over its last dim, in x's dtype, with statistics in float32.

    Args:
        offset: the factor is `weight + offset` in float32 (Gemma: 1).
        round_first: round the normed value to x's dtype before the product with the weight (transformers'
            Llama and Qwen3); else round once, at the end (`torch.nn.RMSNorm`).
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        normed = normed.to(x.dtype).float()
    factor = weight.float() if offset == 0.0 else weight.float() + offset
    return (normed * factor).to(x.dtype)


op = fused_op(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor",
    reference=reference, kernel="piecewise.passes.kernels.norm:rms_norm",
    fake=lambda x, *_: torch.empty_like(x),
)  # fmt: skip


@fusion_pass("rms_norm", expects="ops of a norm (rsqrt)", ops=NORMS)
def rms_norm(patterns: PatternSet) -> None:
    for pattern, offset, round_first in _formulations():
        patterns.add(pattern, _is_norm, functools.partial(_replace, offset, round_first))


def _formulations() -> Iterator[tuple[Any, float, bool]]:
    """Yields (pattern, offset, round_first), the longest first for each kind of last op."""
    x, dims, weight, eps = map(KeywordArg, ("x", "dims", "weight", "eps"))
    mul, cast = aten.mul.Tensor, aten._to_copy.default
    wide_weight = CallFunction(cast, weight, dtype=torch.float32, _users=MULTIPLE)
    raised = [CallFunction(aten.add.Tensor, each, 1.0, _users=MULTIPLE) for each in (wide_weight, weight)]
    factors = [(each, 1.0) for each in raised] + [(wide_weight, 0.0), (weight, 0.0)]
    for widened, is_power in itertools.product((True, False), (True, False)):
        wide: Any = CallFunction(cast, x, dtype=torch.float32, _users=MULTIPLE) if widened else x
        square = CallFunction(aten.pow.Tensor_Scalar, wide, 2) if is_power else CallFunction(mul, wide, wide)
        mean = CallFunction(aten.mean.dim, square, dims, True)
        total = CallFunction([aten.add.Tensor, aten.add.Scalar], mean, eps)
        root = CallFunction(aten.rsqrt.default, total)
        cores = [CallFunction(mul, wide, root), CallFunction(mul, root, wide)]
        for (factor, offset), core in itertools.product(factors, cores):
            for pair in ((core, factor), (factor, core)):
                product = CallFunction(mul, *pair)
                if widened:
                    product = CallFunction(cast, product, dtype=KeywordArg("dtype"))
                yield product, offset, False
        for core in cores if widened else ():
            rounded = CallFunction(cast, core, dtype=KeywordArg("dtype"))
            for pair in ((rounded, weight), (weight, rounded)):
                yield CallFunction(mul, *pair), 0.0, True
    whole = CallFunction(aten._fused_rms_norm.default, x, dims, weight, eps)
    yield CallFunction(operator.getitem, whole, 0), 0.0, False


def _is_norm(match: Match) -> bool:
    x, weight, result = map(value_of, (match.kwargs["x"], match.kwargs["weight"], match.output_node()))
    dims, eps = match.kwargs["dims"], match.kwargs["eps"]
    if not all(isinstance(each, Tensor) for each in (x, weight)) or not isinstance(eps, float):
        return False
    width = x.shape[-1]
    if isinstance(width, torch.SymInt) or not 1 < width <= MAX_WIDTH or x.dtype not in DTYPES:
        return False
    # `_fused_rms_norm` takes the sizes of the normed dims, `mean` takes dims.
    is_whole = any(node.target is aten._fused_rms_norm.default for node in match.nodes)
    over_last = list(dims or ()) in ([[width]] if is_whole else [[-1], [x.dim() - 1]])
    is_dense = weight.dtype in DTYPES and tuple(weight.shape) == (width,) and weight.stride(0) == 1
    return over_last and result.dtype is x.dtype and is_dense and _computes_in_float32(match)


def _computes_in_float32(match: Match) -> bool:
    weight = match.kwargs["weight"]
    for node in match.nodes:
        # `1 + weight` would round in a narrow dtype.
        is_factor = node.target is aten.add.Tensor and node.args[0] is weight
        is_statistic = node.target in (aten.rsqrt.default, aten.pow.Tensor_Scalar, aten.mean.dim)
        if (is_factor or is_statistic) and value_of(node).dtype is not torch.float32:
            return False
    return True


def _replace(offset: float, round_first: bool, match: Match) -> None:
    given = (match.kwargs[name] for name in ("x", "weight", "eps"))
    pattern_matcher.replace_output(match, op, (*given, offset, round_first))
