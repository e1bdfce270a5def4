"""Errors of the boundary ops, each in four lines: what, expected and got, rule, fix.

The package has a root of its own, because it imports neither `runners` nor `piecewise`.
"""

from __future__ import annotations

from typing import NoReturn

from boundary_ops.declare.whole_numbers import whole_number


class BoundaryOpError(ValueError):
    """Root of this package's errors; the message names the caller's things and says what to do.

    Args:
        what: what failed and where: op, argument, request, module path.
        expected: what was needed there. Left out when there is no one right value.
        got: what was found instead.
        rule: the rule that was broken.
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


class CacheExhaustedError(BoundaryOpError):
    """A `PagedKVCache` has too few free blocks; nothing was reserved and nothing was lost."""


def check_positive(what: str, value: object, rule: str, fix: str) -> int:
    """The value as an int; raises unless it is one, of 1 or more."""
    number = whole_number(value)
    if number is None or number < 1:
        raise BoundaryOpError(what, expected="a positive int", got=repr(value), rule=rule, fix=fix)
    return number


def refuse(what: str, expected: str, got: str, rule: str, fix: str) -> NoReturn:
    """Raises a `BoundaryOpError`, also from inside a trace.

    Code that Dynamo may trace calls this instead of raising: once it is marked with
    `torch.compiler.assume_constant_result`, Dynamo calls it and shows the whole message of what it raises.
    """
    raise BoundaryOpError(what, expected=expected, got=got, rule=rule, fix=fix)
