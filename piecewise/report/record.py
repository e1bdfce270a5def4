"""Turns reports into JSON and tables, in one way for all of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar


class Record:
    """Gives dataclasses of reports their JSON; `derived` names properties to include beside the fields."""

    __slots__ = ()
    derived: ClassVar[tuple[str, ...]] = ()

    def asdict(self) -> dict[str, Any]:
        """Returns plain values; numbers that JSON lacks (infinities, NaN) become their names."""
        names = [item.name for item in dataclasses.fields(self)]  # type: ignore[arg-type]
        return {name: plain(getattr(self, name)) for name in (*names, *self.derived)}

    def to_json(self) -> str:
        """Returns `asdict()` as JSON."""
        return json.dumps(self.asdict(), indent=2)


def plain(value: Any) -> Any:
    """Converts records, dataclasses, mappings, lists and numbers, nested too, to JSON's types."""
    if isinstance(value, Record):
        return value.asdict()
    if dataclasses.is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def table(rows: Iterable[Sequence[object]], *, markdown: bool = False) -> str:
    """Formats rows in aligned columns, or as Markdown; the first row is the heading."""
    texts = [list(map(str, row)) for row in rows]
    if markdown:
        head, *lines = [f"| {' | '.join(row)} |" for row in texts]
        return "\n".join([head, "|" + "---|" * len(texts[0]), *lines])
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)


def shown_bytes(count: int) -> str:
    """Formats a size in bytes with binary units."""
    if count < 2**10:
        return f"{count} B"
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"
