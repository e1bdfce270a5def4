"""Errors that a user or a model can cause, each in four lines: what, expected and got, rule, fix.

`PiecewiseError` is the root for `runners` and `piecewise` (which re-exports it). `boundary_ops` has a root
of its own, because neither package imports the other.
"""

from __future__ import annotations


class PiecewiseError(Exception):
    """Root of this project's errors; the message names the user's things and says what to do.

    Args:
        what: what failed and where: argument, op, module path, source line, bucket.
        expected: what was needed there. Left out when there is no one right value.
        got: what was found instead.
        rule: the rule that was broken, citing an invariant such as ``[I1]`` where there is one.
        fix: what the reader can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        rule: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.expected, self.got, self.rule, self.fix = what, expected, got, rule, fix
        found = ", ".join(
            f"{word} {value}" for word, value in (("expected", expected), ("got", got)) if value
        )
        lines = [f"{what}: {found}" if found else what]
        lines += [f"  {word} {value}" for word, value in (("Rule:", rule), ("Fix: ", fix)) if value]
        super().__init__("\n".join(lines))


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


def one_line(error: BaseException) -> str:
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
