"""Writes docs/ERRORS.md, the list of every refusal: ``python tests/models/error_table.py``.

A refusal is a class with a rule and a fix, in `runners/errors.py`, a module of `piecewise/errors` or
`boundary_ops/errors`. `test_error_table.py` demands that each is raised by a test, and compares the document.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import pkgutil
from types import ModuleType

import boundary_ops.errors
import piecewise.errors
import runners.errors
from boundary_ops.errors import BoundaryOpError
from runners.errors import PiecewiseError

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "ERRORS.md"

HEAD = """# Every refusal, its rule and its fix

This page is generated from the classes that are raised: `python tests/models/error_table.py`. A message says
first what failed and where, what was expected and what was found, then the rule and the fix. Names in braces
are filled in. Each class can be caught by its own name or by that of its root, given in brackets.
"""


def modules() -> list[ModuleType]:
    """The modules that hold refusals."""
    found = []
    for root in (piecewise.errors, runners.errors, boundary_ops.errors):
        found.append(root)
        for each in pkgutil.iter_modules(getattr(root, "__path__", []), root.__name__ + "."):
            found.append(importlib.import_module(each.name))
    return found


def refusals(module: ModuleType) -> list[type[Exception]]:
    """The classes of a module that name a rule, in the order of the source."""
    classes = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__ and issubclass(each, PiecewiseError | BoundaryOpError)
    ]
    own = [each for each in classes if each.rule is not None or each.fix is not None]
    return sorted(own, key=lambda each: inspect.getsourcelines(each)[1])


def root_of(refusal: type[Exception]) -> str:
    """The name of the public class that a refusal is caught by."""
    public = (base for base in refusal.__mro__[1:] if not getattr(base, "rule", None))
    return next(public).__name__


def when(refusal: type[Exception]) -> str:
    """When a refusal is raised: its docstring, or the first line of its message, which says the same."""
    if refusal.__doc__:
        return refusal.__doc__.split("\n\n")[0]
    parts = [f"{word} {text}" for word in ("expected", "got") if (text := getattr(refusal, word))]
    return ": ".join(filter(None, (refusal.what, ", ".join(parts))))


def cell(text: str | None) -> str:
    return " ".join((text or "").replace("{{", "{").replace("}}", "}").split()).replace("|", "\\|")


def document() -> str:
    parts = [HEAD]
    for module in modules():
        found = refusals(module)
        if not found:
            continue
        parts.append(f"## `{module.__name__}`\n")
        parts.append("| class | when | rule | fix |\n|---|---|---|---|")
        for each in found:
            row = (f"`{each.__name__}` ({root_of(each)})", cell(when(each)), cell(each.rule), cell(each.fix))
            parts.append("| " + " | ".join(row) + " |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
