"""Judges ops that view elements in another shape, make tensors from sizes, or join and repeat tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from piecewise.analysis.rows import layout as layouts
from piecewise.analysis.rows.counts import Size
from piecewise.analysis.rows.layout import Dim, Layout, Mixes, broadcast, met, prefix
from piecewise.analysis.rows.table import Claim, OpOnRows, Rows, check_static, rule

rule("alias detach _conj _neg_view zeros_like ones_like full_like")(lambda call: call.layout())
rule("zeros ones full new_zeros new_ones new_full", sizes="size")(lambda call: layouts.prefixes(call.sizes))
rule("view_as_real")(lambda call: (*call.layout(), Dim(call.sizes[-1])))
rule("view_as_complex")(lambda call: call.layout()[:-1])
rule("view _unsafe_view", sizes="size")(lambda call: layouts.regrouped(call.layout(), call.sizes, call.known))
rule("expand", sizes="size")(lambda call: Claim([broadcast([call.layout()], call.sizes)], keeps_cover=False))
rule("squeeze")(
    lambda call: tuple(
        d for at, d in enumerate(call.layout()) if at not in call.dims() or d.size.constant != 1
    )
)
rule("empty_like")(lambda call: Claim([call.layout()], keeps_real=False))
rule("empty empty_strided new_empty arange eye", sizes="size stride end n m")(
    lambda call: Claim([layouts.prefixes(call.sizes)], keeps_real=False)
)


@rule("view.dtype")
def bits(call: OpOnRows) -> Layout:
    if call.sizes == call["self"].sizes:
        return call.layout()
    check_static(call.layout(), [-1], "it regroups bytes")
    return (*call.layout()[:-1], Dim(call.sizes[-1]))


@rule("permute transpose t")
def permuted(call: OpOnRows) -> Layout:
    layout = call.layout()
    order = list(call.dims("dims") if call.name == "permute" else range(len(layout)))
    if call.name != "permute" and layout:
        left, right = (call.dim("dim0"), call.dim("dim1")) if call.name == "transpose" else (0, -1)
        order[left], order[right] = order[right], order[left]
    return tuple(layout[dim] for dim in order)


@rule("unsqueeze")
def unsqueezed(call: OpOnRows) -> Layout:
    layout = call.layout()
    at = call["dim"] % (len(layout) + 1)
    return (*layout[:at], Dim(call.known.constant(1)), *layout[at:])


@rule("select", sizes="index")
def selected(call: OpOnRows) -> Claim:
    layout, at, index = call.layout(), call.dim(), call["index"]
    dim = layout[at]
    if isinstance(index, Size):
        raise Mixes("it picks a row that the token count names", code="token_count_as_value")
    if dim.factors:
        within = dim.size.values - dim.tail > index
        if index < 0 or not within.all() or not (dim.is_single or index == 0):
            raise Mixes("it picks a row that padding may move")
    return Claim([layout[:at] + layout[at + 1 :]])


@rule("slice", sizes="start end")
def sliced(call: OpOnRows) -> Claim:
    layout, at = call.layout(), call.dim()
    made, is_kept, covers = _part(call, layout[at], call.sizes[at], call["start"] or 0, call["step"])
    return Claim([(*layout[:at], made, *layout[at + 1 :])], keeps_real=is_kept, keeps_cover=covers)


def _part(call: OpOnRows, dim: Dim, size: Size, start: int | Size, step: int) -> tuple[Dim, bool, bool]:
    """Takes every `step`-th of `size` elements from `start` on; returns dim, `keeps_real`, `keeps_cover`."""
    if size is dim.size:
        return dim, True, True
    if not isinstance(start, Size) and start < 0 and dim.is_static:
        start = max(start + (dim.size.constant or 0), 0)
    begin = call.size(start)
    if dim.is_static and not isinstance(start, Size):
        return prefix(size), size.constant is not None, size.constant is not None
    if dim.factors and not dim.tail and step == 1 and (block := _blocks(call, dim, size, begin)) is not None:
        return block, True, True
    if isinstance(start, Size) or start < 0:
        raise Mixes("it takes rows from where the token count says")
    if not dim.is_single:
        raise Mixes("it takes a part of rows that do not lie in their order")
    # The last element taken, and its distance from the elements that do not agree.
    last = start + (size.values - 1) * step
    room = dim.size.values - dim.tail - 1 - last
    if size.constant is not None:
        if (room < 0).any():
            raise Mixes("it takes rows that do not agree")
        return Dim(size), True, True
    missing = int(np.where(size.values > 0, -(room // step), 0).clip(0).max())
    return prefix(size)._replace(tail=missing), False, bool((last + step >= dim.size.values).all())


def _blocks(call: OpOnRows, dim: Dim, size: Size, begin: Size) -> Dim | None:
    block = call.known.quotient(dim.size, call.known.constant(dim.blocks))
    count, first = (call.known.quotient(each, block) if block is not None else None for each in (size, begin))
    if count is None or first is None or not count.constant or first.constant is None or first.constant < 0:
        return None
    return Dim(size, count.constant, dim.factors)


@rule("split split_with_sizes", sizes="split_size split_sizes")
def split(call: OpOnRows) -> Claim:
    layout, at = call.layout(), call.dim()
    made = []
    begin = np.zeros_like(call.known.counts)
    for sizes, _ in call.results:
        start = call.known.interned(begin)
        first = start if start.constant is None else start.constant
        made.append(_part(call, layout[at], sizes[at], first, 1))
        begin = begin + sizes[at].values
    parts = [(*layout[:at], part, *layout[at + 1 :]) for part, _, _ in made]
    return Claim(parts, all(is_kept for _, is_kept, _ in made), all(covers for _, _, covers in made))


@rule("unbind")
def unbound(call: OpOnRows) -> Claim:
    layout, at = call.layout(), call.dim()
    check_static(layout, [at], "it takes rows apart")
    return Claim([layout[:at] + layout[at + 1 :]] * len(call.results))


@rule("unfold")
def windows(call: OpOnRows) -> Claim:
    layout, sizes, at = call.layout(), call.sizes, call.dim("dimension")
    dim = layout[at]
    if not dim.is_single:
        raise Mixes("it takes windows of rows that do not lie in their order")
    last = (sizes[at].values - 1) * call["step"] + call["size"]
    if dim.factors and (last > dim.size.values - dim.tail).any():
        raise Mixes("it takes windows of rows that do not agree")
    made = (*layout[:at], prefix(sizes[at]), *layout[at + 1 :], Dim(sizes[-1]))
    return Claim([made], keeps_real=not dim.factors, keeps_cover=False)


@rule("diagonal")
def diagonal(call: OpOnRows) -> Claim:
    layout, named = call.layout(), (call.dim("dim1"), call.dim("dim2"))
    pair = tuple(layout[dim] for dim in named)
    if not layouts.is_prefix(pair):
        raise Mixes("it takes a diagonal of rows that do not lie in their order")
    rest = tuple(dim for at, dim in enumerate(layout) if at not in named)
    is_square = layouts.is_static(pair) or (pair[0] == pair[1] and call["offset"] == 0)
    return Claim([(*rest, prefix(call.sizes[-1]))], keeps_real=is_square)


@rule("tril triu")
def triangle(call: OpOnRows) -> Claim:
    layout = call.layout()
    if not layouts.is_prefix(layout[-2:]):
        raise Mixes("it cuts along a diagonal of rows that do not lie in their order")
    return Claim([layout], keeps_real=layouts.is_static(layout[-2:]))


@rule("cat")
def joined(call: OpOnRows) -> Claim:
    sizes = call.sizes
    # A tensor of shape [0] is skipped, whatever the shape of the others.
    given: list[Rows] = [x for x in call["tensors"] if not (len(x.sizes) == 1 and x.sizes[0].constant == 0)]
    if not given:
        return Claim([layouts.prefixes(sizes)])
    at = call["dim"] % len(sizes)
    dims: list[tuple[Dim, ...]] = list(zip(*(x.layout for x in given if x.layout is not None), strict=True))
    row, is_kept = _row(dims[at], sizes[at])
    made = [row if each == at else met(dims[each], size) for each, size in enumerate(sizes)]
    return Claim([tuple(made)], keeps_real=is_kept)


def _row(dims: Sequence[Dim], size: Size) -> tuple[Dim, bool]:
    """Returns the concatenation of dims, and whether padded rows stay real."""
    if not (growing := [dim for dim in dims if dim.factors]):
        return Dim(size), True
    if len(dims) == 1:
        return dims[0], True
    if len(growing) == len(dims) and all(dim.factors == dims[0].factors and not dim.tail for dim in dims):
        return Dim(size, sum(dim.blocks for dim in dims), dims[0].factors), True
    if len(growing) > 1:
        raise Mixes("it puts rows behind other rows, which padding moves")
    (row,) = growing
    if not row.is_single:
        raise Mixes("it puts something beside rows that do not lie in their order")
    behind = sum(dim.size.constant or 0 for dim in dims[dims.index(row) + 1 :])
    return prefix(size)._replace(tail=row.tail + behind), False


@rule("stack")
def stacked(call: OpOnRows) -> Layout:
    at = call["dim"] % len(call.sizes)
    made = broadcast([x.layout for x in call["tensors"]], call.sizes[:at] + call.sizes[at + 1 :])
    return (*made[:at], Dim(call.sizes[at]), *made[at:])


@rule("repeat", sizes="repeats")
def repeated(call: OpOnRows) -> Layout:
    front = (Dim(call.known.constant(1)),) * (len(call.sizes) - len(call.layout()))
    return tuple(_copies(call, *each) for each in zip(front + call.layout(), call.sizes, strict=True))


def _copies(call: OpOnRows, dim: Dim, size: Size) -> Dim:
    if size is dim.size:
        return dim
    if dim.is_static:
        return prefix(size)
    if dim.tail:
        raise Mixes("it repeats rows of which the last do not agree")
    count = call.known.quotient(size, dim.size)
    if count is not None and count.constant is not None:
        return Dim(size, count.constant * dim.blocks, dim.factors)
    if count is None or count.falls or dim.blocks != 1:
        raise Mixes("it repeats rows as often as the token count says")
    return Dim(size, 1, (count, *dim.factors))


@rule("constant_pad_nd")
def padded(call: OpOnRows) -> Claim:
    sizes, layout, amounts = call.sizes, list(call.layout()), call["pad"]
    is_kept = True
    for number, (front, back) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        at = len(layout) - 1 - number
        dim = layout[at]
        if dim.is_static:
            layout[at] = Dim(sizes[at])
        elif front or back:
            if not dim.is_single or front < 0:
                raise Mixes("it pads rows that do not lie in their order")
            layout[at] = prefix(sizes[at])._replace(tail=max(dim.tail + back, 0))
            is_kept = False
    return Claim([tuple(layout)], keeps_real=is_kept)
