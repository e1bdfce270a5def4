"""Holds the table of rules: how rows travel through an op, and how an op bounds the integers it makes.

A rule keeps one claim, agreement: where inputs equal eager's at the places that their layouts name, *whatever
lies elsewhere, NaN included*, outputs do at the places that the rule names. It raises `Mixes` where no layout
can be given. Two more facts describe what lies in padded rows:

    is_real    each padded row is computed from one real row, the same one in all tensors of a call
    low, high  integers, the real ones at n and all of them at N, lie within [low(n), high(n)]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from piecewise.analysis.rows.counts import KnownSizes, Size
from piecewise.analysis.rows.layout import Layout, Mixes, are_whole_rows, is_static

# Larger integers have no bounds here, so that no sum or product of two overflows.
_LARGEST = 1 << 31


class Bounds(NamedTuple):
    """Holds a tensor's least and largest integer, None where unknown; `permutes` where the real ones are 0,
    1, 2 ... in some order."""

    low: Size | None = None
    high: Size | None = None
    permutes: bool = False


UNBOUNDED = Bounds()


class Rows(NamedTuple):
    """Describes what is known of a tensor's rows: `layout` is None where nothing need agree with eager, for
    the reason `why`; `covers` is whether its padded elements are padded in all views of its memory."""

    sizes: tuple[Size, ...]
    layout: Layout | None
    dtype: torch.dtype
    is_real: bool = True
    covers: bool = True
    bounds: Bounds = UNBOUNDED
    why: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether all elements agree with eager: there are no padded rows."""
        return self.layout is not None and is_static(self.layout)

    def after_write(self, layout: Layout | None, known: KnownSizes, *, is_real: bool) -> Rows:
        """Returns what stays known after rows of `layout`, real ones or not, were written to the memory."""
        stays = is_real and self.is_real and are_whole_rows(layout, self.layout)
        bounds = bounds_within(self.dtype, UNBOUNDED, known)
        return self._replace(bounds=bounds, is_real=self.is_settled or stays)


class Claim(NamedTuple):
    """Describes what a rule claims of results: a layout each, None where unknown; whether padded rows stay
    real where those of all operands are; whether a view's padded elements are padded ones of its base."""

    layouts: Sequence[Layout | None]
    keeps_real: bool = True
    keeps_cover: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class OpOnRows:
    """Describes an op's call as rules see it.

    Attributes:
        name: without namespace, such as "sum" or, with its overload, "max.dim".
        args: by name, defaults included; `Rows` for tensors, `Size` for sizes that follow the count.
        largest: the largest row count for which its indices are in range; None for any.
    """

    name: str
    args: Mapping[str, Any]
    results: tuple[tuple[tuple[Size, ...], torch.dtype], ...]
    known: KnownSizes
    largest: int | None = None

    def __getitem__(self, name: str) -> Any:
        return self.args.get(name)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return self.results[0][0]

    def layout(self, name: str = "self") -> Layout:
        return self[name].layout

    def tensors(self) -> Iterator[Rows]:
        for value in self.args.values():
            yield from (x for x in (value if type(value) is list else [value]) if isinstance(x, Rows))

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """Returns dims of `self` named by an argument, non-negative; None and [] name all dims."""
        rank, value = len(self["self"].sizes), self[name]
        if value in (None, []):
            return tuple(range(rank))
        named = value if isinstance(value, list) else [value]
        return tuple(dim % rank if rank else 0 for dim in named)

    def dim(self, name: str = "dim") -> int:
        return self.dims(name)[0]

    def size(self, value: Any) -> Size:
        return value if isinstance(value, Size) else self.known.constant(int(value))

    def limit_to(self, holds: Any) -> bool:
        """Limits the call to row counts below the first where `holds` is false; false if none is left."""
        good = self.known.counts[holds.cumprod().astype(bool)]
        if len(good) and len(good) < len(holds):
            self.largest = lesser(self.largest, int(good[-1]))
        return bool(len(good))


def lesser(limit: int | None, other: int | None) -> int | None:
    return min(filter(None, (limit, other)), default=None)


Rule = Callable[[OpOnRows], "Claim | Layout"]
BoundsRule = Callable[[OpOnRows], "Bounds | Sequence[Bounds]"]
_AnyRule = TypeVar("_AnyRule", bound=Callable[..., Any])


class Entry(NamedTuple):
    rule: Rule
    sizes: frozenset[str] = frozenset()


RULES: dict[str, Entry] = {}
BOUNDS: dict[str, BoundsRule] = {}


def rule(names: str, *, sizes: str = "", of_bounds: bool = False) -> Callable[[_AnyRule], _AnyRule]:
    """Registers a rule for aten ops or overloads, of layouts or, with `of_bounds`, of integer bounds."""

    def enter(function: _AnyRule) -> _AnyRule:
        entry = Entry(function, frozenset(sizes.split()))
        for name in names.split():
            if of_bounds:
                BOUNDS[name] = function
            else:
                RULES[name] = entry
        return function

    return enter


bounds = functools.partial(rule, of_bounds=True)


def check_static(layout: Layout, dims: Sequence[int], what: str) -> None:
    if any(layout[dim].factors for dim in dims):
        raise Mixes(f"{what} over a dim that carries tokens")


def is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def bounds_within(dtype: torch.dtype, found: Bounds, known: KnownSizes) -> Bounds:
    """Returns bounds valid in a dtype, whose integers may wrap; narrow dtypes bound by their limits."""
    if is_inexact(dtype):
        return UNBOUNDED
    least, largest = limits(dtype)
    low, high, permutes = found
    if any(side is not None and not fits(side, dtype) for side in (low, high)):
        low, high, permutes = UNBOUNDED  # the type wraps
    # A padded row is bound by what holds at the bucket, a real one by what holds at its own count.
    if low is not None and low.constant is None and bool((low.values[1:] > low.values[:-1]).any()):
        low = known.constant(int(low.values.min()))
    if high is not None and high.falls:
        high = known.constant(int(high.values.max()))
    if largest - least < 1 << 16:
        low = known.constant(least) if low is None else low
        high = known.constant(largest) if high is None else high
    return Bounds(low, high, permutes)


def fits(size: Size, dtype: torch.dtype) -> bool:
    """Whether an integer type holds the size at all counts, with room for sums and products."""
    least, largest = limits(dtype)
    low, high = int(size.values.min()), int(size.values.max())
    return max(least, -_LARGEST) <= low and high <= min(largest, _LARGEST)


def limits(dtype: torch.dtype) -> tuple[int, int]:
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
