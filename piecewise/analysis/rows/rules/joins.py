"""Ops that make tensors of sizes, or put tensors, or copies of one, beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from piecewise.analysis.rows.counts import Size
from piecewise.analysis.rows.layout import Dim, Layout, Mixes, broadcast, met, prefix, prefixes
from piecewise.analysis.rows.table import Claim, OpOnRows, Rows, rule


@rule("zeros ones full new_zeros new_ones new_full", sizes="size")
@rule("zeros_like ones_like full_like")
def constant(call: OpOnRows) -> Layout:
    return call.layout() if call.name.endswith("_like") else prefixes(call.sizes)


@rule("empty empty_strided new_empty arange eye", sizes="size stride end n m")
@rule("empty_like")
def unlike(call: OpOnRows) -> Claim:
    """Rows of which none is like another."""
    return Claim([constant(call)], keeps_real=False)


@rule("cat")
def joined(call: OpOnRows) -> Claim:
    sizes = call.sizes
    # A tensor of shape [0] is skipped, whatever the shape of the others.
    given: list[Rows] = [x for x in call["tensors"] if not (len(x.sizes) == 1 and x.sizes[0].constant == 0)]
    layouts: list[Layout] = [x.layout for x in given if x.layout is not None]
    if not layouts:
        return Claim([prefixes(sizes)])
    at = call["dim"] % len(sizes)
    row, is_kept = _row([layout[at] for layout in layouts], sizes[at])
    made = tuple(
        row if each == at else met([layout[each] for layout in layouts], size)
        for each, size in enumerate(sizes)
    )
    return Claim([made], keeps_real=is_kept)


def _row(dims: Sequence[Dim], size: Size) -> tuple[Dim, bool]:
    """The dims behind one another, and whether padded rows stay real."""
    growing = [dim for dim in dims if dim.factors]
    if not growing:
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
    layout, one = call.layout(), Dim(call.known.constant(1))
    return tuple(
        _copies(call, old, size)
        for old, size in zip((one,) * (len(call.sizes) - len(layout)) + layout, call.sizes, strict=True)
    )


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
