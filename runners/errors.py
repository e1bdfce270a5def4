"""Errors that a user or a model can cause, each in four lines: what, expected and got, rule, fix.

`PiecewiseError` is the root for `runners` and `piecewise` (which re-exports it). `boundary_ops` has a root
of its own, because neither package imports the other.
"""

from __future__ import annotations

from typing import Any


class PiecewiseError(Exception):
    """Root of this project's errors; the message names the user's things and says what to do.

    A refusal is a subclass whose class attributes are templates for `str.format`, filled from `names`.
    What is particular to one place is given there instead, and wins.

    Args:
        what: what failed and where: argument, op, module path, source line, bucket.
        expected: what was needed there. Left out when there is no one right value.
        got: what was found instead.
        rule: the rule that was broken.
        fix: what the reader can do about it.
        names: values for the templates.
    """

    what: str | None = None
    expected: str | None = None
    got: str | None = None
    rule: str | None = None
    fix: str | None = None

    def __init__(
        self,
        what: str | None = None,
        *,
        expected: str | None = None,
        got: str | None = None,
        rule: str | None = None,
        fix: str | None = None,
        **names: object,
    ) -> None:
        given = {"what": what, "expected": expected, "got": got, "rule": rule, "fix": fix}
        for part, text in given.items():
            template = getattr(type(self), part)
            filled = template.format(**names) if text is None and template is not None else text
            setattr(self, part, filled)
        found = ", ".join(
            f"{word} {getattr(self, word)}" for word in ("expected", "got") if getattr(self, word)
        )
        lines = [f"{self.what}: {found}" if found else str(self.what)]
        lines += [f"  {word} {text}" for word, text in (("Rule:", self.rule), ("Fix: ", self.fix)) if text]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (type(self), str(self), self.__dict__)


def _copied(kind: type[PiecewiseError], text: str, parts: dict[str, Any]) -> PiecewiseError:
    """Builds a copied or unpickled error again: its templates are filled already."""
    error = kind.__new__(kind, text)
    error.__dict__.update(parts)
    return error


class ConfigError(PiecewiseError, ValueError):
    """A configuration field, option, environment variable or bucket file is wrong."""


class TraceError(PiecewiseError):
    """The model's forward cannot be traced into one graph with this example."""


class TokenDimError(PiecewiseError):
    """The token dim is absent, ambiguous or specialised to the example's size."""


class SplitError(PiecewiseError):
    """The traced graph cannot be cut into segments, or `strict` refuses the cut."""


class CaptureError(PiecewiseError):
    """A segment cannot be recorded: it reads a value back, makes host tensors or changes shape with data."""


class StateError(PiecewiseError, RuntimeError):
    """A method was called in the wrong order, from the wrong thread or outside the capture window."""


def told(error: BaseException) -> str:
    """An error of any kind in one line: its class and the first line of its text, 300 characters at most."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def short(value: object, max_chars: int = 60) -> str:
    """A user's value as text, short whatever it is: an int of more than 4300 digits has no repr, and a text
    may be megabytes."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    text = repr(value[: max_chars + 1] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def shown(value: object) -> str:
    """`value`, short, and its type."""
    return f"{short(value, 80)} ({type(value).__name__})"
