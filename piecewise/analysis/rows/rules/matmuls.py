"""Ops that multiply and sum: what they sum over is of fixed size, in all operands if in one.

A mask of zeros excuses nothing, as 0·NaN is NaN.
"""

from __future__ import annotations

from piecewise.analysis.rows.layout import Dim, Layout, Mixes, broadcast, prefix
from piecewise.analysis.rows.table import Call, Outcome, Rows, check_static, rule


def _product(call: Call, left: Layout, right: Layout) -> Layout:
    """[batch, rows, inner] times [batch, inner, columns]."""
    check_static(left, [-1], "it sums")
    sizes = call.results[0][0]
    batch = broadcast([left[:-2], right[:-2]], sizes[: len(sizes) - 2])
    return (*batch, left[-2], right[-1])


_FACTORS = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}


@rule("mm bmm _int_mm addmm baddbmm")
def product(call: Call) -> Layout:
    left, right = _FACTORS.get(call.name, ("self", "mat2"))
    made = _product(call, call.layout(left), call.layout(right))
    return broadcast([made, call.layout()], call.results[0][0]) if left != "self" else made


@rule("mv")
def product_with_vector(call: Call) -> Layout:
    check_static(call.layout(), [-1], "it sums")
    return call.layout()[:1]


@rule("_cdist_forward")
def distances(call: Call) -> Layout:
    left, right = call.layout("x1"), call.layout("x2")
    check_static(left, [-1], "it sums")
    return (*broadcast([left[:-2], right[:-2]], call.results[0][0][:-2]), left[-2], right[-2])


@rule("linalg_solve_triangular")
def solved(call: Call) -> Layout:
    left, right = call.layout(), call.layout("B")
    check_static(right, [-1, -2], "it solves")
    return (*broadcast([left[:-2], right[:-2]], call.results[0][0][:-2]), *right[-2:])


@rule("_scaled_mm")
def scaled_product(call: Call) -> Layout:
    left, right = call.layout(), call.layout("mat2")
    made = _product(call, left, right)
    for name, kept in (("scale_a", 0), ("scale_b", 1)):
        scale: Rows = call.tensor(name)
        assert scale.layout is not None
        if any(dim.factors and (at != kept or dim != made[kept]) for at, dim in enumerate(scale.layout)):
            raise Mixes(f"'{name}' is of other rows")
    if call["bias"] is not None:
        return broadcast([made, call.layout("bias")], call.results[0][0])
    return made


@rule("_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu")
def packed_product(call: Call) -> Layout:
    _check_weights(call)
    return (call.layout()[0], Dim(call.results[0][0][-1]))


def _check_weights(call: Call) -> None:
    if not all(
        rows.is_settled for name, rows in call.args.items() if isinstance(rows, Rows) and name != "self"
    ):
        raise Mixes("weights carry tokens")


@rule("_grouped_mm")
def grouped_product(call: Call) -> Outcome:
    """Rows in groups, which offsets end: those behind the last one are never written."""
    layout, weight = call.layout(), call.layout("mat2")
    if len(layout) != 2 or len(weight) != 3 or call["offs"] is None or not layout[0].is_prefix:
        raise Mixes("groups that are no groups of rows")
    _check_weights(call)
    return Outcome([(layout[0], weight[2])], keeps_real=False)


@rule(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
def attention(call: Call) -> Outcome:
    """Within rows: keys and heads are of fixed size. Over tokens, causal or not, kernels may multiply what is
    masked by 0."""
    query, key, value = call.layout("query"), call.layout("key"), call.layout("value")
    for layout in (key, value):
        check_static(layout, [-2, -1], "it attends")
    if call["is_causal"]:
        check_static(query, [-2], "it attends")
    if call["dropout_p"]:
        raise Mixes("it draws random numbers")
    sizes = call.results[0][0]
    batch = broadcast([query[:-2], key[:-2], value[:-2]], sizes[:-2])
    for name in ("attn_mask", "attn_bias"):
        if call[name] is not None:
            made = (*batch, query[-2], Dim(key[-2].size))
            broadcast([made, call.layout(name)], [dim.size for dim in made])
    # The others are for gradients.
    return Outcome([(*batch, query[-2], value[-1]), *[None] * (len(call.results) - 1)])


@rule("convolution")
def convolution(call: Call) -> Outcome:
    layout, sizes = call.layout("input"), call.results[0][0]
    if not call.tensor("weight").is_settled or (call["bias"] is not None and not call["bias"].is_settled):
        raise Mixes("its kernel carries tokens")
    made = [layout[0], Dim(sizes[1])]
    is_kept = True
    for at, size in enumerate(sizes[2:]):
        dim = layout[at + 2]
        if dim.is_static:
            made.append(Dim(size))
            continue
        stride, padding = _of(call["stride"], at), _of(call["padding"], at)
        if call["transposed"] or stride != 1 or not dim.is_single:
            raise Mixes("it strides over rows")
        # The last results reach into what lies behind the rows: as many as are padded there.
        made.append(prefix(size)._replace(tail=dim.tail + padding))
        is_kept = False
    return Outcome([tuple(made)], keeps_real=is_kept)


def _of(values: list[int] | tuple[int, ...], at: int) -> int:
    return values[at] if len(values) > 1 else values[0]
