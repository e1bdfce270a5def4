"""Ops that multiply and sum: what they sum over is of fixed size, in all operands if in one.

A mask of zeros excuses nothing, as 0·NaN is NaN.
"""

from __future__ import annotations

from piecewise.analysis.rows.layout import Dim, Layout, Mixes, broadcast, prefix
from piecewise.analysis.rows.table import Claim, OpOnRows, Rows, check_static, rule


def _batch(call: OpOnRows, *layouts: Layout) -> Layout:
    """The dims in front of the last two, which are broadcast."""
    return broadcast([layout[:-2] for layout in layouts], call.sizes[: len(call.sizes) - 2])


def _product(call: OpOnRows, left: Layout, right: Layout, addend: str | None = None) -> Layout:
    """[batch, rows, inner] times [batch, inner, columns], and what is added to it."""
    check_static(left, [-1], "it sums")
    made = (*_batch(call, left, right), left[-2], right[-1])
    if addend is None or call[addend] is None:
        return made
    return broadcast([made, call.layout(addend)], call.sizes)


@rule("mm bmm _int_mm")
def product(call: OpOnRows) -> Layout:
    return _product(call, call.layout(), call.layout("mat2"))


@rule("addmm baddbmm")
def product_and_sum(call: OpOnRows) -> Layout:
    left, right = ("mat1", "mat2") if call.name == "addmm" else ("batch1", "batch2")
    return _product(call, call.layout(left), call.layout(right), "self")


@rule("mv")
def product_with_vector(call: OpOnRows) -> Layout:
    check_static(call.layout(), [-1], "it sums")
    return call.layout()[:1]


@rule("_cdist_forward")
def distances(call: OpOnRows) -> Layout:
    left, right = call.layout("x1"), call.layout("x2")
    check_static(left, [-1], "it sums")
    return (*_batch(call, left, right), left[-2], right[-2])


@rule("linalg_solve_triangular")
def solved(call: OpOnRows) -> Layout:
    left, right = call.layout(), call.layout("B")
    check_static(right, [-1, -2], "it solves")
    return (*_batch(call, left, right), *right[-2:])


@rule("_scaled_mm")
def scaled_product(call: OpOnRows) -> Layout:
    made = _product(call, call.layout(), call.layout("mat2"), "bias")
    for name, kept in (("scale_a", 0), ("scale_b", 1)):
        scale = enumerate(call.layout(name))
        if any(dim.factors and (at != kept or dim != made[kept]) for at, dim in scale):
            raise Mixes(f"'{name}' is of other rows")
    return made


@rule("_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu")
def packed_product(call: OpOnRows) -> Layout:
    _check_weights(call, "self")
    return (call.layout()[0], Dim(call.sizes[-1]))


def _check_weights(call: OpOnRows, given: str) -> None:
    """That no operand but the one that is given carries tokens."""
    others = [value for name, value in call.args.items() if isinstance(value, Rows) and name != given]
    if not all(rows.is_settled for rows in others):
        raise Mixes("weights carry tokens")


@rule("_grouped_mm")
def grouped_product(call: OpOnRows) -> Claim:
    """Rows in groups, which offsets end: those behind the last one are never written."""
    layout, weight = call.layout(), call.layout("mat2")
    if len(layout) != 2 or len(weight) != 3 or call["offs"] is None or not layout[0].is_prefix:
        raise Mixes("groups that are no groups of rows")
    _check_weights(call, "self")
    return Claim([(layout[0], weight[2])], keeps_real=False)


@rule(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
def attention(call: OpOnRows) -> Claim:
    """Within rows: keys and heads are of fixed size. Over tokens, causal or not, kernels may multiply what is
    masked by 0."""
    query, key, value = map(call.layout, ("query", "key", "value"))
    for layout in (key, value):
        check_static(layout, [-2, -1], "it attends")
    if call["is_causal"]:
        check_static(query, [-2], "it attends")
    if call["dropout_p"]:
        raise Mixes("it draws random numbers")
    batch = _batch(call, query, key, value)
    for name in ("attn_mask", "attn_bias"):
        if call[name] is not None:
            made = (*batch, query[-2], Dim(key[-2].size))
            broadcast([made, call.layout(name)], [dim.size for dim in made])
    # The others are for gradients.
    return Claim([(*batch, query[-2], value[-1]), *[None] * (len(call.results) - 1)])


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
        # One number stands for all dims.
        stride, padding = (call[name][at % len(call[name])] for name in ("stride", "padding"))
        if call["transposed"] or stride != 1 or not dim.is_single:
            raise Mixes("it strides over rows")
        # The last results reach into what lies behind the rows: as many as are padded there.
        made.append(prefix(size)._replace(tail=dim.tail + padding))
    return Claim([tuple(made)], keeps_real=all(dim.is_static for dim in layout[2:]))
