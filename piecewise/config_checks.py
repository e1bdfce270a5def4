"""What each setting accepts: functions from any value to the normalised one, or a refusal that says why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runners.buckets import checked_sizes
from runners.errors import ConfigError

Check = Callable[[Any], Any]

_OP_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.\w+)?")
_RULE = "every setting has a known name and a value of its type that this version can honour"


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong setting, as the user spelled it."""

    where: str
    expected: str
    got: str
    fix: str | None = None


class Refused(Exception):
    """A check's answer to a wrong value; `part` is the position inside the setting, such as ``[2]``."""

    def __init__(self, expected: str, got: str, *, fix: str | None = None, part: str = "") -> None:
        super().__init__(expected, got)
        self.expected, self.got, self.fix, self.part = expected, got, fix, part


def raise_problems(problems: list[Problem]) -> None:
    """Raise one `ConfigError` that lists all of them; return where there are none."""
    if not problems:
        return
    fixes = list(dict.fromkeys(problem.fix for problem in problems if problem.fix))
    fix = "; ".join(fixes) if fixes else "correct the value or leave the setting out for its default"
    if len(problems) == 1:
        only = problems[0]
        raise ConfigError(only.where, expected=only.expected, got=only.got, rule=_RULE, fix=fix)
    lines = [f"{problem.where}: expected {problem.expected}, got {problem.got}" for problem in problems]
    raise ConfigError(
        "\n  ".join([f"{len(problems)} settings are wrong:", *lines]),
        rule=_RULE,
        fix=fix,
    )


def shown(value: object, max_chars: int = 80) -> str:
    """`value` and its type, short whatever it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    text = repr(value[: max_chars + 1] if isinstance(value, (str, bytes, list, tuple)) else value)
    text = text if len(text) <= max_chars else text[:max_chars] + "..."
    return f"{text} ({type(value).__name__})"


def buckets(value: Any) -> tuple[int, ...]:
    try:
        return checked_sizes(value)
    except ConfigError as error:
        raise Refused(
            str(error.expected), str(error.got), fix=error.fix, part=error.what.removeprefix("buckets")
        ) from error


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refused("true or false", shown(value))
    return value


def whole(low: int, high: int) -> Check:
    """An int in [low, high]."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise Refused(f"an int from {low} to {high}", shown(value))
        return value

    return check


def number(*, at_least: float) -> Check:
    """A finite number of at least `at_least`, as a float."""

    def check(value: Any) -> float:
        valid = isinstance(value, (int, float)) and not isinstance(value, bool)
        # An int too large for a float has no finite one.
        if not valid or not (abs(value) < 1e300 and math.isfinite(value) and value >= at_least):
            raise Refused(f"a finite number of at least {at_least:g}", shown(value))
        return float(value)

    return check


def choice(*available: str, later: tuple[str, ...] = ()) -> Check:
    """One of `available`; those in `later` are known names that this version lacks."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in available:
            return value
        missing = isinstance(value, str) and value in later
        got = f"{value!r}, which this version does not have yet" if missing else shown(value)
        raise Refused(" or ".join(repr(each) for each in available), got)

    return check


def only(default: Any) -> Check:
    """Exactly `default`: the setting is known, but this version has no other value for it."""

    def check(value: Any) -> Any:
        value = tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
        if type(value) is not type(default) or value != default:
            raise Refused(f"{default!r}, the only value this version has", shown(value))
        return default

    return check


def optional(check: Check) -> Check:
    """None, or what `check` accepts."""
    return lambda value: None if value is None else check(value)


def op_names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise Refused("a non-empty list of op names, or None for all registered ops", shown(value))
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
