"""Finds the Python state that a trace changed, by comparison, and restores it.

Dynamo repeats forward's writes to attributes, containers and globals after the traced call, with the
backend's results. A replay would repeat none, so a forward with such writes is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import nn

_TABLES = ("_modules", "_parameters", "_buffers")


class StateSnapshot:
    """Copies containers, not their contents, each with the path under which a change is reported. Every
    module of `model` is included from the start, with the containers among its attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._entries: dict[int, tuple[str, Any, Any]] = {}
        for path, module in model.named_modules():
            names = module.__dict__
            for table in (names, *(names[name] for name in _TABLES)):
                self._add(path, table)
            for key, value in names.items():
                if key not in _TABLES:
                    self._add(f"{path}.{key}" if path else key, value)

    def add(self, path: str, value: Any) -> None:
        """Adds a container, or the attributes of an object; ignores anything else."""
        self._add(path, value)
        self._add(path, getattr(value, "__dict__", None))

    def _add(self, path: str, value: Any) -> None:
        if type(value) in (list, dict, set, deque):
            self._entries.setdefault(id(value), (path, value, value.copy()))

    def restore(self, is_same: Callable[[Any, Any], bool]) -> list[str]:
        """Restores every changed container; returns the changed paths, except where `is_same(old, new)`."""
        changed: list[str] = []
        for path, container, before in self._entries.values():
            old, now = _by_key(before), _by_key(container)
            keys = [key for key in now if key not in old]
            others = [key for key, value in old.items() if key not in now or now[key] is not value]
            if not keys and not others and (isinstance(container, set) or list(old) == list(now)):
                continue
            keys += [key for key in others if key not in now or not is_same(old[key], now[key])]
            if isinstance(container, dict):
                changed += [f"{path}.{key}" if path else str(key) for key in keys]
            elif keys:
                changed.append(path)
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        return changed


def _by_key(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return container
    return dict.fromkeys(container) if isinstance(container, set) else dict(enumerate(container))
