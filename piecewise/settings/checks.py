"""What each setting accepts: functions from any value to the normalised one, or a refusal that says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from boundary_ops.declare.boundary_op import BoundaryOp
from piecewise.settings.fusions import PASS_NAMES
from piecewise.settings.grids import ENGINE_GRIDS, Grid
from piecewise.settings.toml_file import TomlLines
from runners.buckets import MAX_BUCKET, MAX_NUM_BUCKETS, SIZES_FIX, find_problems, plain_sizes
from runners.errors import ConfigError, shown
from runners.whole_numbers import listed, whole_number

Check = Callable[[Any], Any]

_OP_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.\w+)?")
# A hostile file may have thousands of problems.
MAX_LISTED = 100

_RULE = "every setting has a known name and a value of its type that this version can honour"


@dataclass(frozen=True, slots=True)
class Place:
    """How and where the user wrote a setting; `path` is its keys in `lines`, where it came from a file."""

    label: str
    file: str = ""
    path: tuple[str, ...] = ()
    lines: TomlLines | None = None

    def shown(self, part: str = "") -> str:
        """For a message; `part` is the position inside the setting, such as ``[2]``."""
        if not self.file:
            return self.label + part
        line = self.lines.line_of(*self.path, part) if self.lines is not None else None
        return f"{self.file}{f':{line}' if line is not None else ''}: {self.label[:120]}{part}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong setting, as the user spelled it."""

    where: str
    expected: str
    got: str
    fix: str | None = None


class Refused(Exception):
    """A check's answer to a wrong value; `part` is the position inside the setting, such as ``[2]``.

    `others` are further answers about the same setting.
    """

    def __init__(self, expected: str, got: str, *, fix: str | None = None, part: str = "") -> None:
        super().__init__(expected, got)
        self.expected, self.got, self.fix, self.part = expected, got, fix, part
        self.others: list[Refused] = []

    def problems_at(self, place: Place) -> list[Problem]:
        """All of it, for a setting that the user wrote there."""
        return [Problem(place.shown(x.part), x.expected, x.got, x.fix) for x in (self, *self.others)]


def raise_problems(problems: list[Problem]) -> None:
    """Raise one `ConfigError` that lists all of them; return where there are none."""
    if not problems:
        return
    listed = problems[:MAX_LISTED]
    fixes = list(dict.fromkeys(problem.fix for problem in listed if problem.fix))
    fix = "; ".join(fixes) if fixes else "correct the value or leave the setting out for its default"
    if len(problems) == 1:
        only = problems[0]
        raise ConfigError(only.where, expected=only.expected, got=only.got, rule=_RULE, fix=fix)
    lines = [f"{problem.where}: expected {problem.expected}, got {problem.got}" for problem in listed]
    if len(problems) > len(listed):
        lines.append(f"and {len(problems) - len(listed)} more")
    raise ConfigError(
        "\n  ".join([f"{len(problems)} settings are wrong:", *lines]),
        rule=_RULE,
        fix=fix,
    )


def sizes(value: Any) -> tuple[int, ...]:
    """A list of token counts or batch sizes; every wrong entry is told."""
    found = [Refused(each.expected, each.got, fix=SIZES_FIX, part=each.part) for each in find_problems(value)]
    if found:
        found[0].others = found[1:]
        raise found[0]
    return plain_sizes(value)


def some_sizes(value: Any) -> tuple[int, ...]:
    """As `sizes`, or an empty list."""
    return () if listed(value) == [] else sizes(value)


def buckets(value: Any) -> tuple[int, ...] | Grid:
    """A list of token counts, or a rule for them."""
    is_rule = isinstance(value, (Grid, dict)) or (isinstance(value, str) and value in ENGINE_GRIDS)
    return grid(value) if is_rule else sizes(value)


def grid(value: Any) -> Grid:
    """A rule for token counts: an engine's name, or a table of step and max."""
    if isinstance(value, Grid):
        return value
    if isinstance(value, str) and value in ENGINE_GRIDS:
        return Grid(value)
    known = " or ".join([*(f'"{name}"' for name in ENGINE_GRIDS), "{ step = ..., max = ... }"])
    if not isinstance(value, dict):
        raise Refused(known, shown(value))
    wrong = sorted(set(map(str, value)) ^ {"step", "max"})
    if wrong:
        missing = wrong[0] in ("step", "max")
        raise Refused(known, f"a table {'without' if missing else 'with'} {wrong[0][:60]!r}")
    step, top = (whole(1, MAX_BUCKET)(value[key]) for key in ("step", "max"))
    if step > top:
        raise Refused("a step of at most max", f"step {step} and max {top}", fix="make the step smaller")
    if top // step > MAX_NUM_BUCKETS:
        raise Refused(
            f"at most {MAX_NUM_BUCKETS} sizes", f"{top // step} of them", fix="make the step larger"
        )
    return Grid("step", step, top)


def compiled_in_vain(settings: Mapping[str, Any], buckets: Sequence[int], place: Place) -> list[Problem]:
    """Sizes to compile for that are no buckets, or that nothing compiles."""
    found = settings.get("compile_sizes", ())
    if found and settings.get("lowering", "eager") == "eager":
        fix = "set lowering to 'inductor', or leave compile_sizes out"
        return [Problem(place.shown(), "() where lowering is 'eager'", str(list(found)), fix)]
    return [
        Problem(place.shown(f"[{index}]"), "one of the buckets", str(size), "add the bucket, or leave it out")
        for index, size in enumerate(found)
        if size not in buckets
    ]


def flag(value: Any) -> bool:
    if not isinstance(value, bool) and not _is_scalar_of(value, "bool"):
        raise Refused("true or false", shown(value))
    return bool(value)


def _is_scalar_of(value: Any, kind: str) -> bool:
    """Whether it is a NumPy scalar, or a tensor or array without dims, of a dtype of this kind."""
    return kind in str(getattr(value, "dtype", "")) and getattr(value, "ndim", -1) == 0


def _number(expected: str, is_valid: Callable[[float], bool]) -> Check:
    """A valid number as a float; True is none."""

    def check(value: Any) -> float:
        is_float = isinstance(value, float) or _is_scalar_of(value, "float")
        number = float(value) if is_float else whole_number(value)
        if number is None or not is_valid(number):
            raise Refused(expected, shown(value))
        return float(number)

    return check


def whole(low: int, high: int) -> Check:
    """An int in [low, high]."""

    def check(value: Any) -> int:
        number = whole_number(value)
        if number is None or not low <= number <= high:
            raise Refused(f"an int from {low} to {high}", shown(value))
        return number

    return check


def at_least(least: float) -> Check:
    """A finite number from `least` up, as a float; an int too large for a float has no finite one."""
    return _number(f"a finite number of at least {least:g}", lambda value: least <= value < 1e300)


# As a float.
share = _number("a number above 0 and at most 1", lambda value: 0 < value <= 1)


def choice(*available: str, later: tuple[str, ...] = ()) -> Check:
    """One of `available`; those in `later` are known names that this version lacks."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in available:
            return value
        missing = isinstance(value, str) and value in later
        got = f"{value!r}, which this version does not have yet" if missing else shown(value)
        raise Refused(" or ".join(repr(each) for each in available), got)

    return check


def optional(check: Check) -> Check:
    """None, or what `check` accepts."""
    return lambda value: None if value is None else check(value)


def fusions(value: Any) -> tuple[str, ...]:
    """Names of passes, each once, or "auto" alone; one name need not be in a list."""
    allowed = ("auto", *PASS_NAMES)
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)):
        raise Refused("a list of names of fusions", shown(value))
    for index, name in enumerate(value):
        if name not in allowed:
            near = get_close_matches(name, allowed, n=1) if isinstance(name, str) else []
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise Refused(" or ".join(map(repr, allowed)), shown(name) + hint, part=f"[{index}]")
        if name in value[:index]:
            raise Refused("each name once", f"{name!r} again", part=f"[{index}]")
    if "auto" in value and len(value) > 1:
        raise Refused("'auto' alone, or names", shown(value))
    return tuple(value)


def op_names(value: Any) -> tuple[str, ...]:
    """Names of ops, or what `define` returned for them; one need not be in a list."""
    value = [value] if isinstance(value, (str, BoundaryOp)) else value
    if not isinstance(value, (list, tuple)) or not value:
        raise Refused("a non-empty list of op names, or None for all registered ops", shown(value))
    value = [item.name if isinstance(item, BoundaryOp) else item for item in value]
    for index, name in enumerate(value):
        if not isinstance(name, str) or not _OP_NAME.fullmatch(name):
            raise Refused("a name such as 'namespace::op'", shown(name), part=f"[{index}]")
        if name in value[:index]:
            raise Refused("each name once", f"{name!r} again", part=f"[{index}]")
    return tuple(value)


def from_text(text: str, *, like: str) -> object:
    """An environment variable's text as a value of the annotated type `like`; other text stays text.

    Lists are separated by commas; "none" is None where the type allows it; true, false, 1 and 0 are flags.
    """
    text = text.strip()
    if "None" in like and text.lower() == "none":
        return None
    if like.startswith("tuple"):
        if text in ENGINE_GRIDS:
            return text
        parts = [part.strip() for part in text.split(",")] if text else []
        return [_plain_int(part) for part in parts] if "int" in like else parts
    if like.startswith("bool"):
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if like.startswith("int"):
        return _plain_int(text)
    if like.startswith("float"):
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _plain_int(text: str) -> int | str:
    # int() also takes "1_000", and refuses digits beyond its own limit with another error.
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else text
