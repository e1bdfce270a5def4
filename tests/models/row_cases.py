"""Runs a function on fakes, judges its ops by the table of rows, and tests every claim on real tensors.

For n real tokens in a bucket of N: `V` is the function's value on n rows, `V'` on N rows that agree with them
where the layouts of the inputs say, and hold anything elsewhere. Claimed are the places at which `V'` agrees
with `V`, what padded rows repeat, and the bounds of integers; of results, and of inputs that are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from piecewise import torch_api
from piecewise.analysis.rows import table
from piecewise.analysis.rows.counts import KnownSizes, valid_counts
from piecewise.analysis.rows.judge import Judge, Judged
from piecewise.analysis.rows.layout import Layout, Mixes, prefixes
from piecewise.analysis.rows.table import UNBOUNDED, Bounds, Rows, bounds_within
from piecewise.ir.effects import OpRecorder, Recording
from piecewise.ir.tensors import tensors_in

LARGEST = 24
PAIRS = ((1, 2), (2, 5), (3, 8), (5, 6), (4, 11), (7, 16), (6, 24))
# What padded rows hold: a number, or None for other rows.
POISONS = (math.nan, 1e4, -1e4, None)


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor whose shape follows the count n.

    Attributes:
        sizes: numbers, or as text what follows the count, such as "n*4".
        low, high: likewise the least and the largest integer, for integer types.
        is_bound: whether the judge is told of these, and padded rows keep to them.
        is_real: whether padded rows repeat a real one; else they hold anything.
    """

    sizes: tuple[int | str, ...]
    dtype: torch.dtype = torch.float64
    low: int | str = 0
    high: int | str = 3
    is_bound: bool = False
    is_real: bool = False
    permutes: bool = False

    def shape(self, n: Any) -> tuple[Any, ...]:
        return tuple(_at(size, n) for size in self.sizes)

    def values(self, n: int, generator: torch.Generator) -> torch.Tensor:
        shape = self.shape(n)
        if self.permutes:
            return torch.randperm(shape[0], generator=generator)
        if self.dtype is torch.bool:
            return torch.rand(shape, generator=generator) > 0.5
        if self.dtype.is_complex:
            return torch.randn(shape, generator=generator, dtype=self.dtype)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return torch.randint(_at(self.low, n), _at(self.high, n) + 1, shape, generator=generator).to(
            self.dtype
        )

    def padding(self, N: int, poison: float | None, generator: torch.Generator) -> torch.Tensor:
        """N rows of what padded ones may hold."""
        wide = self.values(N, generator)
        if self.permutes:
            return torch.randint(0, N, wide.shape, generator=generator)
        if poison is None:
            return wide
        if self.dtype is torch.bool:
            return torch.full_like(wide, poison > 0)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.full(wide.shape, poison).to(self.dtype)
        if self.is_bound:
            return torch.full_like(wide, _at(self.low if poison < 0 else self.high, N))
        limits = torch.iinfo(self.dtype)
        return torch.full_like(wide, -1 if math.isnan(poison) else limits.max if poison > 0 else limits.min)


def _at(value: int | str, n: Any) -> Any:
    return eval(value, {"n": n}) if isinstance(value, str) else value


def anything(*sizes: int | str, dtype: torch.dtype = torch.float64, **settings: Any) -> Input:
    """An input whose padded rows hold anything."""
    return Input(sizes, dtype, **settings)


def real(*sizes: int | str, **settings: Any) -> Input:
    """An input whose padded rows repeat a real one."""
    return anything(*sizes, is_real=True, **settings)


def integers(*sizes: int | str, dtype: torch.dtype = torch.int64, **settings: Any) -> Input:
    """Integers whose bounds are known."""
    return anything(*sizes, dtype=dtype, **({"is_bound": True} | settings))


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What the table says of a function, and what it was asked of."""

    known: KnownSizes
    judged: Judged
    recording: Recording
    given: tuple[Rows, ...]

    def text(self) -> str:
        """The claims, such as "n,4 real 0..3"; "2 of n" are blocks, "n.n" factors, "n~1" has a tail."""
        return "; ".join(self._text(rows) for rows in self.judged.results)

    def _text(self, rows: Rows) -> str:
        if rows.layout is None:
            return "unknown"
        dims = []
        for dim in rows.layout:
            factors = ".".join(self._size(factor) for factor in dim.factors) or self._size(dim.size)
            dims.append(
                (f"{dim.blocks} of " if dim.blocks > 1 else "")
                + factors
                + (f"~{dim.tail}" if dim.tail else "")
            )
        low, high = (self._size(side) if side is not None else "" for side in rows.bounds[:2])
        bounds = f" {low}..{high}" if (low or high) else ""
        is_real = rows.is_real and not rows.is_settled
        return ",".join(dims) + " real" * is_real + bounds + " permutes" * rows.bounds.permutes

    def _size(self, size: Any) -> str:
        if size.constant is not None:
            return str(size.constant)
        counts, values = self.known.counts, size.values
        slope, rest = divmod(int(values[-1] - values[-2]), int(counts[-1] - counts[-2]))
        start = int(values[-1]) - slope * int(counts[-1])
        if rest or (values != slope * counts + start).any():
            return "f(n)"
        return {1: "", -1: "-"}.get(slope, str(slope)) + "n" + (f"{start:+}" if start else "")


def _on(device: str) -> Any:
    """A block in which new tensors are on a device."""
    return contextlib.nullcontext() if device == "cpu" else torch.device(device)


class FunctionRaises(Exception):
    """The function itself raises, for real rows or on fakes."""


def record(
    function: Callable[..., Any], inputs: tuple[Input, ...], *, count: Any, device: str = "cpu"
) -> Any:
    """(count, recording, environment of symbols) for an example; one of one token has no symbol."""
    fake_mode = torch_api.new_fake_mode()
    rows = torch_api.symbolic_count(fake_mode, "n", count) if count > 1 else count
    with fake_mode:
        fakes = [torch.empty(each.shape(rows), dtype=each.dtype, device=device) for each in inputs]
    recorder = OpRecorder(fakes)
    with fake_mode.shape_env.ignore_fresh_unbacked_symbols(), torch.no_grad(), fake_mode, recorder:
        with torch_api.python_dispatcher(), _on(device):
            try:
                value = function(*fakes)
            except Exception as error:
                raise FunctionRaises("on fakes") from error
    return rows, recorder.recording(value), fake_mode.shape_env


def judge(
    function: Callable[..., Any], inputs: tuple[Input, ...], *, example: int = 5, largest: int = LARGEST,
    device: str = "cpu",
) -> Judgement:  # fmt: skip
    rows, recording, shape_env = record(function, inputs, count=example, device=device)
    symbol = rows.node.expr
    known = KnownSizes(valid_counts(shape_env, symbol, largest), symbol, shape_env)
    given = []
    for each in inputs:
        sizes = tuple(known.of(size) for size in each.shape(rows))
        found = UNBOUNDED
        if each.is_bound:
            sides = [np.array([_at(side, int(n)) for n in known.counts]) for side in (each.low, each.high)]
            found = Bounds(*map(known.interned, sides), each.permutes)
        is_settled = all(size.constant is not None for size in sizes)
        given.append(
            Rows(sizes, prefixes(sizes), each.dtype, each.is_real or is_settled, True,
                 bounds_within(each.dtype, found, known))
        )  # fmt: skip
    return Judgement(
        known, Judge(known).judge(recording, tuple(given), in_graph=True), recording, tuple(given)
    )


@contextlib.contextmanager
def noted_rules(patch: pytest.MonkeyPatch) -> Iterator[tuple[set[str], list[str]]]:
    """Names of the entries that the block asks and that do not refuse, and how entries failed.

    Those that bound integers have "bounds" in front.
    """
    used: set[str] = set()
    failures: list[str] = []

    def noting(key: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def asked(call: Any) -> Any:
            try:
                found = function(call)
            except Mixes:
                raise
            except Exception as error:
                failures.append(f"{key}: {error!r}")
                raise
            is_bounds = isinstance(found, Bounds) or isinstance(found, list) and isinstance(found[0], Bounds)
            if not is_bounds or any(
                each != UNBOUNDED for each in ([found] if isinstance(found, Bounds) else found)
            ):
                used.add(key)
            return found

        return asked

    with patch.context() as entries:
        for name, entry in table.RULES.items():
            entries.setitem(table.RULES, name, table.Entry(noting(name, entry.rule), entry.sizes))
        for name, function in table.BOUNDS.items():
            entries.setitem(table.BOUNDS, name, noting(f"bounds {name}", function))
        yield used, failures


def embedded(tensor: torch.Tensor, layout: Layout, at: int, large: int) -> torch.Tensor:
    """The elements of a tensor padded to count number `large`, at which the real ones of number `at` lie."""
    for dim in reversed(range(len(layout))):
        each = layout[dim]
        if each.is_static:
            continue
        row = tensor.unflatten(dim, [each.blocks, *(int(factor.values[large]) for factor in each.factors)])
        for number, factor in enumerate(each.factors):
            row = row.narrow(dim + 1 + number, 0, int(factor.values[at]))
        shape = row.shape[dim : dim + 1 + len(each.factors)]
        tensor = row.reshape(*row.shape[:dim], math.prod(shape), *row.shape[dim + len(shape) :])
    return tensor


def clipped(tensor: torch.Tensor, layout: Layout, at: int, large: int) -> torch.Tensor:
    """What a padded tensor would be whose padded rows repeat a real one: V, at each place of V'."""
    for dim, each in enumerate(layout):
        if each.is_static:
            continue
        row = tensor.unflatten(dim, [each.blocks, *(int(f.values[at]) for f in each.factors)])
        for number, factor in enumerate(each.factors):
            real, padded = int(factor.values[at]), int(factor.values[large])
            index = torch.arange(padded)
            index[real:] %= factor.unit
            row = row.index_select(dim + 1 + number, index)
        tensor = row.flatten(dim, dim + len(each.factors))
    return tensor


def padded_input(
    each: Input, rows: Rows, real: torch.Tensor, counts: tuple[int, int], places: tuple[int, int],
    poison: float | None, generator: torch.Generator,
) -> torch.Tensor:  # fmt: skip
    """An input that agrees with `real`, padded to the second count."""
    if rows.is_settled:
        return real.clone()
    if each.is_real:
        return clipped(real, rows.layout, *places)
    wide = each.padding(counts[1], poison, generator)
    wide[tuple(slice(size) for size in real.shape)] = real
    return wide


def check_claims(
    function: Callable[..., Any],
    inputs: tuple[Input, ...],
    found: Judgement,
    *,
    where: str,
    pairs: Any = PAIRS,
    may_raise: bool = False,
    device: str = "cpu",
) -> int:
    """Tests what was claimed at counts (n, N); returns how many pairs were tested.

    Args:
        may_raise: leaves out counts at which eager raises.
    """
    known, judged = found.known, found.judged
    tested = 0
    for n, N in pairs:
        if n not in known.counts or N not in known.counts or (judged.largest or N) < N:
            continue
        try:
            check_pair(function, inputs, found, (n, N), where=where, device=device)
            tested += 1
        except FunctionRaises:
            if not may_raise:
                raise
        except Exception:
            if n > 1 or _is_same_program(function, inputs, found):
                raise
    return tested


def check_pair(
    function: Callable[..., Any], inputs: tuple[Input, ...], found: Judgement, counts: tuple[int, int], *,
    where: str, device: str,
) -> None:  # fmt: skip
    judged = found.judged
    at, large = (int(np.searchsorted(found.known.counts, count)) for count in counts)
    for seed, poison in enumerate(POISONS):
        generator = torch.Generator().manual_seed(31 * counts[0] + counts[1] + seed)
        real = [each.values(counts[0], generator) for each in inputs]
        wide = [
            padded_input(each, rows, value, counts, (at, large), poison, generator).to(device)
            for each, rows, value in zip(inputs, found.given, real, strict=True)
        ]
        real = [value.to(device) for value in real]
        with _on(device):
            try:
                results = function(*real)
            except Exception as error:
                raise FunctionRaises(f"{where}: {counts}") from error
            wanted = [*tensors_in(results), *(real[place] for place in judged.written)]
            made = [*tensors_in(function(*wide)), *(wide[place] for place in judged.written)]
        claims = [*judged.results, *judged.written.values()]
        for rows, want, got in zip(claims, wanted, made, strict=True):
            try:
                check_claim(rows, want.cpu(), got.cpu(), (at, large))
            except AssertionError as error:
                raise AssertionError(f"{where}: {counts}, padded with {poison}, {rows}: {error}") from None


def check_eager(
    function: Callable[..., Any], inputs: tuple[Input, ...], found: Judgement, *, where: str
) -> None:
    """Tests what is claimed of real rows where the function runs outside of graphs."""
    judged = Judge(found.known).judge(found.recording, found.given, in_graph=False)
    claims = [*judged.results, *judged.written.values()]
    for n in sorted({n for n, _ in PAIRS} & set(map(int, found.known.counts[found.known.counts > 1]))):
        given = [each.values(n, torch.Generator().manual_seed(n)) for each in inputs]
        try:
            made = [*tensors_in(function(*given)), *(given[place] for place in judged.written)]
        except Exception:
            continue
        at = int(np.searchsorted(found.known.counts, n))
        for rows, value in zip(claims, made, strict=True):
            check_bounds(rows, value, at, f"{where}: {n}, eagerly, {rows}")
            is_whole = not rows.bounds.permutes or torch.equal(
                value.sort()[0].long(), torch.arange(len(value))
            )
            assert is_whole, f"{where}: {n}, eagerly, no permutation"


def _is_same_program(function: Callable[..., Any], inputs: tuple[Input, ...], found: Judgement) -> bool:
    """Whether one token runs the ops of the recording: else it has no graph."""
    try:
        _, alone, _ = record(function, inputs, count=1)
    except FunctionRaises:
        return False
    return _program(alone, found.known) == _program(found.recording, found.known)


def _program(recording: Recording, known: KnownSizes) -> list[Any]:
    tensors = [
        (tensor.memory, [int(known.of(size).values[0]) for size in tensor.sizes])
        for tensor in recording.tensors
    ]
    return [tensors, *((call.op, call.results, call.writes) for call in recording.calls)]


def check_bounds(rows: Rows, value: torch.Tensor, place: int, text: str) -> None:
    low, high = rows.bounds.low, rows.bounds.high
    if value.numel() and low is not None:
        assert int(value.min()) >= int(low.values[place]), f"{text}: below its bound\n{value}"
    if value.numel() and high is not None:
        assert int(value.max()) <= int(high.values[place]), f"{text}: above its bound\n{value}"


def check_claim(rows: Rows, want: torch.Tensor, got: torch.Tensor, places: tuple[int, int]) -> None:
    for value, place in zip((want, got), places, strict=True):
        assert tuple(int(size.values[place]) for size in rows.sizes) == value.shape, "its sizes"
        check_bounds(rows, value, place, "not as claimed")
    if rows.bounds.permutes:
        assert torch.equal(want.sort()[0].long(), torch.arange(len(want))), "no permutation"
    if rows.layout is None:
        return
    part, whole = embedded(got, rows.layout, *places), want
    for dim, each in enumerate(rows.layout):
        kept = max(whole.shape[dim] - each.tail, 0)
        part, whole = part.narrow(dim, 0, min(kept, part.shape[dim])), whole.narrow(dim, 0, kept)
    assert_close(part, whole, "other values")
    if rows.is_real and not any(each.tail for each in rows.layout):
        assert_close(got, clipped(want, rows.layout, *places), "not real")


def assert_close(got: torch.Tensor, want: torch.Tensor, text: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, text
    got, want = got.resolve_conj().resolve_neg(), want.resolve_conj().resolve_neg()
    if got.dtype.is_complex:
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if got.dtype.is_floating_point:
        tolerance = 1e-9 if got.dtype is torch.float64 else 2e-2
        got, want = got.double(), want.double()
        is_close = torch.isclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        is_close = got == want
    assert is_close.all(), f"{text}\n{got}\n{want}"


def prefix_of(found: Judgement, *, results: int, calls: int) -> Judgement:
    """The judgement of what the first calls do, which make the first results."""
    recording = found.recording
    part = dataclasses.replace(recording, calls=recording.calls[:calls], results=recording.results[:results])
    return dataclasses.replace(
        found, recording=part, judged=Judge(found.known).judge(part, found.given, in_graph=True)
    )
