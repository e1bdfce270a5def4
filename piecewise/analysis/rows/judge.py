"""Judges what the ops of a recording do to the rows of its operands, by the rules of `table.py`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from boundary_ops.declare.rows import declared_rows, is_shipped, token_dims
from piecewise import torch_api
from piecewise.analysis.rows import layout as layouts
from piecewise.analysis.rows import rules, table
from piecewise.analysis.rows.counts import KnownSizes, Size
from piecewise.analysis.rows.layout import Dim, Layout, Mixes, MixReason
from piecewise.analysis.rows.table import UNBOUNDED, Bounds, Claim, OpOnRows, Rows, bounds_within, is_inexact
from piecewise.ir.effects import AtenCall, Recording, Ref

__all__ = ["Judge", "Judged", "rules"]

_TORCHS = ("aten", "prim", "prims")
# These ops reach memory outside of the tensor's elements.
_REACHING = frozenset("as_strided as_strided_copy as_strided_scatter resize resize_as set".split())
# Dtypes by which a custom op may look rows up.
_INDICES = (torch.int32, torch.int64)
_Found = TypeVar("_Found")


class Judged(NamedTuple):
    """Describes a node's effect: rows per result, later rows by position of a written operand, the `largest`
    row count for which they hold (None for any), and why the node runs eagerly (None in a graph)."""

    results: tuple[Rows, ...]
    written: Mapping[int, Rows]
    largest: int | None = None
    mixes: MixReason | None = None


class Judge:
    """Judges the recordings of one trace; equal recordings on equal operands are judged once."""

    def __init__(self, known: KnownSizes) -> None:
        self.known = known
        self._judged: dict[tuple[Recording, tuple[Rows, ...], bool], Judged] = {}

    def judge(self, recording: Recording, given: tuple[Rows, ...], *, in_graph: bool) -> Judged:
        """Judges a node on padded rows. One that mixes them into real rows is judged as an eager node, with
        the reason in `mixes`: it runs on real rows, and graphs read copies of its results."""
        key = recording, given, in_graph
        if key not in self._judged:
            try:
                found = _Judging(self, recording, given, in_graph=in_graph).judged()
            except Mixes as mixes:
                if not in_graph:
                    raise
                outside = self.judge(recording, given, in_graph=False)
                found = outside._replace(mixes=mixes.refusal)
            self._judged[key] = found
        return self._judged[key]

    def sizes(self, sizes: Sequence[Any]) -> tuple[Size, ...] | None:
        """Returns a tensor's sizes; None where one depends on another symbol."""
        found = tuple(map(self.known.of, sizes))
        return found if None not in found else None  # type: ignore[return-value]


class _Judging:
    """Judges one recording. Outside of graphs only the bounds of integers matter, not layouts."""

    def __init__(self, judge: Judge, recording: Recording, given: Sequence[Rows], *, in_graph: bool) -> None:
        self.known, self.in_graph = judge.known, in_graph
        self.largest: int | None = None
        self._recording, self._tensors = recording, recording.tensors
        self._sizes = [judge.sizes(tensor.sizes) for tensor in recording.tensors]
        real = (rows._replace(is_real=_is_real(rows.layout, rows.is_real)) for rows in given)
        self._rows = dict(enumerate(real))
        self._written: set[int] = set()

    def judged(self) -> Judged:
        for asked in self._recording.asked if self.in_graph else ():
            if not self.known.is_settled(asked):
                raise Mixes(f"it goes by the token count: {asked}", code="token_count_as_value")
        for noted in self._recording.calls:
            self._judge(noted)
        given = range(self._recording.num_given)
        written = {at: self._rows[at] for at in given if self._tensors[at].memory in self._written}
        return Judged(tuple(map(self._at, self._recording.results)), written, self.largest)

    def _at(self, position: int) -> Rows:
        if position in self._rows:
            return self._rows[position]
        # A constant in the code does not depend on the token count.
        sizes, dtype = self._sizes_of(position), self._tensors[position].dtype
        is_fixed = all(size.constant is not None for size in sizes)
        if self.in_graph and not is_fixed:
            raise Mixes("it reads a tensor that no op has made", code="unknown_op")
        bounds = bounds_within(dtype, UNBOUNDED, self.known)
        return Rows(sizes, tuple(map(Dim, sizes)) if is_fixed else None, dtype, bounds=bounds)

    def _sizes_of(self, position: int) -> tuple[Size, ...]:
        sizes = self._sizes[position]
        if sizes is None and self.in_graph:
            raise Mixes("another number than the token count tells a size", code="data_dependent")
        return sizes or ()

    def _judge(self, noted: AtenCall) -> None:
        call = self._call(noted)
        claim = self._claim(noted, call)
        is_kept = claim.keeps_real and all(rows.is_real for rows in call.tensors())
        why = "its sizes do not follow the token count alone"
        if self.in_graph:
            why = f"{noted.op._schema.name} over all tokens"
        made = zip(noted.made, call.results, claim.layouts, self._bounds(noted, call), strict=True)
        for position, (sizes, dtype), layout, bounds in made:
            if position in noted.writes:
                self._write(position, layout, bounds, is_kept=is_kept)
                continue
            memory = self._tensors[position].memory
            views = [self._at(other).covers for other in noted.reads if self._tensors[other].memory == memory]
            covers = not views or (all(views) and claim.keeps_cover)
            is_real = _is_real(layout, is_kept or not self.in_graph)
            self._rows[position] = Rows(sizes, layout, dtype, is_real, covers, bounds, why)

    def _call(self, noted: AtenCall) -> OpOnRows:
        """Describes the op by its functional form: `add` for `add_` and for out variants."""
        schema = noted.op._schema
        arguments = {argument.name: argument.default_value for argument in schema.arguments}
        given = dict(zip(arguments, noted.args, strict=False)) | noted.kwargs
        outs = {argument.name for argument in schema.arguments if argument.is_out}
        arguments |= {key: self._resolved(value) for key, value in given.items() if key not in outs}
        results = tuple((self._sizes_of(at), self._tensors[at].dtype) for at in noted.made)
        base = schema.name.partition("::")[2]
        if base.endswith("_") and not base.endswith("__") and not outs:
            base = base[:-1]
        full = f"{base}.{schema.overload_name}"
        name = full if full in table.RULES or full in table.BOUNDS else base
        return OpOnRows(name, arguments, results, self.known)

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._at(value.position)
        if isinstance(value, (tuple, list)):
            return [self._resolved(item) for item in value]
        if not isinstance(value, torch_api.SYMBOLIC):
            return value
        size = self.known.of(value) if isinstance(value, torch.SymInt) else self.known.number(value)
        if size is None and self.in_graph:
            raise Mixes("it computes with a number that follows a size", code="token_count_as_value")
        return size.constant if isinstance(size, Size) and size.constant is not None else size

    def _claim(self, noted: AtenCall, call: OpOnRows) -> Claim:
        if not self.in_graph:
            return Claim([layouts.prefixes_or_none(sizes) for sizes, _ in call.results])
        try:
            found = self._ruled(noted, call)
            claim = found if isinstance(found, Claim) else Claim([found])
            for layout, (sizes, _) in zip(claim.layouts, call.results, strict=True):
                is_whole = all(dim.factors or dim.size.constant is not None for dim in layout or ())
                if layout is not None and not (is_whole and tuple(dim.size for dim in layout) == sizes):
                    raise Mixes("its sizes are others at some token counts", code="unknown_op")
        except Mixes as mixes:
            code, detail = mixes.refusal
            raise Mixes(f"{noted.op._schema.name}: {detail}", code=code) from None
        self.largest = table.lesser(self.largest, call.largest)
        return claim

    def _ruled(self, noted: AtenCall, call: OpOnRows) -> Claim | Layout:
        for rows in call.tensors():
            if rows.layout is None and not call.name.startswith("_assert"):
                raise Mixes(rows.why)
        if noted.writes and not set(noted.results) <= set(noted.writes):
            raise Mixes("it returns something beside what it writes", code="unknown_op")
        values = {name for name, value in call.args.items() if _holds_count(value)}
        is_torchs = noted.op.namespace in _TORCHS
        are_fixed = all(size.constant is not None for sizes, _ in call.results for size in sizes)
        if is_torchs and call.name not in _REACHING and not values and are_fixed:
            if all(rows.is_settled for rows in call.tensors()):
                return Claim([tuple(map(Dim, sizes)) for sizes, _ in call.results])
        entry = _entry(table.RULES, call.name) if noted.op.namespace == "aten" else None
        if not values <= (entry.sizes if entry is not None else frozenset()):
            raise Mixes("it computes with the token count", code="token_count_as_value")
        if entry is None and is_torchs:
            raise Mixes("no rule says how rows go through it", code="unknown_op")
        try:
            return entry.rule(call) if entry is not None else _declared(noted.op, call)
        except Mixes:
            raise
        except Exception as error:  # a form of the op that the rule does not know
            raise Mixes(f"its rule fails: {type(error).__name__}: {error}", code="unknown_op") from error

    def _write(self, position: int, layout: Layout | None, bounds: Bounds, *, is_kept: bool) -> None:
        before, memory = self._at(position), self._tensors[position].memory
        if self.in_graph:
            if layout is None or layout != before.layout:
                raise Mixes("it writes rows to other places than those that they come from")
            if not before.is_settled and not before.covers:
                raise Mixes("padded rows would be written over others")
        self._written.add(memory)
        self._rows[position] = before
        for other, rows in list(self._rows.items()):
            if self._tensors[other].memory == memory:
                self._rows[other] = rows.after_write(before.layout, self.known, is_real=is_kept)
        self._rows[position] = self._rows[position]._replace(bounds=bounds)

    def _bounds(self, noted: AtenCall, call: OpOnRows) -> list[Bounds]:
        """Returns bounds for each result, UNBOUNDED where no rule bounds the op's integers."""
        is_known = all(self._sizes[at] is not None for at in (*noted.reads, *noted.made))
        is_out = any(argument.is_out for argument in noted.op._schema.arguments)
        function = _entry(table.BOUNDS, call.name) if noted.op.namespace == "aten" else None
        found: Any = UNBOUNDED
        if function is not None and is_known and not (is_out or all(is_inexact(d) for _, d in call.results)):
            with contextlib.suppress(Exception):  # a form of the op that the rule does not know
                found = function(call)
        each = [found] * len(call.results) if isinstance(found, Bounds) else found
        types = {rows.dtype for rows in call.tensors()}
        return [
            # Bounded on one side only, a value may wrap in another dtype.
            bounds_within(dtype, UNBOUNDED if None in item[:2] and types != {dtype} else item, self.known)
            for item, (_, dtype) in zip(each, call.results, strict=True)
        ]


def _entry(entries: Mapping[str, _Found], name: str) -> _Found | None:
    return entries.get(name, entries.get(name.partition(".")[0]))


def _is_real(layout: Layout | None, is_kept: bool) -> bool:
    """Whether padded rows can repeat a real row: there is one at each count."""
    if layout is None:
        return is_kept
    is_never_empty = all(factor.values.min() > 0 for dim in layout for factor in dim.factors)
    return layouts.is_static(layout) or (is_kept and is_never_empty)


def _holds_count(value: Any) -> bool:
    return isinstance(value, Size) or (type(value) is list and any(map(_holds_count, value)))


def _declared(op: Any, call: OpOnRows) -> Claim:
    if (found := declared_rows(op)) is None:
        hint = f'boundary_ops.declare_rows("{op._schema.name}", ...)'
        raise Mixes(f"nobody has said how rows go through it: {hint}", code="unknown_op")
    for name, wanted in found.only.items():
        if call[name] is not wanted and call[name] != wanted:
            raise Mixes(f"its rows are known for {name}={wanted!r} alone", code="unknown_op")
    carried = list[Dim]()
    for name, value in call.args.items():
        for rows in value if isinstance(value, list) else [value]:
            if not isinstance(rows, Rows) or rows.layout is None:
                continue
            if rows.dtype in _INDICES and not (rows.is_settled or rows.is_real or is_shipped(op)):
                raise Mixes(f"padded rows of '{name}' may hold an index that is out of range")
            dims = token_dims(found.token_args.get(name), len(rows.layout))
            others = [dim for dim in range(len(rows.layout)) if dim not in dims]
            table.check_static(rows.layout, others, f"'{name}' grows")
            one = call.known.constant(1)
            size = functools.reduce(call.known.product, [rows.sizes[dim] for dim in dims], one)
            if size.constant != 1:
                carried += layouts.regrouped(tuple(rows.layout[dim] for dim in dims), [size], call.known)
    growing = next((dim for dim in carried if not dim.is_static), None)
    if growing is not None and any(dim != growing for dim in carried):
        raise Mixes("its operands are of other rows")
    if growing is not None and found.padded == "anything" and not growing.is_single:
        raise Mixes("it goes through rows that do not lie in their order")
    returns, said = op._schema.returns, found.token_results
    if len(said) > len(call.results):
        said = tuple(at for at, value in zip(said, returns, strict=True) if "Optional" not in str(value.type))
    made: list[Layout] = []
    for (sizes, _), at in zip(call.results, said, strict=True):
        layout, dims = list(map(Dim, sizes)), token_dims(at, len(sizes))
        if growing is not None and dims:
            placed = layouts.regrouped((growing,), [sizes[dim] for dim in dims], call.known)
            for dim, place in zip(dims, placed, strict=True):
                layout[dim] = place
        made.append(tuple(layout))
    return Claim(made, keeps_real=found.padded == "real")
