"""Describes where the real elements of a padded tensor lie; docs/DESIGN.md has the claim and examples.

    static     a size that is the same at all counts: every element is real
    growing    blocks × factor × factor ... (tail)

Each factor grows with the count, its real elements lead, and it includes the static dims inside it. `blocks`
are outermost: [4, n] flat has 4 of n, [n, n] flat has two factors. The last `tail` elements are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from piecewise.analysis.rows.counts import KnownSizes, Size


class MixReason(NamedTuple):
    """Holds why no layout can be given: a code of `classify.REASONS`, and a detail."""

    code: str
    detail: str


class Mixes(Exception):
    """Says that padding may reach real rows. Keep `refusal` alone: an exception's traceback holds tensors."""

    def __init__(self, detail: str, *, code: str = "mixes_tokens") -> None:
        super().__init__(detail)
        self.refusal = MixReason(code, detail)


class Dim(NamedTuple):
    """Describes the layout of one dim; `factors` is empty for a static dim."""

    size: Size
    blocks: int = 1
    factors: tuple[Size, ...] = ()
    tail: int = 0

    @property
    def is_static(self) -> bool:
        return not self.factors

    @property
    def is_single(self) -> bool:
        """Whether real element i is padded element i."""
        return self.blocks == 1 and len(self.factors) <= 1

    @property
    def is_prefix(self) -> bool:
        return self.is_static or (self.is_single and not self.tail)


Layout = tuple[Dim, ...]


def prefix(size: Size) -> Dim:
    """Returns the layout of a dim whose real elements lead; raises `Mixes` where the size ever falls."""
    if size.constant is not None:
        return Dim(size)
    if size.falls:
        raise Mixes("a dim shrinks while the token count grows")
    return Dim(size, 1, (size,))


def prefixes(sizes: Iterable[Size]) -> Layout:
    return tuple(map(prefix, sizes))


def prefixes_or_none(sizes: Sequence[Size]) -> Layout | None:
    return None if any(size.falls for size in sizes) else prefixes(sizes)


def is_prefix(layout: Layout) -> bool:
    return all(dim.is_prefix for dim in layout)


def is_static(layout: Layout) -> bool:
    return all(dim.is_static for dim in layout)


def are_whole_rows(written: Layout | None, other: Layout | None) -> bool:
    """Whether rows of one layout are whole rows, not parts, of another layout of the same memory."""
    left, right = (
        sorted((factor.values // factor.unit).tobytes() for dim in layout or () for factor in dim.factors)
        for layout in (written, other)
    )
    return left == right


def met(dims: Sequence[Dim], size: Size) -> Dim:
    """Returns the layout that dims of elementwise operands have in common; size 1 is broadcast."""
    found: Dim | None = None
    for dim in dims:
        if dim.size is not size:
            if dim.size.constant != 1:
                raise Mixes("sizes meet that differ at some token counts")
        elif found is not None and dim[:3] != found[:3]:
            raise Mixes("rows meet that lie at different places of the padded tensors")
        elif found is None or dim.tail > found.tail:
            found = dim
    return found if found is not None else prefix(size)


def broadcast(layouts: Iterable[Layout], sizes: Sequence[Size]) -> Layout:
    aligned = [(len(sizes) - len(layout), layout) for layout in layouts]
    dims = ([layout[at - offset] for offset, layout in aligned if at >= offset] for at in range(len(sizes)))
    return tuple(map(met, dims, sizes))


def regrouped(layout: Layout, sizes: Sequence[Size], known: KnownSizes) -> Layout:
    """Returns the layout after `view` or `reshape` to `sizes`. Raises `Mixes` where a new dim would hold
    parts of rows, or rows in another order."""
    made: list[Dim] = []
    old = new = 0
    one = known.constant(1)
    while old < len(layout) or new < len(sizes):
        first_old, first_new, have, want = old, new, one, one
        while have is not want or (old, new) == (first_old, first_new):
            is_behind = have is want or int(have.values[-1]) < int(want.values[-1])
            if old < len(layout) and (is_behind or new == len(sizes)):
                have, old = known.product(have, layout[old].size), old + 1
            elif new < len(sizes):
                want, new = known.product(want, sizes[new]), new + 1
            else:
                raise Mixes("a view takes rows apart")
        made += _cut(layout[first_old:old], sizes[first_new:new], known)
    return tuple(made)


def _cut(dims: Layout, sizes: Sequence[Size], known: KnownSizes) -> list[Dim]:
    """Splits the elements of `dims` into dims of `sizes`. Each takes what it can from the front: the static
    lead first, then factors, each with the static dims inside it."""
    wide = [dim for dim in dims if dim.size.constant != 1]
    if len(wide) == 1 and sum(size.constant != 1 for size in sizes) == 1:
        return [wide[0] if size.constant != 1 else Dim(size) for size in sizes]
    if any(dim.tail for dim in dims):
        raise Mixes("a view joins rows of which the last do not agree")
    lead, factors = 1, list[Size]()
    for dim in dims:
        count = dim.size.constant if dim.is_static else dim.blocks
        assert count is not None
        if factors:
            factors[-1] = known.product(factors[-1], known.constant(count))
        else:
            lead *= count
        factors += dim.factors
    made = []
    for size in sizes:
        if size.constant is not None:
            if size.constant != 1 and (size.constant == 0 or lead % size.constant):
                raise Mixes("a view makes a dim of fixed size of parts of rows")
            made.append(Dim(size))
            lead //= size.constant or 1
            continue
        rest, taken, left = known.quotient(size, known.constant(lead)), list[Size](), 1
        if rest is None:
            raise Mixes("a view cuts blocks of rows into parts")
        while rest.constant != 1:
            factor = factors.pop(0) if factors else known.constant(1)
            inside = known.quotient(rest, factor)
            if inside is not None and factor.constant != 1:
                taken.append(factor)
                rest = inside
                continue
            behind = known.quotient(factor, rest)
            if behind is None or behind.constant is None:
                raise Mixes("a view cuts rows into parts")
            taken.append(rest)
            rest, left = known.constant(1), behind.constant
        made.append(Dim(size, lead, tuple(taken)))
        lead = left
    return made
