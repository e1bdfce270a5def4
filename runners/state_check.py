"""Has anything moved or changed that the recorded graphs were made with? One pass of C-speed comparisons
[I4, I10].

A graph reads fixed addresses and holds values that Python read while tracing. Both can change behind its
back: `module.weight = other`, `.data =`, `.to()`, `swap_tensors`, a flag flipped, a submodule replaced, a
hook added. What was seen is kept in flat lists, so that checking it is a handful of `map` calls with no
Python frame per entry.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, torch.dtype, torch.device, torch.Size)
# Type, dispatch keys, dtype, device, sizes and strides of many tensors in one call; Dynamo's own guard.
_TensorGuards = torch._C._dynamo.guards.TensorGuards  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, slots=True)
class StateRef:
    """A place that holds a value, with the path that a reader would write.

    `owner[key]`, or for a place without a dict, such as a slot or a closure's cell, the attribute `key`.
    """

    owner: Any = dataclasses.field(repr=False)
    key: Any
    path: str
    is_attribute: bool = False

    def get(self) -> Any:
        """The value there now, or None where it is gone."""
        try:
            return getattr(self.owner, self.key) if self.is_attribute else self.owner[self.key]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            return None


@dataclasses.dataclass(frozen=True, slots=True)
class StateFacts:
    """What a trace saw of the model's Python state, beside tensors.

    Attributes:
        values: places of plain values, functions and containers, each with what was there.
        tables: containers whose keys (a mapping or a set) or length (a sequence) decided something, each
            with that content, as `table_content` reads it, or just its length, and its path.
        types: objects whose class decides what they do, each with its class and path.
        answers: (question, object, argument, answer, path), such as `(hasattr, module, "bias", False, ...)`.
    """

    values: tuple[tuple[StateRef, Any], ...] = ()
    tables: tuple[tuple[Any, Any, str], ...] = ()
    types: tuple[tuple[Any, type, str], ...] = ()
    answers: tuple[tuple[Callable[[Any, Any], bool], Any, Any, bool, str], ...] = ()


def table_content(table: Any) -> Any:
    """What is compared of a container: a set's items, a mapping's keys in order, a sequence's length."""
    if isinstance(table, Set):
        return frozenset(table)
    return tuple(table) if isinstance(table, Mapping) else len(table)


@dataclasses.dataclass(frozen=True, slots=True)
class StateChange:
    """The first thing found that differs: `kind` is "moved_address" or "module_state_changed"."""

    kind: str
    detail: str


class StateCheck:
    """Compares the model with what was recorded.

    Args:
        tensors: places whose tensor a graph reads at the address that it has now.
        looked_up: places whose tensor is read anew on each call; only its kind must stay: dtype, device and
            shape, as the trace may hold them as constants.
        facts: what the trace saw.
    """

    def __init__(
        self,
        *,
        tensors: Sequence[StateRef] = (),
        looked_up: Sequence[StateRef] = (),
        facts: StateFacts = StateFacts(),  # noqa: B008
    ) -> None:
        # The recorded tensors and, since `.data =` leaves a tensor another one, their storages are held: a
        # replay that began before the mismatch was noticed must never touch freed memory.
        self._tensor_refs = tuple(tensors)
        self._tensors = [ref.get() for ref in self._tensor_refs]
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._places = _Places([(ref, tensor) for ref, tensor in zip(tensors, self._tensors, strict=True)])
        self._looked_up_refs = tuple(looked_up)
        self._kinds = [_kind(tensor) for tensor in (*self._tensors, *self._looked_up())]
        self._guards: dict[bool, Any] = {}
        self._facts = facts
        self._values = [value for _, value in facts.values]
        self._value_places = _Places(list(facts.values))
        self._tables = [table for table, _, _ in facts.tables]
        self._table_sizes = [
            content if isinstance(content, int) else len(content) for _, content, _ in facts.tables
        ]
        self._keyed = [
            (table, content) for table, content, _ in facts.tables if content and not isinstance(content, int)
        ]
        self._objects = [item for item, _, _ in facts.types]
        self._types = [cls for _, cls, _ in facts.types]

    @property
    def num_entries(self) -> int:
        """How many places are compared."""
        facts = self._facts
        lists: tuple[Sequence[Any], ...] = (facts.values, facts.tables, facts.types, facts.answers)
        return len(self._kinds) + sum(map(len, lists))

    def is_unchanged(self) -> bool:
        """True where every entry is as recorded; values are compared by identity, so a miss calls for
        `find_change`."""
        try:
            return (
                self._places.are_unchanged()
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
                and self._are_of_their_kind()
                and self._value_places.are_unchanged()
                and all(map(operator.is_, map(type, self._objects), self._types))
                and list(map(len, self._tables)) == self._table_sizes
                and all(table_content(table) == content for table, content in self._keyed)
                and all(ask(item, what) is answer for ask, item, what, answer, _ in self._facts.answers)
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            return False

    def find_change(self) -> StateChange | None:
        """The first entry that differs, or None.

        An equal plain value under another identity is not a difference; it is recorded anew, so that the next
        `is_unchanged` is fast again.
        """
        return self._find_moved() or self._find_changed_value() or self._find_changed_structure()

    def _looked_up(self) -> list[Any]:
        return [ref.get() for ref in self._looked_up_refs]

    def _are_of_their_kind(self) -> bool:
        if not self._kinds:
            return True
        # The guard compares dispatch keys, which inference mode changes.
        mode = torch.is_inference_mode_enabled()
        guards = self._guards.get(mode)
        return guards is not None and bool(guards.check(*self._tensors, *self._looked_up()))

    def _find_moved(self) -> StateChange | None:
        for ref, tensor, address in zip(self._tensor_refs, self._tensors, self._addresses, strict=True):
            if ref.get() is not tensor:
                return StateChange("moved_address", f"{ref.path} was bound to another tensor")
            if tensor.data_ptr() != address:
                return StateChange("moved_address", f"the storage of {ref.path} moved")
        now = [*self._tensors, *self._looked_up()]
        refs = (*self._tensor_refs, *self._looked_up_refs)
        for position, (ref, tensor, kind) in enumerate(zip(refs, now, self._kinds, strict=True)):
            if not isinstance(tensor, torch.Tensor) or _kind(tensor) != kind:
                code = "moved_address" if position < len(self._tensors) else "module_state_changed"
                return StateChange(code, f"{ref.path} was {_described(kind)}, is {_described(_kind(tensor))}")
        if self._kinds:
            self._guards[torch.is_inference_mode_enabled()] = _TensorGuards(
                *now, dynamic_dims_sizes=None, dynamic_dims_strides=None
            )
        return None

    def _find_changed_value(self) -> StateChange | None:
        for position, (ref, _) in enumerate(self._facts.values):
            now, seen = ref.get(), self._values[position]
            if now is seen:
                continue
            if not _is_equal_value(now, seen):
                return StateChange("module_state_changed", f"{ref.path} was {_brief(seen)}, is {_brief(now)}")
            self._values[position] = now
            self._value_places.adopt(position, now)
        return None

    def _find_changed_structure(self) -> StateChange | None:
        for item, cls, path in self._facts.types:
            if type(item) is not cls:
                detail = f"{path} was a {cls.__name__}, is a {type(item).__name__}"
                return StateChange("module_state_changed", detail)
        for table, content, path in self._facts.tables:
            now = len(table) if isinstance(content, int) else table_content(table)
            if now != content:
                detail = f"the contents of {path} were {_brief(content)}, are {_brief(now)}"
                return StateChange("module_state_changed", detail)
        for ask, item, what, answer, path in self._facts.answers:
            if ask(item, what) is not answer:
                detail = f"{what!r} was {'' if answer else 'not '}in {path}"
                return StateChange("module_state_changed", detail)
        return None


class _Places:
    """Places with the objects expected there, split by how the look-up is done at C speed."""

    def __init__(self, expected: Sequence[tuple[StateRef, Any]]) -> None:
        self._in_dicts: tuple[list[dict], list[Any], list[Any]] = ([], [], [])
        self._in_lists: tuple[list[list], list[Any], list[Any]] = ([], [], [])
        self._others: tuple[list[StateRef], list[Any]] = ([], [])
        self._index: list[tuple[list[Any], int]] = []
        for ref, value in expected:
            group: Any = self._others
            if not ref.is_attribute and type(ref.owner) in (dict, list):
                group = self._in_dicts if type(ref.owner) is dict else self._in_lists
            entry = (ref, value) if group is self._others else (ref.owner, ref.key, value)
            self._index.append((group[-1], len(group[-1])))
            for column, item in zip(group, entry, strict=True):
                column.append(item)

    def are_unchanged(self) -> bool:
        dicts, dict_keys, in_dicts = self._in_dicts
        lists, indices, in_lists = self._in_lists
        refs, in_others = self._others
        return (
            all(map(operator.is_, map(dict.get, dicts, dict_keys), in_dicts))
            and all(map(operator.is_, map(operator.getitem, lists, indices), in_lists))
            and all(map(operator.is_, map(StateRef.get, refs), in_others))
        )

    def adopt(self, position: int, value: Any) -> None:
        column, index = self._index[position]
        column[index] = value


def _kind(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, strides


def _described(kind: Any) -> str:
    if kind is None:
        return "gone"
    _, dtype, device, shape, strides = kind
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device} with strides {strides}"


def _is_equal_value(now: Any, seen: Any) -> bool:
    # repr tells 0.0 from -0.0, also inside of tuples.
    return (
        type(now) is type(seen)
        and isinstance(seen, _PLAIN)
        and bool(now == seen)
        and (isinstance(seen, frozenset) or repr(now) == repr(seen))
    )


def _brief(value: Any) -> str:
    text = repr(value) if not isinstance(value, torch.nn.Module) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
