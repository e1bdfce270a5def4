"""Has anything moved or changed that the recorded graphs were made with? One pass of C-speed comparisons
[I4, I10].

A graph reads fixed addresses and holds values that Python read while tracing. Both can change behind its
back: `module.weight = other`, `.data =`, `.to()`, `swap_tensors`, a flag flipped, a submodule replaced, a
hook added. The list of what was seen is flat, so that checking it is a handful of `map` calls with no
Python frame per entry.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class StateRef:
    """A place that holds a value: `owner[key]`, with the path that a reader would write."""

    owner: Any = dataclasses.field(repr=False)
    key: Any
    path: str

    def get(self) -> Any:
        """The value there now, or None where the key is gone."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.key)
        return self.owner[self.key] if -len(self.owner) <= self.key < len(self.owner) else None


@dataclasses.dataclass(frozen=True, slots=True)
class StateChange:
    """The first thing found that differs: `kind` is "moved_address" or "module_state_changed"."""

    kind: str
    detail: str


class StateCheck:
    """Compares the model with what was recorded.

    Args:
        tensors: places whose tensor a graph reads at its recorded address.
        values: places of plain values, each with the value seen.
        hooks: hook tables; a hook added or removed changes what a call computes.
    """

    def __init__(
        self,
        *,
        tensors: Sequence[StateRef] = (),
        values: Sequence[tuple[StateRef, Any]] = (),
        hooks: Sequence[dict] = (),
    ) -> None:
        self._tensor_refs = tuple(tensors)
        self._tensors = [ref.get() for ref in self._tensor_refs]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        in_dicts = [(ref, value) for ref, value in values if isinstance(ref.owner, dict)]
        self._value_refs = [ref for ref, _ in in_dicts] + [
            ref for ref, _ in values if not isinstance(ref.owner, dict)
        ]
        self._values = [ref.get() for ref in self._value_refs]
        self._owners = [ref.owner for ref in self._tensor_refs]
        self._keys = [ref.key for ref in self._tensor_refs]
        self._dicts = [ref.owner for ref, _ in in_dicts]
        self._dict_keys = [ref.key for ref, _ in in_dicts]
        self._dict_values = self._values[: len(in_dicts)]
        self._rest = list(zip(self._value_refs[len(in_dicts) :], self._values[len(in_dicts) :], strict=True))
        self._hooks = tuple(hooks)
        self._hook_sizes = list(map(len, self._hooks))
        self._hook_keys = [tuple(table) for table in self._hooks]
        self._hooked = [
            (table, keys) for table, keys in zip(self._hooks, self._hook_keys, strict=True) if keys
        ]

    @property
    def num_entries(self) -> int:
        return len(self._tensor_refs) + len(self._value_refs) + len(self._hooks)

    def is_unchanged(self) -> bool:
        """True where every entry is as recorded; values are compared by identity, so a miss calls for
        `find_change`."""
        try:
            return (
                all(map(operator.is_, map(operator.getitem, self._owners, self._keys), self._tensors))
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
                and all(map(operator.is_, map(dict.get, self._dicts, self._dict_keys), self._dict_values))
                and list(map(len, self._hooks)) == self._hook_sizes
                and all(ref.get() is value for ref, value in self._rest)
                and all(tuple(table) == keys for table, keys in self._hooked)
            )
        except (KeyError, IndexError, TypeError):
            return False

    def find_change(self) -> StateChange | None:
        """The first entry that differs, or None.

        An equal plain value under another identity is not a difference; it is recorded anew, so that the next
        `is_unchanged` is fast again.
        """
        for ref, tensor, address in zip(self._tensor_refs, self._tensors, self._addresses, strict=True):
            now = ref.get()
            if now is not tensor:
                return StateChange("moved_address", f"{ref.path} was bound to another tensor")
            if tensor.data_ptr() != address:
                return StateChange("moved_address", f"the storage of {ref.path} moved")
        for position, (ref, seen) in enumerate(zip(self._value_refs, self._values, strict=True)):
            now = ref.get()
            if now is not seen and not _is_equal_value(now, seen):
                return StateChange("module_state_changed", f"{ref.path} was {_brief(seen)}, is {_brief(now)}")
            self._adopt(position, now)
        for table, keys in zip(self._hooks, self._hook_keys, strict=True):
            if tuple(table) != keys:
                return StateChange("module_state_changed", "a forward hook was added or removed")
        return None

    def _adopt(self, position: int, value: Any) -> None:
        self._values[position] = value
        if position < len(self._dict_values):
            self._dict_values[position] = value
        else:
            index = position - len(self._dict_values)
            self._rest[index] = (self._rest[index][0], value)


def _is_equal_value(now: Any, seen: Any) -> bool:
    plain = (bool, int, float, complex, str, bytes, tuple, frozenset, torch.dtype, torch.device)
    return type(now) is type(seen) and isinstance(seen, plain) and bool(now == seen)


def _brief(value: Any) -> str:
    text = repr(value) if not isinstance(value, torch.nn.Module) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
