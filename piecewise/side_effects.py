"""What Python state of the model a trace touched: found by comparing, and put back.

Dynamo replays the attribute writes of forward after the traced call, with whatever the backend returned.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

_SKIPPED = ("_modules", "_parameters", "_buffers")
_CONTAINERS = (list, dict, set)


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleSnapshot:
    """A shallow copy of each submodule's attributes, and of the lists, dicts and sets among them."""

    entries: tuple[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]], ...]

    @classmethod
    def take(cls, model: nn.Module) -> ModuleSnapshot:
        entries = []
        for path, module in model.named_modules():
            for table in (module.__dict__, *(module.__dict__[name] for name in _SKIPPED)):
                inner = {
                    k: v.copy() for k, v in table.items() if type(v) in _CONTAINERS and k not in _SKIPPED
                }
                entries.append((path, table, dict(table), inner))
        return cls(tuple(entries))

    def restore(self) -> list[str]:
        """Puts every changed entry back and returns the paths that had changed."""
        changed: list[str] = []
        for path, table, before, inner in self.entries:
            prefix = f"{path}." if path else ""
            for key in [key for key in table if key not in before]:
                changed.append(prefix + key)
                del table[key]
            for key, value in before.items():
                if table.get(key, self) is not value:
                    changed.append(prefix + key)
                    table[key] = value
            for key, value in inner.items():
                container = before[key]
                if not _same_items(container, value):
                    changed.append(prefix + key)
                    _refill(container, value)
        return changed


def _same_items(now: Any, seen: Any) -> bool:
    if len(now) != len(seen):
        return False
    if isinstance(seen, dict):
        return all(key in now and now[key] is value for key, value in seen.items())
    if isinstance(seen, list):
        return all(left is right for left, right in zip(now, seen, strict=True))
    return bool(now == seen)


def _refill(container: Any, value: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(value)
    else:
        container.update(value)
