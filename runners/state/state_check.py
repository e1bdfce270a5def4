"""Compares the model with what its graphs were recorded with, in one pass of C-speed comparisons [I4, I10].

A graph reads fixed addresses and holds values that Python read while tracing. Both can change behind its
back: `module.weight = other`, `.data =`, `.to()`, `swap_tensors`, a flag flipped, a submodule replaced, a
hook added. What lies in plain dicts, nearly all of it, is compared by the dicts' versions
(`watched_dicts.py`). The rest is kept in flat lists, so that checking it is a handful of `map` calls with no
Python frame per entry; what cannot change, such as an item of a tuple, is not compared. Each tensor is asked
for its address and its geometry: no version tells of `.data =`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from runners._torch import tensor_guard
from runners.state.same_value import content_like, has_content, is_same_value
from runners.state.watched_dicts import NOTHING, DictVersions, WatchedDicts

# What they hold is theirs for good.
_IMMUTABLE = (tuple, str, bytes, frozenset, range)
# Their truth is that they hold anything.
_CONTAINERS = (dict, OrderedDict, list, set, deque)
# How to look → columns: its arguments, and the very object expected.
_Columns: TypeAlias = dict[Callable[..., Any], tuple[list[Any], ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class StateRef:
    """Names a place that holds a value: `owner[key]`, or the attribute `key` of an owner without a dict."""

    owner: Any = dataclasses.field(repr=False)
    key: Any
    path: str
    is_attribute: bool = False

    def get(self) -> Any:
        """Reads the value there now; None where it is gone."""
        value = self.look()
        return None if value is NOTHING else value

    def look(self) -> Any:
        """Reads the value there now; `NOTHING`, which is not even None, where a look-up raises."""
        try:
            return getattr(self.owner, self.key) if self.is_attribute else self.owner[self.key]
        except Exception:
            return NOTHING


@dataclasses.dataclass(frozen=True, slots=True)
class InnerRef(StateRef):
    """Names an attribute of the tensor subclass that is found at the place `owner` at each look."""

    def look(self) -> Any:
        try:
            return getattr(self.owner.look(), self.key)
        except Exception:
            return NOTHING


def _identity(item: Any) -> int:
    """Tells objects apart; a view of a class's names, which each trace makes anew, is what it shows."""
    while isinstance(item, MappingProxyType):
        item = gc.get_referents(item)[0]
    return id(item)


def _place_key(ref: StateRef) -> tuple[int, Any, bool]:
    return _identity(ref.owner), ref.key, ref.is_attribute


class _TensorOf:
    """Stands for a tensor that was at a place, by its `kind_of`: facts outlive graphs, and hold none."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kind = kind_of(tensor)

    def __repr__(self) -> str:
        return "another tensor"


@dataclasses.dataclass(frozen=True, slots=True)
class StateFacts:
    """Holds what a trace saw of the model's Python state.

    Attributes:
        values: places of plain values, functions and containers, each with what was there; of tensors the
            `kind_of`, as a `StateCheck` takes the tensor that it finds.
        tensors: places of tensors of which forward read no element, each with its `kind_of`.
        tables: containers whose keys (a mapping or a set) or length (a sequence) decided something, each
            with its `table_content`, or just its length, and its path.
        types: objects whose class decides what they do, each with its class and path.
        answers: (question, object, argument, answer, path), such as `(hasattr, module, "bias", False, ...)`.
    """

    values: tuple[tuple[StateRef, Any], ...] = ()
    tensors: tuple[tuple[StateRef, Any], ...] = ()
    tables: tuple[tuple[Any, Any, str], ...] = ()
    types: tuple[tuple[Any, type, str], ...] = ()
    answers: tuple[tuple[Callable[[Any, Any], bool], Any, Any, bool, str], ...] = ()

    def __post_init__(self) -> None:
        seen = ((ref, _TensorOf(v) if isinstance(v, torch.Tensor) else v) for ref, v in self.values)
        object.__setattr__(self, "values", tuple(seen))

    def beyond(self, others: StateFacts) -> StateFacts:
        """The facts of places, containers, objects and questions of which `others` has none."""
        known = {_place_key(ref) for ref, _ in (*others.values, *others.tensors)}
        tables, types = ({_identity(each[0]) for each in column} for column in (others.tables, others.types))
        asked = {(ask, _identity(item), what) for ask, item, what, *_ in others.answers}
        return StateFacts(
            tuple(each for each in self.values if _place_key(each[0]) not in known),
            tuple(each for each in self.tensors if _place_key(each[0]) not in known),
            tuple(each for each in self.tables if _identity(each[0]) not in tables),
            tuple(each for each in self.types if _identity(each[0]) not in types),
            tuple(each for each in self.answers if (each[0], _identity(each[1]), each[2]) not in asked),
        )

    def tensor_places(self) -> list[StateRef]:
        return [ref for ref, _ in self.tensors] + [ref for ref, v in self.values if isinstance(v, _TensorOf)]


@dataclasses.dataclass(frozen=True, slots=True)
class StateChange:
    """Describes the first difference: `kind` is "moved_address" or "module_state_changed"."""

    kind: str
    detail: str


_state_change = functools.partial(StateChange, "module_state_changed")


class StateCheck:
    """Compares the model with what was recorded.

    Args:
        tensors: places whose tensor a graph reads at the address that it has now.
        looked_up: places whose tensor is read anew on each call; only its kind must stay: dtype, device and
            shape, as the trace may hold them as constants.
        facts: what the trace saw.
        dict_versions: how to compare dicts by version, where that is to be had.
    """

    def __init__(
        self, *, tensors: Sequence[StateRef] = (), looked_up: Sequence[StateRef] = (),
        facts: StateFacts = StateFacts(), dict_versions: DictVersions | None = None,  # noqa: B008
    ) -> None:  # fmt: skip
        # The recorded tensors and, since `.data =` leaves a tensor another one, their storages are held: a
        # replay that began before the mismatch was noticed must never touch freed memory.
        self._tensor_refs = tuple(tensors)
        self._tensors = [ref.get() for ref in self._tensor_refs]
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._looked_up_refs = (*looked_up, *(ref for ref, _ in facts.tensors))
        self._looked_up = _look_up(self._looked_up_refs)
        self._kinds = [kind_of(tensor) for tensor in (*self._tensors, *_look_up(looked_up)())]
        self._kinds += [kind for _, kind in facts.tensors]
        self._num_looked_up = len(set(map(id, self._looked_up())))
        # One for the recorded tensors and one for those looked up, per mode. It fails where two are one.
        self._guards: dict[bool, tuple[Any, Any]] = {}
        self._facts = facts
        self._values = [_recorded(ref, value) for ref, value in facts.values]
        self._dicts = WatchedDicts(dict_versions)
        self._columns: _Columns = {}
        self._answers: _Columns = {}  # of answers, which may be compared by value: that is quicker
        self._holders: dict[int, Any] = {}
        for ref, tensor in zip(self._tensor_refs, self._tensors, strict=True):
            self._add_value(ref, tensor)
        places = [ref for ref, _ in facts.values]
        self._value_columns = list(map(self._add_value, places, self._values))
        self._attributes = [getattr(item, "__dict__", None) for item, _, _ in facts.types]
        for (item, cls, _), attributes in zip(facts.types, self._attributes, strict=True):
            if type(attributes) is dict:
                self._dicts.add_object(item, cls)
            else:
                _add(self._columns, type, item, cls)
        self._empty: list[Any] = []
        self._tables: list[tuple[Any, Any]] = []
        for table, content, _ in facts.tables:
            self._add_table(table, content)
        for ask, item, what, answer, _ in facts.answers:
            self._add_answer(ask, item, what, answer)
        self._looks = [(look, columns[:-1], columns[-1]) for look, columns in self._columns.items()]
        self._questions = [(ask, columns[:-1], columns[-1]) for ask, columns in self._answers.items()]

    @property
    def num_entries(self) -> int:
        facts = self._facts
        return len([*self._kinds, *facts.values, *facts.tables, *facts.types, *facts.answers])

    def is_unchanged(self) -> bool:
        """Whether every entry is as recorded, compared by identity: after a miss call `find_change`."""
        try:
            return (
                self._dicts.are_unchanged()
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
                and self._recorded_fit()
                and self.looked_up_fit()
                and not any(self._empty)
                and all(all(map(operator.is_, map(look, *where), seen)) for look, where, seen in self._looks)
                and all(list(map(ask, *what)) == answers for ask, what, answers in self._questions)
                and all(has_content(table, content) for table, content in self._tables)
            )
        except Exception:  # a look-up of something that is gone, or of the user's
            return False

    def looked_up_fit(self) -> bool:
        """Whether each tensor read anew is there and of its kind: enough where results may be dropped."""
        if not self._looked_up_refs:
            return True
        guards = self._guards.get(torch.is_inference_mode_enabled())
        try:
            return guards is not None and bool(guards[1].check(*self._looked_up()))
        except Exception:
            return False

    def until_stable(self) -> None:
        """Compares until comparisons take their quick way, in the mode of now."""
        if not self.is_unchanged() and self.find_change() is None:
            self.is_unchanged()

    def find_change(self) -> StateChange | None:
        """Finds the first entry that differs, or None; records equal values of another identity anew."""
        changes = itertools.chain(self._changed_values(), self._changed_structure())
        return self.find_moved() or next(map(_state_change, changes), None)

    def _add_value(self, ref: StateRef, value: Any) -> tuple[list[Any], int]:
        """Adds a place; returns where the expected object is kept: a list and an index into it."""
        if isinstance(ref, InnerRef):
            return self._add_inner(ref, value)
        if not ref.is_attribute and type(ref.owner) is dict:
            return self._dicts.add_value(ref.owner, ref.key, value)
        if not ref.is_attribute and type(ref.owner) in _IMMUTABLE and ref.look() is value:
            return [value], 0
        if value is NOTHING:  # the look-ups in C raise
            return _add(self._columns, StateRef.look, ref, value)
        look = getattr if ref.is_attribute else operator.getitem
        return _add(self._columns, look, ref.owner, ref.key, value)

    def _add_inner(self, ref: InnerRef, value: Any) -> tuple[list[Any], int]:
        """Adds an attribute of a subclass, which must stay the one that it is now, and of its class."""
        holder = ref.owner.get()
        attributes: Any = getattr(holder, "__dict__", None)
        is_plain = type(attributes) is dict
        if holder is not None and id(holder) not in self._holders:
            self._holders[id(holder)] = holder
            self._add_value(ref.owner, holder)
            if is_plain:
                self._dicts.add_object(holder, type(holder))
        if is_plain and attributes.get(ref.key) is value and not hasattr(type(holder), ref.key):
            return self._dicts.add_value(attributes, ref.key, value)
        return _add(self._columns, getattr, holder, ref.key, value)

    def _add_table(self, table: Any, content: Any) -> None:
        size = content if isinstance(content, int) else len(content)
        if size == 0 and type(table) in _CONTAINERS:
            self._empty.append(table)
        elif type(table) is dict:
            self._dicts.add_answer(table, functools.partial(has_content, table, content), True)
        elif type(table) not in _IMMUTABLE or len(table) != size:
            self._tables.append((table, content))

    def _add_answer(self, ask: Callable[[Any, Any], bool], item: Any, what: Any, answer: bool) -> None:
        is_member = ask is operator.contains
        if is_member and type(item) is dict:
            self._dicts.add_answer(item, functools.partial(ask, item, what), answer)
        elif not (is_member and type(item) in _IMMUTABLE and ask(item, what) is answer):
            _add(self._answers, ask, item, what, answer)

    def _recorded_fit(self) -> bool:
        if not self._tensors:
            return True
        # The guard compares dispatch keys, which inference mode changes.
        guards = self._guards.get(torch.is_inference_mode_enabled())
        return guards is not None and bool(guards[0].check(*self._tensors))

    def holds_only(self, owned: Set[int]) -> bool:
        """Whether the recorded tensors and modules are all among the objects with these ids."""
        modules = (value for value in self._values if isinstance(value, torch.nn.Module))
        return all(id(each) in owned for each in (*self._tensors, *modules))

    def find_moved(self) -> StateChange | None:
        """Finds the first recorded tensor that is another one, or elsewhere, or of another kind."""
        for ref, tensor, address in zip(self._tensor_refs, self._tensors, self._addresses, strict=True):
            if ref.get() is not tensor:
                return StateChange("moved_address", f"{ref.path} was bound to another tensor")
            if tensor.data_ptr() != address:
                return StateChange("moved_address", f"the storage of {ref.path} moved")
        now = [*self._tensors, *self._looked_up()]
        refs = (*self._tensor_refs, *self._looked_up_refs)
        for position, (ref, tensor, kind) in enumerate(zip(refs, now, self._kinds, strict=True)):
            if not isinstance(tensor, torch.Tensor) or kind_of(tensor) != kind:
                found = f"{ref.path} was {_described(kind)}, is {_described(kind_of(tensor))}"
                is_recorded = position < len(self._tensors)
                return StateChange("moved_address", found) if is_recorded else _state_change(found)
        count = len(self._tensors)
        if len(set(map(id, now[count:]))) < self._num_looked_up:
            return _state_change(_first_met_twice(refs[count:], now[count:]))
        if self._kinds:
            guards = tensor_guard(now[:count]), tensor_guard(now[count:])
            self._guards[torch.is_inference_mode_enabled()] = guards
        return None

    def _changed_values(self) -> Iterator[str]:
        for position, (ref, _) in enumerate(self._facts.values):
            now, seen = ref.look(), self._values[position]
            if not is_same_value(now, seen):
                yield f"{ref.path} was {_brief(seen)}, is {_brief(now)}"
            column, index = self._value_columns[position]
            self._values[position] = column[index] = now

    def _changed_structure(self) -> Iterator[str]:
        for (item, cls, path), attributes in zip(self._facts.types, self._attributes, strict=True):
            if type(item) is not cls:
                yield f"{path} was a {cls.__name__}, is a {type(item).__name__}"
            if type(attributes) is dict and item.__dict__ is not attributes:
                yield f"the attributes of {path} were replaced as a whole"
        for table, content, path in self._facts.tables:
            if not has_content(table, content):
                now = _answer(content_like, content, table)
                yield f"the contents of {path} were {_brief(content)}, are {_brief(now)}"
        for ask, item, what, answer, path in self._facts.answers:
            if _answer(ask, item, what) is not answer:
                yield f"{_brief(what)} was {'' if answer else 'not '}in {path}"


def _add(columns: _Columns, look: Callable[..., Any], *entry: Any) -> tuple[list[Any], int]:
    """Adds an entry; returns where its last item is kept: a list and an index into it."""
    found = columns.setdefault(look, tuple([] for _ in entry))
    for column, item in zip(found, entry, strict=True):
        column.append(item)
    return found[-1], len(found[-1]) - 1


def _recorded(ref: StateRef, value: Any) -> Any:
    """Finds what is to be at a place from now on."""
    if isinstance(value, _TensorOf):
        now = ref.look()
        return now if isinstance(now, torch.Tensor) and kind_of(now) == value.kind else value
    # What was recorded as None may be nothing at all.
    return NOTHING if value is None and ref.look() is NOTHING else value


def _answer(ask: Callable[[Any, Any], Any], item: Any, what: Any) -> Any:
    """Asks; `NOTHING` where a property or container of the user's raises."""
    try:
        return ask(item, what)
    except Exception:
        return NOTHING


def _look_up(refs: Sequence[StateRef]) -> Callable[[], Iterable[Any]]:
    """Makes a reader of some places, without a Python frame for those in dicts."""
    if all(not ref.is_attribute and type(ref.owner) is dict for ref in refs):
        return functools.partial(map, dict.get, [ref.owner for ref in refs], [ref.key for ref in refs])
    return functools.partial(map, StateRef.get, refs)


def _first_met_twice(refs: Sequence[StateRef], tensors: Sequence[Any]) -> str:
    """Says which tensors were several and are one now."""
    met: dict[int, str] = {}
    for ref, tensor in zip(refs, tensors, strict=True):
        if met.setdefault(id(tensor), ref.path) != ref.path:
            return f"{ref.path} is the tensor of {met[id(tensor)]}, and was another"
    return "two tensors of the model became one"


def kind_of(tensor: Any) -> Any:
    """Describes a tensor by what must stay where it is read anew on each call; None for what is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        return None
    try:
        strides = tensor.stride() if tensor.layout is torch.strided else None
        # What is conjugated or negated only where it is read has the memory of what is not.
        bits = tensor.is_conj(), tensor.is_neg()
        return type(tensor), tensor.dtype, tensor.device, tensor.shape, strides, bits
    except Exception:  # a subclass without a shape
        return None


def _described(kind: Any) -> str:
    if kind is None:
        return "gone"
    _, dtype, device, shape, strides, bits = kind
    lazily = ", conjugated" * bits[0] + ", negated" * bits[1]
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device} with strides {strides}{lazily}"


def _brief(value: Any) -> str:
    """Shows a value in 60 characters."""
    if isinstance(value, (torch.nn.Module, torch.Tensor)):  # whose repr takes long, or waits for a device
        text = f"a {type(value).__name__}"
    elif isinstance(value, tuple):
        text = f"({', '.join(map(_brief, value[:4]))}{', ...' if value[4:] else ''})"
    elif isinstance(value, (list, dict, set, frozenset)) and not _is_plain_inside(value):
        text = f"a {type(value).__name__} of {len(value)}"
    else:
        text = _answer(lambda each, _: repr(each), value, None)
        if text is NOTHING or " at 0x" in text:  # an address tells nobody anything
            text = f"a {type(value).__name__} {getattr(value, '__qualname__', '')}".rstrip()
    return text if len(text) <= 60 else text[:57] + "..."


def _is_plain_inside(value: Any) -> bool:
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(isinstance(item, (type(None), int, float, str)) for item in items)
