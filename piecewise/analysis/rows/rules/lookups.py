"""Judges ops that look up or write rows by an index, or search in a table.

A padded row's index is in range where it repeats a real row's, which passed eager's own check, or where the
op that made the integers bounds them. A lookup in rows that carry tokens reads only real rows where the index
is bounded by the token count. An input's index is not: it may be −1 or too large, and so in padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecewise.analysis.rows.layout import Dim, Layout, Mixes, broadcast, met
from piecewise.analysis.rows.table import Claim, OpOnRows, Rows, check_static, rule


def _check_index(call: OpOnRows, index: Rows, dim: Dim, *, wraps: bool = False) -> None:
    """Checks that padded rows' indices are in range of `dim`, and real ones among elements that agree."""
    if dim.is_static and (index.is_real or index.is_settled):
        return
    low, high, size = index.bounds.low, index.bounds.high, dim.size.values
    least = -size if wraps and dim.is_static else 0
    is_within = False
    if low is not None and high is not None and (low.values >= least).all():
        holds = high.values < size - dim.tail
        is_within = call.limit_to(holds) if dim.is_static else dim.is_single and bool(holds.all())
    if not is_within:
        may = "hold an index that is out of range" if dim.is_static else "be named by an index"
        raise Mixes(f"padded rows may {may}")


@rule("embedding index")
def indexed(call: OpOnRows) -> Layout:
    wraps = call.name == "index"
    layout, indices = call.layout("self" if wraps else "weight"), call["indices"]
    indices = indices if wraps else [indices]
    for index, dim in zip(indices, layout, strict=False):
        if index is not None:
            _check_index(call, index, dim, wraps=wraps)
    return _looked_up(layout, indices)


def _looked_up(layout: Layout, indices: Sequence[Rows | None]) -> Layout:
    places = [at for at, index in enumerate(indices) if index is not None]
    found = [index.layout or () for index in indices if index is not None]
    rank = max(map(len, found))
    rows = []
    for at in range(rank):
        dims = [each[at - rank] for each in found if at >= rank - len(each)]
        rows.append(met(dims, next((dim.size for dim in dims if dim.size.constant != 1), dims[0].size)))
    # Indices that are not adjacent put their dims in front.
    front = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
    kept = [dim for at, dim in enumerate(layout) if at not in places]
    return (*kept[:front], *rows, *kept[front:])


@rule("index_select")
def index_selected(call: OpOnRows) -> Layout:
    layout, at, index = call.layout(), call.dim(), call["index"]
    _check_index(call, index, layout[at])
    return (*layout[:at], *(index.layout or (Dim(call.known.constant(1)),)), *layout[at + 1 :])


@rule("gather")
def gathered(call: OpOnRows) -> Layout:
    layout, at, made = call.layout(), call.dim(), call.layout("index")
    _check_others(layout, made, at)
    _check_index(call, call["index"], layout[at])
    return made


def _check_others(layout: Layout, index: Layout, at: int) -> None:
    """Checks that index and tensor have the same rows in all dims but `at`."""
    for other, (dim, own) in enumerate(zip(layout, index, strict=False)):
        if other != at and (dim.factors or own.factors) and dim != own:
            raise Mixes("its index is of other rows")


@rule("scatter scatter_add scatter_reduce")
def scattered(call: OpOnRows) -> Layout:
    layout, at, index = call.layout(), call.dim(), call["index"]
    check_static(layout, [at], "it scatters")
    _check_index(call, index, layout[at])
    for each in (index, call["src"]):
        if isinstance(each, Rows) and each.layout is not None:
            check_static(each.layout, [at], "it scatters")
            _check_others(layout, each.layout, at)
    return layout


@rule("searchsorted bucketize")
def searched(call: OpOnRows) -> Layout:
    table = call.layout("sorted_sequence" if call["sorted_sequence"] is not None else "boundaries")
    check_static(table, [-1], "it searches")
    made: Layout = (call["self"].layout or ()) if isinstance(call["self"], Rows) else ()
    if len(table) > 1 and any(a != b for a, b in zip(table[:-1], made[:-1], strict=True)):
        raise Mixes("it searches in other rows")
    if call["sorter"] is not None and not call["sorter"].is_settled:
        raise Mixes("its sorter carries tokens")
    return made


@rule("isin")
def found_in(call: OpOnRows) -> Layout:
    table, elements = call["test_elements"], call["elements"]
    if isinstance(table, Rows) and not table.is_settled:
        raise Mixes("it searches among all rows")
    return call.layout("elements") if isinstance(elements, Rows) else ()


@rule("_assert_async")
def asserted(call: OpOnRows) -> Claim:
    """Judges an assertion, which ends the use of a CUDA device where padded rows fail it."""
    (rows,) = call.tensors()
    holds = rows.bounds.low is not None and (rows.bounds.low.values >= 1).all()
    if not (rows.is_settled or rows.is_real or holds):
        raise Mixes("it checks padded rows, too")
    return Claim([])


@rule("index_put")
def put(call: OpOnRows) -> Claim:
    layout, indices = call.layout(), call["indices"]
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise Mixes("a mask says how many elements it writes", code="data_dependent")
    keeps_real = _check_places(call, indices)
    made = _looked_up(layout, indices)
    if broadcast([made, call.layout("values")], [dim.size for dim in made]) != made:
        raise Mixes("it writes rows that do not agree")
    return Claim([layout], keeps_real=keeps_real)


@rule("index_add index_copy index_fill")
def put_along(call: OpOnRows) -> Claim:
    layout, at = call.layout(), call.dim()
    keeps_real = _check_places(call, [None] * at + [call["index"]])
    if call["source"] is not None and call.layout("source"):
        _check_others(layout, call.layout("source"), at)
    return Claim([layout], keeps_real=keeps_real)


def _check_places(call: OpOnRows, indices: Sequence[Rows | None]) -> bool:
    """Checks that all buckets write the same places, in real rows; returns whether padding stays real."""
    named = [(index, dim) for index, dim in zip(indices, call.layout(), strict=False) if index is not None]
    for index, dim in named:
        if not index.is_settled:
            raise Mixes("rows meet at the places that an index names")
        _check_index(call, index, dim, wraps=True)
    return all(dim.is_static for _, dim in named)


@rule("masked_scatter")
def met_in_order(call: OpOnRows) -> Layout:
    raise Mixes("rows are put where a mask of all rows says")
