"""Judges elementwise ops: operands are broadcast, and dims that meet must have one layout."""

from __future__ import annotations

from piecewise.analysis.rows.layout import Mixes, broadcast, prefixes
from piecewise.analysis.rows.table import Claim, OpOnRows, Rows, is_inexact, rule

# torch tags these `pointwise`; a name with a dot is one overload, whose others it does not tag.
TAGGED = """
    __lshift__ __rshift__ _conj_physical abs acos acosh add addcdiv addcmul angle asin asinh atan atan2
    atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu
    clamp clamp_max clamp_min clone copysign cos cosh deg2rad digamma div elu eq erf erfc erfinv exp exp2
    expm1 floor fmax fmin fmod frac ge gelu gt hardsigmoid hardtanh heaviside hypot isinf isnan isneginf
    isposinf ldexp le leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit lt masked_fill.Scalar maximum minimum mish mul nan_to_num ne
    neg nextafter pow rad2deg reciprocal relu remainder round rsqrt rsub.Scalar sgn sigmoid sign signbit
    silu sin sinc sinh softplus sqrt sub tan tanh threshold trunc where xlogy
"""
# Pointwise ops that torch does not tag.
UNTAGGED = """
    _to_copy complex copy fill floor_divide hardswish log_sigmoid_forward masked_fill.Tensor polar
    rsub.Tensor zero
"""


@rule(TAGGED)
@rule(UNTAGGED)
def element_by_element(call: OpOnRows) -> Claim:
    layouts = [rows.layout for rows in call.tensors() if rows.layout is not None]

    def is_gone(sizes: tuple) -> bool:
        """Whether a result kept only for a gradient is empty."""
        return len(call.results) > 1 and [size.constant for size in sizes] == [0]

    return Claim([prefixes(x) if is_gone(x) else broadcast(layouts, x) for x, _ in call.results])


@rule("div floor_divide fmod remainder")
def divided(call: OpOnRows) -> Claim:
    """Judges division: on a CPU an integer by 0, or the least integer by −1, raises or ends the process."""
    by, (_, dtype) = call["other"], call.results[0]
    low = by.bounds.low if isinstance(by, Rows) else call.size(by) if isinstance(by, int) else None
    is_positive = low is not None and bool((low.values > 0).all())
    if not (is_inexact(dtype) or is_positive or all(rows.is_real for rows in call.tensors())):
        raise Mixes("padded rows may divide by zero")
    return element_by_element(call)
