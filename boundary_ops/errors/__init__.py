"""Lists every refusal of the package: a class for each, with its rule and its fix, in a module for each room.

In: nothing; the package has a root of its own, because it imports neither `runners` nor `piecewise`.
Out: messages of four lines: what, expected and got, rule, fix; docs/ERRORS.md is made of them.
Read first: `BoundaryOpError`.
"""

from typing import Any, NoReturn


class BoundaryOpError(ValueError):
    """Root of this package's errors; the message names the caller's things and says what to do.

    A refusal is a subclass whose class attributes are templates for `str.format`, filled from `names`.
    What is particular to one place is given there instead, and wins.

    Args:
        what: what failed and where: op, argument, request, module path.
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
        self, what: str | None = None, *, expected: str | None = None, got: str | None = None,
        rule: str | None = None, fix: str | None = None, **names: object,
    ) -> None:  # fmt: skip
        given = {"what": what, "expected": expected, "got": got, "rule": rule, "fix": fix}
        for part, text in given.items():
            template = getattr(type(self), part)
            filled = template.format(**names) if text is None and template is not None else text
            setattr(self, part, filled)
        found = [f"{word} {text}" for word, text in (("expected", self.expected), ("got", self.got)) if text]
        lines = [f"{self.what}: {', '.join(found)}" if found else str(self.what)]
        lines += [f"  {word} {text}" for word, text in (("Rule:", self.rule), ("Fix: ", self.fix)) if text]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (type(self), str(self), self.__dict__)


def _copied(kind: type[BoundaryOpError], text: str, parts: dict[str, Any]) -> BoundaryOpError:
    """Builds a copied or unpickled error again: its templates are filled already."""
    error = kind.__new__(kind, text)
    error.__dict__.update(parts)
    return error


def refuse(kind: type[BoundaryOpError], **parts: Any) -> NoReturn:
    """Raises the error, also from inside a trace.

    Code that Dynamo may trace calls this instead of raising: once it is marked with
    `torch.compiler.assume_constant_result`, Dynamo calls it and shows the whole message of what it raises.
    """
    raise kind(**parts)
