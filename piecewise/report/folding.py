"""Folds segments that are alike into one line, so that 60 layers read as one layer and its exceptions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from itertools import count, groupby, zip_longest
from typing import Any

import boundary_ops
from piecewise.ir.plan import EagerReason, InputAt, Segment

# More different programs than this with the same ops: constants that count the layers, not kinds of layers.
_MAX_PROGRAMS = 4
# With more lines than this, numbers below the layer's own are folded too, such as those of experts.
_SCREEN = 20
# A component of a module path that is a number: of a layer, or of what lies inside of one.
_NUMBER = re.compile(r"(?<![^.\s])\d+(?![^.\s])")


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentReport:
    """Describes one segment of the plan for readers.

    Attributes:
        program: the index of the first segment that runs the same code.
        constants: arguments of a boundary op that are no tensors, as "name=value".
    """

    index: int
    kind: str
    num_ops: int
    module_path: str
    ops: tuple[str, ...]
    reasons: tuple[EagerReason, ...]
    captured_ops: int = 0
    program: int = -1
    constants: tuple[str, ...] = ()

    @classmethod
    def all_of(cls, segments: Iterable[Segment]) -> tuple[SegmentReport, ...]:
        programs: dict[str, int] = {}
        return tuple(
            cls(
                each.index, each.kind, each.num_ops, each.module_path, each.op_names, each.reasons,
                each.captured_ops, programs.setdefault(each.lowering_key, each.index), _constants(each),
            )
            for each in segments
        )  # fmt: skip

    def notes(self) -> list[str]:
        """Says why each op is not in a graph, or what is special about it."""
        if self.kind == "boundary":
            why = f", not captured: {self.reasons[0].detail}" if self.reasons else ""
            constants = f" ({', '.join(self.constants)})" if self.constants else ""
            return [f"{self.ops[0]}{constants}{why}"]
        if self.captured_ops:
            return [f"{self.captured_ops} boundary ops captured"]
        return [f"{each.op}: {each.detail.removeprefix(f'{each.op}: ')}" for each in self.reasons]


def _constants(segment: Segment) -> tuple[str, ...]:
    op = boundary_ops.lookup(segment.op_call.name) if segment.op_call is not None else None
    if op is None or segment.op_call is None:
        return ()
    named = zip(op.overload._schema.arguments, segment.op_call.arguments, strict=False)
    shown = ((each.name, value) for each, value in named if not isinstance(value, InputAt))
    return tuple(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in shown
    )


def segment_rows(segments: Sequence[SegmentReport], *, full: bool) -> list[tuple[object, ...]]:
    """Returns a heading and a row for all segments that are alike, in order of the first of them, with N for
    the number of the layer; if `full`, a row for each segment, with all that is known of it."""
    if full:
        return [("segment", "runs as", "ops", "modules"), *(_full_row(each) for each in segments)]
    groups = _alike(segments, deep=False)
    deep = len(groups) > _SCREEN
    rows = [_row(group, deep=deep) for group in (_alike(segments, deep=True) if deep else groups)]
    return [("layers", "segments", "runs as", "ops each", "modules"), *rows]


def _full_row(each: SegmentReport) -> tuple[object, ...]:
    sources = [f", at {reason.source}" if reason.source else "" for reason in each.reasons]
    notes = "; ".join(map("".join, zip_longest(each.notes(), sources, fillvalue="")))
    return each.index, each.kind, each.num_ops, ": ".join(filter(None, (each.module_path, notes)))


def _alike(segments: Sequence[SegmentReport], *, deep: bool) -> list[list[SegmentReport]]:
    """Groups segments by all that a reader sees of them; `deep` takes numbers inside of layers for equal."""
    looks: dict[Any, list[SegmentReport]] = {}
    for each in segments:
        why = tuple((reason.code, reason.op, reason.source) for reason in each.reasons)
        path, _ = _template(each.module_path, deep=deep)
        looks.setdefault((each.kind, each.ops, each.captured_ops, why, path), []).append(each)
    found: list[list[SegmentReport]] = []
    for look in looks.values():
        programs: dict[int, list[SegmentReport]] = {}
        for each in look:
            programs.setdefault(each.program, []).append(each)
        found += programs.values() if len(programs) <= _MAX_PROGRAMS else [look]
    return sorted(found, key=lambda group: group[0].index)


def _row(group: Sequence[SegmentReport], *, deep: bool) -> tuple[object, ...]:
    first = group[0]
    if len({each.program for each in group}) > 1:
        first = dataclasses.replace(first, constants=("other constants in each",))
    paths, layers = zip(*(_template(each.module_path, deep=deep) for each in group), strict=True)
    path, shown = paths[0], _ranges({*layers} - {None})
    if len({each.module_path for each in group}) == 1:
        path, shown = (
            first.module_path,
            shown if len(group) == 1 else "",
        )  # else one layer that runs repeatedly
    notes = first.notes()
    more = f" (+{len(notes) - 1})" if len(notes) > 1 else ""
    source = _short(first.reasons[0].source) if first.kind == "eager" and first.reasons else ""
    note = f"{notes[0]}{more}{source}" if notes else ""
    return shown, len(group), first.kind, first.num_ops, ": ".join(filter(None, (path, note)))


def _template(path: str, *, deep: bool) -> tuple[str, int | None]:
    """Splits a path "from .. to" into one with N for its layer's number, and that number; `deep` writes * for
    numbers inside of the layer."""
    found = _NUMBER.search(path)
    if found is None or " .. " in path[: found.start()]:
        return path, None
    prefix, layer = path[: found.start()], int(found[0])

    def named(match: re.Match[str]) -> str:
        if path[: match.start()].rpartition(" .. ")[2] != prefix:
            return "*" if deep else match[0]
        distance = int(match[0]) - layer
        return f"N{distance:+d}" if distance else "N"

    return _NUMBER.sub(named, path), layer


def _ranges(numbers: Iterable[Any]) -> str:
    """Shortens a list: "0 to 4, 6 to 10, 12 to 16, …, 60"."""
    steps = count()
    runs = [list(run) for _, run in groupby(sorted(numbers), key=lambda number: number - next(steps))]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts if len(texts) < 6 else [*texts[:3], "…", texts[-1]])


def _short(source: str) -> str:
    """Shortens `"/a/folder/file.py", line 3, in forward: code` to ", at file.py:3"."""
    match = re.match(r'"(?:.*[/\\])?([^"]+)", line (\d+)', source)
    return f", at {match[1]}:{match[2]}" if match else f", at {source}" if source else ""
