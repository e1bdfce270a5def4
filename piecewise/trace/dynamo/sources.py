"""Looks up Dynamo's sources: Python expressions, in the names L and G, for the places that a trace read.

``L['model']._modules['layers']._modules['0'].eps`` splits into owners and keys, so the present value is one
look-up away, without `nn.Module.__getattr__`. The earlier steps must lead to the same objects, too: replacing
a whole config object leaves the old one unchanged.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from piecewise import torch_api
from runners.state.state_check import InnerRef, StateRef

_MODULE_TABLES = ("_modules", "_parameters", "_buffers")
# Functions that some sources call for an item or an attribute.
_ITEMS = ("dict.__getitem__", "list.__getitem__", "tuple.__getitem__", "___odict_getitem")
_ATTRIBUTES = ("object.__getattribute__", "getattr")


def readable_path(source: str) -> str:
    """Writes ``L['model']._modules['head']._parameters['weight']`` as ``model.head.weight``."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    text = re.sub(r"^dict\(type\((.*)\)\.__dict__\)\['([^']*)'\]", r"\1.\2", text)
    text = re.sub(r"^G\['__import_([^']*)'\]", lambda found: found[1].replace("_dot_", "."), text)
    text = re.sub(r"^G\['__builtins_dict[^']*'\]", "builtins", text)
    text = re.sub(r"^[LG]\['([^']*)'\]", r"\1", text)
    return re.sub(r"\['?([^'\]]*)'?\]", r".\1", text)


def source_reader(sources: Iterable[str], global_names: Mapping[str, Any]) -> Callable[..., tuple]:
    """Compiles sources into one function from L to their values."""
    text = f"lambda L: ({''.join(f'{source}, ' for source in sources)})"
    return eval(text, {**torch_api.names_in_sources(), "G": global_names})  # Dynamo's own source text


def owner_and_name(source: str) -> tuple[str, str]:
    """Splits ``owner.name`` or ``getattr(owner, 'name')`` into the owner's source and the name."""
    _, owner, name = _taken_apart(_parsed(source))
    return owner.text, name


def _parsed(source: str) -> Any:
    """Parses a source; each node gets its own `text`, since `ast.unparse` takes seconds in all."""
    root: Any = ast.parse(source, mode="eval").body
    encoded = source.encode()
    for node in ast.walk(root):
        if isinstance(node, ast.expr):
            node.text = encoded[node.col_offset : node.end_col_offset].decode()  # type: ignore[attr-defined]
    return root


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Describes one step of a guard's source, and what makes the step lead to its value.

    Attributes:
        value: what was there.
        place: where one look-up finds the value again until somebody changes it; None for a step without one.
        facts: what else decides the value, as arguments of `FactFinder`'s methods ``add_<first item>``.
        is_fresh: whether each look-up makes a new object, which identity cannot compare.
    """

    value: Any
    place: StateRef | None = None
    facts: tuple[tuple[Any, ...], ...] = ()
    is_fresh: bool = False


class Scope:
    """Evaluates sources step by step, in the names L and G; `known` maps sources to objects."""

    def __init__(
        self,
        local_names: Mapping[str, Any],
        global_names: Mapping[str, Any],
        known: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._names = {"L": local_names, "G": global_names}
        self._known = {source: Step(value) for source, value in known.items()}
        self._steps: dict[str, list[Step]] = {}  # many guards are of one source
        self._class_tables: dict[type, Any] = {}

    def find(self, source: str) -> Step:
        """Looks up the last step of a source; raises KeyError, AttributeError and the like."""
        return self._find(_parsed(source))

    def steps(self, source: str) -> list[Step]:
        """Looks up each step of a source, the whole source first; raises as `find`."""
        return self._steps[source] if source in self._steps else self._steps_of(_parsed(source))

    def steps_to(self, source: str) -> list[Step]:
        """Looks up each step; empty if the source is no Python, leads nowhere, or a property raises."""
        try:
            return self.steps(source)
        except Exception:
            return []

    def reader(self, sources: Sequence[str]) -> Callable[[], tuple[Any, ...]]:
        """Makes a function that reads the present values at some sources."""
        read = source_reader(sources, self._names["G"])
        local_names = self._names["L"]  # alone, as the steps hold the tensors of now
        return lambda: read(local_names)

    def class_table(self, cls: type) -> Mapping[str, Any]:
        """Makes a live view of a class's own attributes, one view per class."""
        return self._class_tables.setdefault(cls, MappingProxyType(vars(cls)))

    def _steps_of(self, node: Any) -> list[Step]:
        if node.text not in self._steps:
            owner = _taken_apart(node)[1]
            rest = self._steps_of(owner) if owner is not None and owner.text not in self._names else []
            self._steps[node.text] = [self._find(node), *rest]
        return self._steps[node.text]

    def _find(self, node: Any) -> Step:
        if node.text not in self._known:
            self._known[node.text] = self._look_up(node, node.text)
        return self._known[node.text]

    def _key(self, node: Any) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:  # a key that is an object, such as a member of an enum
            return self._find(node).value

    def _look_up(self, node: Any, text: str) -> Step:
        if text in self._names:
            return Step(self._names[text])
        kind, owner_node, key = _taken_apart(node)
        if kind == "other":  # Dynamo's own source text
            return Step(eval(text, {**torch_api.names_in_sources(), **self._names}), is_fresh=True)
        owner_text = owner_node.text
        holder = self._find(owner_node)
        owner, path = holder.value, readable_path(owner_text)
        if kind == "item":
            # The step before has compared the contents of L, G and lists of members.
            if owner_text in self._names or _taken_apart(owner_node)[0] == "members":
                return Step(owner[self._key(key)])
            hiding = tuple(self._hidden_by(owner_node, self._key(key)))
            return dataclasses.replace(_item(owner, self._key(key), text), facts=hiding)
        if kind == "members":
            members = list(dict.keys(owner)) if isinstance(owner, dict) else list(owner)
            return Step(members, facts=(("table", owner, path),))
        if kind == "type":
            return Step(type(owner), facts=(("type", owner, path),))
        if isinstance(owner, type) and key == "__dict__":
            return Step(self.class_table(owner))
        found = _attribute(owner, key, readable_path(text), path)
        if isinstance(owner, torch.Tensor) and None not in (found.place, holder.place):
            # Reached through the tensor's place, since `.to()` gives a subclass other inner tensors.
            return dataclasses.replace(found, place=InnerRef(holder.place, key, readable_path(text)))
        return found

    def _hidden_by(self, table_node: Any, name: Any) -> Iterator[Any]:
        """Finds what would hide an item: classes earlier in the MRO, attributes before parameters."""
        _, base_node, table = _taken_apart(table_node)
        if base_node is None:
            return
        base = self._find(base_node).value
        if table in _MODULE_TABLES and isinstance(base, nn.Module):
            yield "answer", operator.contains, vars(base), name, readable_path(base_node.text)
        found = re.fullmatch(r"(.*)\.__mro__\[(\d+)\]", base_node.text)
        if found is not None and isinstance(base, type):
            for cls in self.find(found[1]).value.__mro__[: int(found[2])]:
                yield "answer", operator.contains, self.class_table(cls), name, cls.__name__


def _item(owner: Any, key: Any, text: str) -> Step:
    is_there = isinstance(owner, dict) and dict.__contains__(owner, key)  # some dicts make what they lack
    value = dict.__getitem__(owner, key) if is_there else owner[key]
    place = StateRef(owner, key, readable_path(text))
    return Step(value, place) if place.look() is value else Step(value, is_fresh=True)


def _attribute(owner: Any, name: str, path: str, owner_path: str) -> Step:
    of_class = ("type", owner, owner_path)
    if name == "__class__" and owner.__class__ is type(owner):
        return Step(type(owner), facts=(of_class,))
    names = getattr(owner, "__dict__", None)
    if type(names) is dict and not isinstance(owner, type):
        if name == "__dict__":
            return Step(names, facts=(of_class,))
        if name in names:
            # A property of the class would come first; Dynamo reads only the attributes of modules.
            is_hidable = not isinstance(owner, (nn.Module, ModuleType)) and not hasattr(type(owner), name)
            hiding: Any = ("answer", hasattr, type(owner), name, type(owner).__name__)
            facts = (of_class, hiding) if is_hidable else (of_class,)
            return Step(names[name], StateRef(names, name, path), facts=facts)
    value = getattr(owner, name)
    if isinstance(owner, MethodType) and name in ("__self__", "__func__"):
        return Step(value)  # a method keeps both for good
    if isinstance(value, MethodType) and value.__self__ is owner and not isinstance(owner, type):
        # Each look-up makes a new object from the class's attribute.
        place = StateRef(type(owner), name, path, is_attribute=True)
        if place.look() is value.__func__:
            hiding = ("answer", operator.contains, names, name, owner_path)
            facts = (("value", place, value.__func__), of_class)
            return Step(value, facts=(*facts, hiding) if isinstance(names, dict) else facts)
    place = StateRef(owner, name, path, is_attribute=True)
    return Step(value, place) if place.look() is value else Step(value, is_fresh=True)


def _taken_apart(node: Any) -> tuple[str, Any, Any]:
    """Splits a node into the kind of step, the owner, and the key (a node) or attribute."""
    if isinstance(node, ast.Attribute):
        return "attribute", node.value, node.attr
    if isinstance(node, ast.Subscript):
        is_slice = isinstance(node.slice, ast.Slice)
        return ("other", node.value, None) if is_slice else ("item", node.value, node.slice)
    if not isinstance(node, ast.Call) or not node.args:
        return "other", None, None
    call: Any = node
    name, rest = call.func.text, call.args[1:]
    owner: Any = call.args[0]
    if name in _ITEMS and len(rest) == 1:
        return "item", owner, rest[0]
    if name in _ATTRIBUTES and len(rest) == 1 and isinstance(rest[0], ast.Constant):
        return "attribute", owner, str(rest[0].value)
    if name == "type" and not rest:
        return "type", owner, None
    if name == "dict" and isinstance(owner, ast.Attribute) and owner.attr == "__dict__":
        return "attribute", owner.value, "__dict__"
    if name == "list" and isinstance(owner, ast.Call) and ast.unparse(owner.func) == "dict.keys":
        return "members", owner.args[0], None
    if name == "list":
        return "members", owner, None
    return "other", owner, None


def resolve(source: str, scope: Scope) -> StateRef | None:
    """Finds the (owner, key) behind a source; None if it does not end in an attribute, key or index."""
    try:
        return scope.find(source).place
    except Exception:  # of nothing there, or of the user's
        return None
