"""What Python state a trace touched: found by comparing, and put back.

Dynamo replays the writes of forward to attributes, lists, dicts and globals after the traced call, with
whatever the backend returned. A replay would run none of them, so a forward that has any is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import nn

_TABLES = ("_modules", "_parameters", "_buffers")
_CONTAINERS = (list, dict, set, deque)


class StateSnapshot:
    """Shallow copies of containers, each with the path under which a change in it is reported.

    Attribute tables are dicts like others. Every module of `model` is in it from the start, with the
    containers among its attributes; what else Dynamo is about to write is added by `add`.
    """

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
        """Adds a container, or the attributes of an object; anything else is left out."""
        self._add(path, value)
        self._add(path, getattr(value, "__dict__", None))

    def _add(self, path: str, value: Any) -> None:
        if type(value) in _CONTAINERS:
            self._entries.setdefault(id(value), (path, value, value.copy()))

    def restore(self, is_same: Callable[[Any, Any], bool]) -> list[str]:
        """Puts every changed container back and returns the paths that had changed.

        Args:
            is_same: asked of what was somewhere and what is there, for two objects.
        """
        changed: list[str] = []
        for path, container, before in self._entries.values():
            if isinstance(container, dict):
                changed += _restore_dict(path, container, before, is_same)
            elif _items(container) != _items(before):
                is_set, same_length = isinstance(container, set), len(container) == len(before)
                if is_set or not same_length or not all(map(_either(is_same), before, container)):
                    changed.append(path)
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(before)
        return changed


def _either(is_same: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda old, new: old is new or is_same(old, new)


def _restore_dict(
    path: str, table: dict[Any, Any], before: dict[Any, Any], is_same: Callable[[Any, Any], bool]
) -> list[str]:
    keys = [key for key in table if key not in before]
    others = [key for key, value in before.items() if key not in table or table[key] is not value]
    if keys or others or list(table) != list(before):
        keys += [key for key in others if key not in table or not is_same(before[key], table[key])]
        table.clear()
        table.update(before)
    return [f"{path}.{key}" if path else str(key) for key in keys]


def _items(container: Any) -> Any:
    """What is compared of a container: which objects it holds, in order, or what a set holds."""
    return container if isinstance(container, set) else [*map(id, container)]
