"""Judges ops that compute.

Operands of elementwise ops are broadcast, and dims that meet must have one layout. Dims along which an op
reduces, sums or works must be static, the others keep their layout; a mask of zeros excuses nothing, as 0·NaN
is NaN.
"""

from __future__ import annotations

import re

from piecewise.analysis.rows.layout import Dim, Layout, Mixes, broadcast, met, prefix, prefixes
from piecewise.analysis.rows.table import Claim, OpOnRows, Rows, check_static, is_inexact, rule

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


@rule(
    "sum mean prod amax amin argmax argmin std var nansum logsumexp linalg_vector_norm count_nonzero aminmax "
    "max min max.dim min.dim median median.dim nanmedian nanmedian.dim kthvalue std_mean var_mean histc"
)
def reduced(call: OpOnRows) -> Claim:
    check_static(call.layout(), call.dims(), "it reduces")
    return _without(call)


@rule("all any all.dim any.dim all.dims any.dims")
def tested(call: OpOnRows) -> Claim:
    """Judges `all` and `any`; over tokens the result has no layout, which matters once an op reads it."""
    layout = call.layout()
    return Claim([None]) if any(layout[dim].factors for dim in call.dims()) else _without(call)


def _without(call: OpOnRows) -> Claim:
    layout, dims, one = call.layout(), call.dims(), Dim(call.known.constant(1))
    kept = tuple(one if at in dims else dim for at, dim in enumerate(layout))
    left = tuple(dim for at, dim in enumerate(layout) if at not in dims)
    return Claim([kept if len(sizes) == len(layout) else left for sizes, _ in call.results])


# Each element depends on those before it.
_SCANS = frozenset({"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"})


@rule(
    "_softmax _log_softmax sort topk flip roll glu cummax cummin cumsum cumprod logcumsumexp renorm "
    "_safe_softmax"
)
def along(call: OpOnRows) -> Claim:
    layout, name = call.layout(), call.name.partition(".")[0]
    dims = call.dims("dims") if name in ("flip", "roll") else (call.dim(),)
    if name == "renorm":
        dims = tuple(at for at in range(len(layout)) if at not in dims)
    if len(dims) == 1 and name in _SCANS and layout and layout[dims[0]].factors:
        if not layout[dims[0]].is_single:
            raise Mixes("it goes through rows that do not lie in their order")
        return Claim([layout] * len(call.results), keeps_real=False)
    check_static(layout, dims if layout else (), "it works")
    return Claim([
        tuple(Dim(sizes[at]) if at in dims else dim for at, dim in enumerate(layout))
        for sizes, _ in call.results
    ])  # fmt: skip


@rule("native_layer_norm _fused_rms_norm")
def normed_in_rows(call: OpOnRows) -> Claim:
    layout = call.layout("input")
    stats = layout[: len(layout) - len(call["normalized_shape"])]
    one = Dim(call.known.constant(1))
    return Claim([layout, *(stats + (one,) * (len(sizes) - len(stats)) for sizes, _ in call.results[1:])])


@rule("native_group_norm", sizes="N HxW")
def normed_in_groups(call: OpOnRows) -> Claim:
    layout = call.layout("input")
    check_static(layout, range(1, len(layout)), "it normalises")
    groups = Dim(call.known.constant(call["group"]))
    return Claim([layout, (layout[0], groups), (layout[0], groups)])


@rule("_native_batch_norm_legit_no_training _native_batch_norm_legit.no_stats")
def normed_by_channel(call: OpOnRows) -> Claim:
    """Judges batch norms by running or own statistics: `instance_norm` makes channels of rows."""
    layout: Layout = call.layout("input")
    rest = [at for at in range(len(layout)) if at != 1]
    check_static(layout, rest if call["training"] else [1], "it normalises")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call[name] is not None:
            met([layout[1], *call.layout(name)], layout[1].size)
    return Claim([layout, *[None] * (len(call.results) - 1)])


def _summed(call: OpOnRows, equation: str, *names: str) -> Layout:
    """Returns an `einsum`'s layout: summed letters must be static, dims in front of letters broadcast."""
    *given, made = re.split(",|->", equation)
    dims: dict[str, list[Dim]] = {}
    for letters, name in zip(given, names, strict=True):
        for letter, dim in zip(letters, call.layout(name)[-len(letters) :], strict=True):
            dims.setdefault(letter, []).append(dim)
    if any(dim.factors for letter in dims if letter not in made for dim in dims[letter]):
        raise Mixes("it sums over a dim that carries tokens")
    fronts = [call.layout(name)[: -len(letters)] for letters, name in zip(given, names, strict=True)]
    rank = len(call.sizes) - len(made)
    behind = (met(dims[letter], size) for letter, size in zip(made, call.sizes[rank:], strict=True))
    return (*broadcast(fronts, call.sizes[:rank]), *behind)


rule("mm bmm _int_mm")(lambda call: _summed(call, "ik,kj->ij", "self", "mat2"))
rule("mv")(lambda call: _summed(call, "ik,k->i", "self", "vec"))
rule("_cdist_forward")(lambda call: _summed(call, "ik,jk->ij", "x1", "x2"))


@rule("addmm baddbmm")
def product_and_sum(call: OpOnRows) -> Layout:
    names = ("mat1", "mat2") if call.name == "addmm" else ("batch1", "batch2")
    return broadcast([_summed(call, "ik,kj->ij", *names), call.layout()], call.sizes)


@rule("linalg_solve_triangular")
def solved(call: OpOnRows) -> Layout:
    check_static(call.layout("B"), [-1], "it solves")
    return _summed(call, "ki,ij->kj", "self", "B")


@rule("_scaled_mm")
def scaled_product(call: OpOnRows) -> Layout:
    made = _summed(call, "ik,kj->ij", "self", "mat2")
    for name, kept in (("scale_a", 0), ("scale_b", 1)):
        scale = enumerate(call.layout(name))
        if any(dim.factors and (at != kept or dim != made[kept]) for at, dim in scale):
            raise Mixes(f"'{name}' is of other rows")
    return made if call["bias"] is None else broadcast([made, call.layout("bias")], call.sizes)


@rule("_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu")
def packed_product(call: OpOnRows) -> Layout:
    _check_weights(call)
    return (call.layout()[0], Dim(call.sizes[-1]))


def _check_weights(call: OpOnRows) -> None:
    others = [value for name, value in call.args.items() if isinstance(value, Rows) and name != "self"]
    if not all(rows.is_settled for rows in others):
        raise Mixes("weights carry tokens")


@rule("_grouped_mm")
def grouped_product(call: OpOnRows) -> Claim:
    """Judges a product of groups of rows, which offsets end: rows behind the last group are never written."""
    layout, weight = call.layout(), call.layout("mat2")
    if len(layout) != 2 or len(weight) != 3 or call["offs"] is None or not layout[0].is_prefix:
        raise Mixes("groups that are no groups of rows")
    _check_weights(call)
    return Claim([(layout[0], weight[2])], keeps_real=False)


@rule(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
def attention(call: OpOnRows) -> Claim:
    """Judges attention within rows; over tokens kernels may multiply masked values, maybe NaN, by 0."""
    made = _summed(call, "qd,kd,kv->qv", "query", "key", "value")
    check_static(call.layout("value"), [-1], "it attends")
    if call["is_causal"]:
        check_static(made, [-2], "it attends")
    if call["dropout_p"]:
        raise Mixes("it draws random numbers")
    scores = (*made[:-1], Dim(call["key"].sizes[-2]))
    for name in ("attn_mask", "attn_bias"):
        if call[name] is not None:
            broadcast([scores, call.layout(name)], [dim.size for dim in scores])
    # The other results are for gradients.
    return Claim([made, *[None] * (len(call.results) - 1)])


@rule("convolution")
def convolution(call: OpOnRows) -> Claim:
    layout, sizes = call.layout("input"), call.sizes
    if not all(call[name] is None or call[name].is_settled for name in ("weight", "bias")):
        raise Mixes("its kernel carries tokens")
    made = [layout[0], Dim(sizes[1])]
    for at, (dim, size) in enumerate(zip(layout[2:], sizes[2:], strict=True)):
        if dim.is_static:
            made.append(Dim(size))
            continue
        # A list of one number holds for all dims.
        stride, padding = (call[name][at % len(call[name])] for name in ("stride", "padding"))
        if call["transposed"] or stride != 1 or not dim.is_single:
            raise Mixes("it strides over rows")
        # The last `padding` results reach into what lies behind the rows.
        made.append(prefix(size)._replace(tail=dim.tail + padding))
    return Claim([tuple(made)], keeps_real=all(dim.is_static for dim in layout[2:]))
