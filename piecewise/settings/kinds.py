"""Defines the kinds of settings: which values each accepts, and how each parses an environment variable.

A check normalises a value, or raises Refused with the reason. A text that a kind cannot parse stays a text,
which its check then refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from piecewise.settings.fusions import PASS_NAMES
from piecewise.settings.grids import ENGINE_GRIDS, Grid
from runners.buckets import MAX_BUCKET, MAX_NUM_BUCKETS, find_problems, plain_sizes
from runners.errors import InvalidBuckets, shown
from runners.whole_numbers import listed, whole_number

Check = Callable[[Any], Any]

_OP_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.\w+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """Describes a wrong setting; `part` is the position inside it (``[2]``), `where` its place in words."""

    expected: str
    got: str
    fix: str | None = None
    part: str = ""
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.got}"


class Refused(Exception):
    """Carries the problems that a check found in a value."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Kind:
    """Holds one kind of setting: `check` normalises any value or raises Refused, `read` parses a text."""

    check: Check
    read: Callable[[str], object] = str


def optional(kind: Kind) -> Kind:
    """Makes a kind that accepts None too, as text "none"."""
    return Kind(
        lambda value: None if value is None else kind.check(value),
        lambda text: None if text.lower() == "none" else kind.read(text),
    )


def whole(low: int, high: int) -> Kind:
    """Makes a kind that accepts an int in [low, high]."""

    def check(value: Any) -> int:
        number = whole_number(value)
        if number is None or not low <= number <= high:
            raise Refused(Problem(f"an int from {low} to {high}", shown(value)))
        return number

    return Kind(check, _read_whole)


def _read_whole(text: str) -> int | str:
    # int() also takes "1_000", and refuses digits beyond its own limit with another error.
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else text


def number(expected: str, is_valid: Callable[[float], bool]) -> Kind:
    """Makes a kind that accepts numbers as floats, but no bool, and no int too large for a float."""

    def check(value: Any) -> float:
        is_float = isinstance(value, float) or _is_scalar_of(value, "float")
        found = float(value) if is_float else whole_number(value)
        if found is None or not is_valid(found) or abs(found) >= 1e300:
            raise Refused(Problem(expected, shown(value)))
        return float(found)

    def read(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    return Kind(check, read)


def _is_scalar_of(value: Any, dtype: str) -> bool:
    """Whether a value is a NumPy scalar, or a tensor or array without dims, of this dtype."""
    return dtype in str(getattr(value, "dtype", "")) and getattr(value, "ndim", -1) == 0


def _check_flag(value: Any) -> bool:
    if not isinstance(value, bool) and not _is_scalar_of(value, "bool"):
        raise Refused(Problem("true or false", shown(value)))
    return bool(value)


_FLAGS = {"true": True, "1": True, "false": False, "0": False}
flag = Kind(_check_flag, lambda text: _FLAGS.get(text.lower(), text))


def choice(*available: str, later: tuple[str, ...] = ()) -> Kind:
    """Makes a kind that accepts one of `available`; `later` has known names that this version lacks."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in available:
            return value
        missing = isinstance(value, str) and value in later
        got = f"{value!r}, which this version does not have yet" if missing else shown(value)
        raise Refused(Problem(" or ".join(map(repr, available)), got))

    return Kind(check)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def check_sizes(value: Any) -> tuple[int, ...]:
    """Checks a list of token counts or batch sizes, and reports every wrong entry."""
    problems = [
        Problem(each.expected, each.got, InvalidBuckets.fix, each.part) for each in find_problems(value)
    ]
    if problems:
        raise Refused(*problems)
    return plain_sizes(value)


def check_grid(value: Any) -> Grid:
    """Checks a rule for token counts: an engine's name, or a table of step and max."""
    if isinstance(value, Grid):
        return value
    if isinstance(value, str) and value in ENGINE_GRIDS:
        return Grid(value)
    known = " or ".join([*(f'"{name}"' for name in ENGINE_GRIDS), "{ step = ..., max = ... }"])
    if not isinstance(value, dict):
        raise Refused(Problem(known, shown(value)))
    for wrong in sorted(set(map(str, value)) ^ {"step", "max"}):
        word = "without" if wrong in ("step", "max") else "with"
        raise Refused(Problem(known, f"a table {word} {wrong[:60]!r}"))
    step, top = (whole(1, MAX_BUCKET).check(value[key]) for key in ("step", "max"))
    if step > top:
        raise Refused(Problem("a step of at most max", f"step {step} and max {top}", "make the step smaller"))
    if top // step > MAX_NUM_BUCKETS:
        got = f"{top // step} of them"
        raise Refused(Problem(f"at most {MAX_NUM_BUCKETS} sizes", got, "make the step larger"))
    return Grid("step", step, top)


def _check_buckets(value: Any) -> tuple[int, ...] | Grid:
    is_rule = isinstance(value, (Grid, dict)) or (isinstance(value, str) and value in ENGINE_GRIDS)
    return check_grid(value) if is_rule else check_sizes(value)


def _read_sizes(text: str) -> object:
    return [_read_whole(part) for part in _split(text)]


sizes = Kind(check_sizes, _read_sizes)
# Accepts what `sizes` accepts, or an empty list.
some_sizes = Kind(lambda value: () if listed(value) == [] else check_sizes(value), _read_sizes)
# Accepts a list of token counts, or a rule for them.
buckets = Kind(_check_buckets, lambda text: text if text in ENGINE_GRIDS else _read_sizes(text))


def _check_names(
    value: Any, is_name: Callable[[Any], object], expected: str, known: tuple[str, ...] = ()
) -> tuple[str, ...]:
    for index, name in enumerate(value):
        near = get_close_matches(name, known, n=1) if isinstance(name, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if not is_name(name):
            raise Refused(Problem(expected, shown(name) + hint, part=f"[{index}]"))
        if name in value[:index]:
            raise Refused(Problem("each name once", f"{name!r} again", part=f"[{index}]"))
    return tuple(value)


def _check_fusions(value: Any) -> tuple[str, ...]:
    """Checks names of passes, or "auto" alone; a single name need not be in a list."""
    allowed = ("auto", *PASS_NAMES)
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)):
        raise Refused(Problem("a list of names of fusions", shown(value)))
    if "auto" in value and len(value) > 1:
        raise Refused(Problem("'auto' alone, or names", shown(value)))
    return _check_names(value, allowed.__contains__, " or ".join(map(repr, allowed)), allowed)


def _check_op_names(value: Any) -> tuple[str, ...]:
    """Checks names of ops, or the objects that `define` returned for them; one need not be in a list."""
    value = [value] if isinstance(value, str) or hasattr(value, "overload") else value
    if not isinstance(value, (list, tuple)) or not value:
        raise Refused(Problem("a non-empty list of op names, or None for all registered ops", shown(value)))
    names = [getattr(item, "name", item) for item in value]
    return _check_names(
        names, lambda name: bool(_OP_NAME.fullmatch(str(name))), "a name such as 'namespace::op'"
    )


fusions = Kind(_check_fusions, _split)
op_names = Kind(_check_op_names, _split)
