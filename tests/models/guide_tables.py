"""Writes the tables of the guide that come from the code: ``python tests/models/guide_tables.py``.

A table stands between ``<!-- settings -->`` or ``<!-- reasons -->`` and ``<!-- end -->``; `test_documents.py`
compares it with what is made here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from piecewise.report.record import table
from piecewise.settings.config import DEFAULT_BUCKETS, FIELDS, PiecewiseConfig
from runners.stats import FallbackReason

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
_TABLE = re.compile(r"(<!-- (settings|reasons) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def settings() -> Iterable[tuple[str, ...]]:
    """Each setting: its name, its key in a file, its default, and what its docstring says."""
    yield "setting", "in a file", "default", "what it does"
    words = _argument_texts(inspect.getdoc(PiecewiseConfig) or "")
    for item in fields(PiecewiseConfig):
        row = FIELDS[item.name]
        keys = ", ".join(f"`{key}`" for key in row.keys)
        default = "16 to 2048" if item.default is DEFAULT_BUCKETS else f"`{item.default!r}`"
        yield f"`{item.name}`", f"`[{row.table}]` {keys}", default, words[item.name]


def _argument_texts(doc: str) -> dict[str, str]:
    """Splits the `Args:` of a docstring into a text for each argument."""
    (block,) = re.findall(r"^Args:\n(.*?)^\S", doc, re.DOTALL | re.MULTILINE)
    parts = re.split(r"^    (\w+): ", block, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def reasons() -> Iterable[tuple[str, ...]]:
    """Each code of a fallback, what it means, and what to do."""
    yield "code", "what it means", "what to do"
    for reason in FallbackReason:
        yield f"`{reason.value}`", reason.explanation, reason.fix


def page(path: Path) -> str:
    """A page of the guide with its tables written anew."""

    def written(found: re.Match[str]) -> str:
        rows = {"settings": settings, "reasons": reasons}[found[2]]()
        return found[1] + table(rows, markdown=True) + found[3]

    return _TABLE.sub(written, path.read_text())


if __name__ == "__main__":
    for path in GUIDE.glob("*.md"):
        path.write_text(page(path))
