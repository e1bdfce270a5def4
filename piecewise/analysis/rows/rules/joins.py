"""Ops that put tensors, or copies of one, beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from piecewise.analysis.rows.counts import Size
from piecewise.analysis.rows.layout import Dim, Layout, Mixes, broadcast, met, prefix
from piecewise.analysis.rows.table import Call, Outcome, Rows, rule


@rule("cat")
def joined(call: Call) -> Outcome:
    (sizes, _) = call.results[0]
    # A tensor of shape [0] is skipped, whatever the shape of the others.
    given: list[Rows] = [x for x in call["tensors"] if not (len(x.sizes) == 1 and x.sizes[0].constant == 0)]
    layouts: list[Layout] = [x.layout for x in given if x.layout is not None]
    if not layouts:
        return Outcome([tuple(map(prefix, sizes))])
    at = call["dim"] % len(sizes)
    dim, is_kept = _row(call, [layout[at] for layout in layouts], sizes[at])
    made = tuple(
        dim if each == at else met([layout[each] for layout in layouts], size)
        for each, size in enumerate(sizes)
    )
    return Outcome([made], keeps_real=is_kept)


def _row(call: Call, dims: Sequence[Dim], size: Size) -> tuple[Dim, bool]:
    """The dims behind one another, and whether padded rows stay real."""
    growing = [dim for dim in dims if dim.factors]
    if not growing:
        return Dim(size), True
    if len(growing) == len(dims) and all(dim.factors == dims[0].factors and not dim.tail for dim in dims):
        return (
            Dim(size, sum(dim.blocks for dim in dims), dims[0].factors) if len(dims) > 1 else dims[0]
        ), True
    if len(growing) > 1:
        raise Mixes("it puts rows behind other rows, which padding moves")
    (row,) = growing
    if not row.is_single:
        raise Mixes("it puts something beside rows that do not lie in their order")
    behind = sum(dim.size.constant or 0 for dim in dims[dims.index(row) + 1 :])
    return prefix(size)._replace(tail=row.tail + behind), False


@rule("stack")
def stacked(call: Call) -> Layout:
    (sizes, _) = call.results[0]
    at = call["dim"] % len(sizes)
    made = broadcast([x.layout for x in call["tensors"]], sizes[:at] + sizes[at + 1 :])
    return (*made[:at], Dim(sizes[at]), *made[at:])


@rule("repeat", sizes="repeats")
def repeated(call: Call) -> Layout:
    (sizes, _), layout = call.results[0], call.layout()
    offset = len(sizes) - len(layout)
    made = []
    for at, size in enumerate(sizes):
        old = layout[at - offset] if at >= offset else Dim(call.known.constant(1))
        if size is old.size:
            made.append(old)
        elif old.is_static:
            made.append(prefix(size))
        elif old.tail:
            raise Mixes("it repeats rows of which the last do not agree")
        else:
            made.append(_copies(call, old, size))
    return tuple(made)


def _copies(call: Call, dim: Dim, size: Size) -> Dim:
    count = call.known.quotient(size, dim.size)
    if count is not None and count.constant is not None:
        return Dim(size, count.constant * dim.blocks, dim.factors)
    if count is None or count.falls or dim.blocks != 1:
        raise Mixes("it repeats rows as often as the token count says")
    return Dim(size, 1, (count, *dim.factors))


@rule("constant_pad_nd")
def padded(call: Call) -> Outcome:
    (sizes, _), layout = call.results[0], list(call.layout())
    amounts = call["pad"]
    is_kept = True
    for number in range(len(amounts) // 2):
        front, back = amounts[2 * number], amounts[2 * number + 1]
        at = len(layout) - 1 - number
        dim = layout[at]
        if dim.is_static or (front == 0 and back == 0):
            layout[at] = Dim(sizes[at]) if dim.is_static else dim
            continue
        if not dim.is_single or front < 0:
            raise Mixes("it pads rows that do not lie in their order")
        tail = max(dim.tail + back, 0)
        layout[at] = prefix(sizes[at])._replace(tail=tail)
        is_kept = False
    return Outcome([tuple(layout)], keeps_real=is_kept)
