"""What a trace read from the model: tensors by recorded path, and Python state that it holds as constants.

Dynamo guards each thing that it read, under a source such as
``L['model']._modules['layers']._modules['0'].eps``. The last step of that path gives an owner (a dict or
an object) and a key, so the current value is one look-up away and needs no `nn.Module.__getattr__`. The
steps before it must lead where they led, too: a config object that is replaced as a whole leaves the old
one as it was. Run time compares all of it with what the trace saw [I4, I10].
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from piecewise.structure import PLAIN
from piecewise.torch_internals import SeenGuard, dispatch_keys
from runners.state_check import StateFacts, StateRef, table_content

_VALUES = frozenset(
    {"CONSTANT_MATCH", "CONSTANT_SUBCLASS_MATCH", "EQUALS_MATCH", "ID_MATCH", "NONE_MATCH", "BOOL_MATCH",
     "CLOSURE_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "NN_MODULE"}
)  # fmt: skip
_TABLES = frozenset(
    {"SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK", "DICT_VERSION", "EMPTY_NN_MODULE_HOOKS_DICT"}
)
# Here the value may change freely, but the path must lead to it: what was read lies inside.
_PATHS = frozenset({"TYPE_MATCH", "NOT_NONE_MATCH", "TENSOR_MATCH"})
_MEMBERS = frozenset({"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"})
_ATTRIBUTES = frozenset({"HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"})
_MODULE_TABLES = ("_modules", "_parameters", "_buffers")
# Inputs, which the signature compares; builtins; hooks that are none of forward's or are listed elsewhere.
_NOISE = re.compile(r"^L\['(?!model'\])|^G\['__builtins|\._backward(_pre)?_hooks$|_hooks_with_kwargs$")
# What looking up a source raises where there is nothing.
_NOT_FOUND = (SyntaxError, ValueError, KeyError, IndexError, AttributeError, TypeError, NameError)
# Code that nobody changes between two calls; reading its globals would only be noise.
_SETTLED = frozenset({"torch", "builtins"}) | frozenset(sys.stdlib_module_names) - {"__main__"}


def readable_path(source: str) -> str:
    """``L['model']._modules['layers']._modules['0']._parameters['weight']`` → ``model.layers.0.weight``."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    text = re.sub(r"^dict\(type\((.*)\)\.__dict__\)\['([^']*)'\]", r"\1.\2", text)
    text = re.sub(r"^G\['__import_([^']*)'\]", lambda found: found[1].replace("_dot_", "."), text)
    text = re.sub(r"^[LG]\['([^']*)'\]", r"\1", text)
    return re.sub(r"\['?([^'\]]*)'?\]", r".\1", text)


class Scope:
    """Evaluates Dynamo's sources step by step, in the names that they are written in."""

    def __init__(self, local_names: Mapping[str, Any], global_names: Mapping[str, Any]) -> None:
        self._names = {"L": local_names, "G": global_names}
        self._known: dict[str, tuple[Any, StateRef | None]] = {}
        self._steps: dict[str, list[tuple[Any, StateRef | None]]] = {}  # many guards are of one source

    def find(self, source: str) -> tuple[Any, StateRef | None]:
        """The value at a source, and its place where one look-up in something lasting finds it again.

        Raises:
            KeyError, AttributeError and the like: there is nothing there.
        """
        return self._find(ast.parse(source, mode="eval").body)

    def steps(self, source: str) -> list[tuple[Any, StateRef | None]]:
        """What `find` gives for each step of the path, the whole one first."""
        if source not in self._steps:
            self._steps[source] = self._steps_of(_as_attribute(ast.parse(source, mode="eval").body))
        return self._steps[source]

    def values_along(self, guard: SeenGuard) -> list[Any]:
        """The values at each step of the way to what a guard looks at."""
        try:
            return [value for value, _ in self.steps(_owner_and_attribute(guard, guard.source)[0])]
        except _NOT_FOUND:
            return []

    def _steps_of(self, node: Any) -> list[tuple[Any, StateRef | None]]:
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            text = _text_of(node)
            if text not in self._steps:
                self._steps[text] = [self._find(node, text), *self._steps_of(_as_attribute(node.value))]
            return self._steps[text]
        return self.steps(_text_of(node.args[-1])) if isinstance(node, ast.Call) and node.args else []

    def _find(self, node: Any, text: str = "") -> tuple[Any, StateRef | None]:
        text = text or _text_of(node)
        if text not in self._known:
            self._known[text] = self._look_up(node, text)
        return self._known[text]

    def _key(self, node: Any) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:  # a key that is an object, such as a member of an enum
            return self._find(node)[0]

    def _look_up(self, node: Any, text: str) -> tuple[Any, StateRef | None]:
        if text in self._names:
            return self._names[text], None
        if isinstance(node, ast.Subscript):
            owner, key = self._find(node.value)[0], self._key(node.slice)
            value = owner[key]
            is_root = any(owner is names for names in self._names.values())
            return value, None if is_root else StateRef(owner, key, readable_path(text))
        if isinstance(node, ast.Attribute):
            owner = self._find(node.value)[0]
            names = getattr(owner, "__dict__", None)
            if isinstance(names, dict) and node.attr in names:
                return names[node.attr], StateRef(names, node.attr, readable_path(text))
            value = getattr(owner, node.attr)
            return value, StateRef(owner, node.attr, readable_path(text), is_attribute=True)
        class_table = re.fullmatch(r"dict\(type\((.*)\)\.__dict__\)|type\((.*)\)\.__dict__", text)
        if class_table:
            owner = self.find(class_table[1] or class_table[2])[0]
            return MappingProxyType(vars(type(owner))), None
        return eval(text, dict(self._names)), None  # Dynamo's own source text


def resolve(source: str, scope: Scope) -> StateRef | None:
    """The (owner, key) behind a source; None where the path does not end in an attribute, key or index."""
    try:
        return scope.find(source)[1]
    except _NOT_FOUND:
        return None


class FactFinder:
    """Collects facts, each place once: those of the module tree at first.

    Args:
        skip_root: leave out what belongs to the call of the root and not to its forward.
    """

    def __init__(self, model: nn.Module, *, skip_root: bool) -> None:
        self._values: dict[Any, tuple[StateRef, Any]] = {}
        self._tables: dict[int, tuple[Any, Any, str]] = {}
        self._types: dict[int, tuple[Any, type, str]] = {}
        self._answers: dict[Any, tuple[Callable[[Any, Any], bool], Any, Any, bool, str]] = {}
        self._add_module_tree(model, skip_root=skip_root)

    def facts(self) -> StateFacts:
        found: Any = (self._values, self._tables, self._types, self._answers)
        return StateFacts(*(tuple(each.values()) for each in found))

    def add_value(self, ref: StateRef, value: Any) -> None:
        self._values.setdefault((id(ref.owner), ref.key, ref.is_attribute), (ref, value))

    def add_table(self, table: Any, path: str, *, length_only: bool = False) -> None:
        content = len(table) if length_only else table_content(table)
        self._tables.setdefault(id(table), (table, content, path))

    def add_answer(self, ask: Callable[[Any, Any], bool], item: Any, what: Any, path: str) -> None:
        self._answers.setdefault((ask, id(item), what), (ask, item, what, ask(item, what), path))

    def _add_module_tree(self, model: nn.Module, *, skip_root: bool) -> None:
        """What changes the meaning of any module, read by the trace or not: its class, submodules, training
        flag, hooks and a forward of its own."""
        for path, module in model.named_modules():
            name = f"model.{path}" if path else "model"
            names = module.__dict__
            for key, child in module._modules.items():
                self.add_value(StateRef(module._modules, key, f"{name}.{key}"), child)
            # The values above say which keys these are.
            self.add_table(module._modules, f"the submodules of {name}", length_only=True)
            for key in _MODULE_TABLES:
                self.add_value(StateRef(names, key, f"{name}.{key}"), names[key])
            self.add_value(StateRef(names, "training", f"{name}.training"), module.training)
            self._types.setdefault(id(module), (module, type(module), name))
            if path or not skip_root:
                self.add_value(StateRef(names, "forward", f"{name}.forward"), names.get("forward"))
                self.add_table(module._forward_hooks, f"the forward hooks of {name}")
                self.add_table(module._forward_pre_hooks, f"the forward pre-hooks of {name}")
            owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)
            if owner is not None:
                ref = StateRef(owner, "forward", f"{owner.__name__}.forward", is_attribute=True)
                self.add_value(ref, ref.get())
        self.add_table(module_hooks._global_forward_hooks, "the global forward hooks")
        self.add_table(module_hooks._global_forward_pre_hooks, "the global forward pre-hooks")

    def _add_class(self, cls: type, path: str) -> None:
        """Plain attributes of a class that forward names: torch 2.11 takes them for constants, unguarded."""
        for base in cls.__mro__ if isinstance(cls, type) else ():
            if base.__module__.partition(".")[0] in _SETTLED:
                continue
            for name, value in vars(base).items():
                if isinstance(value, (int, *PLAIN)) and not name.startswith("__"):
                    ref = StateRef(base, name, f"{path}.{name}", is_attribute=True)
                    self.add_value(ref, value)

    def add_guard(self, guard: SeenGuard, scope: Scope) -> None:
        """Adds what one guard of the trace says, and the path that leads to it."""
        known = _VALUES | _TABLES | _PATHS | _MEMBERS | _ATTRIBUTES
        if guard.kind not in known or _NOISE.search(guard.source):
            return
        source, attribute = _owner_and_attribute(guard, guard.source)
        try:
            (value, ref), *path = scope.steps(source) or [(None, None)]
        except _NOT_FOUND:
            return
        if any(_is_settled(step) for step in (value, *(step for step, _ in path))):
            return
        if guard.kind in _VALUES or guard.kind in _PATHS:
            path = [(value, ref), *path]
        elif guard.kind in _TABLES and _is_table(value):
            self.add_table(value, readable_path(source))
        elif guard.kind in _MEMBERS:
            self.add_answer(operator.contains, value, guard.arguments["key"], readable_path(source))
        elif guard.kind == "HASATTR":
            self.add_answer(hasattr, value, attribute, readable_path(source))
        elif attribute != "forward":  # which `_add_module_tree` compares
            self.add_answer(operator.contains, value.__dict__, attribute, readable_path(source))
        if guard.kind == "CLASS_MATCH":
            self._add_class(value, readable_path(source))
        if guard.kind in ("CONSTANT_MATCH", "EQUALS_MATCH") and isinstance(value, (set, list, dict)):
            self.add_table(value, readable_path(source))
        for step, place in path:
            if place is not None and _is_lasting(step, place):
                self.add_value(place, step)


def _owner_and_attribute(guard: SeenGuard, source: str) -> tuple[str, Any]:
    """Where a guard looks, and at which attribute, where it asks for one."""
    attribute = guard.arguments.get("attr")
    if guard.kind == "HASATTR" and attribute is None:  # torch 2.11 names the attribute in the source
        source, _, attribute = source.rpartition(".")
    return source, attribute


# Guards of what no layer has for itself.
_GLOBAL = frozenset(
    {"GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "TORCH_FUNCTION_STATE", "GLOBAL_STATE", "DEFAULT_DEVICE",
     "FSDP_TRAINING_STATE", "SHAPE_ENV", "AUTOGRAD_SAVED_TENSORS_HOOKS"}
)  # fmt: skip
_BY_VALUE = frozenset({"CONSTANT_MATCH", "CONSTANT_SUBCLASS_MATCH", "EQUALS_MATCH", "BOOL_MATCH"})
_BY_IDENTITY = frozenset(
    {"ID_MATCH", "NONE_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "BUILTIN_MATCH",
     "MODULE_MATCH", "DICT_VERSION"}
)  # fmt: skip


def is_asked_of(guard: SeenGuard) -> bool:
    """Whether a guard asks about what its source leads to, and not about the process."""
    return guard.kind not in _GLOBAL


def looked_at(guard: SeenGuard) -> tuple[str, ...]:
    """Python source of what a guard compares: one expression, or two that are to be one object."""
    source = _owner_and_attribute(guard, guard.source)[0]
    return (source, guard.other) if guard.other else (source,)


def is_same_to(guard: SeenGuard, seen: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether a guard that held for `seen` holds for `found`: values of what it looks at."""
    if guard.other:
        return found[0] is found[1]
    (old,), (new,), kind = seen, found, guard.kind
    if kind == "TENSOR_MATCH":
        return _is_same_kind(old, new)
    if kind == "TENSOR_SUBCLASS_METADATA_MATCH":  # of one class: TYPE_MATCH and TENSOR_MATCH say so
        return bool(old.__tensor_flatten__() == new.__tensor_flatten__())
    if kind in _BY_VALUE:
        same = type(old) is type(new) and (old is new or bool(old == new))
        return same and (not isinstance(old, (float, complex)) or repr(old) == repr(new))  # -0.0 == 0.0
    if kind in _BY_IDENTITY:
        return old is new
    if kind in ("TYPE_MATCH", "NOT_NONE_MATCH"):
        return type(old) is type(new)
    if kind in _TABLES:
        return type(old) is type(new) and bool(table_content(old) == table_content(new))
    if kind in _MEMBERS:
        return (guard.arguments["key"] in old) == (guard.arguments["key"] in new)
    attribute = _owner_and_attribute(guard, guard.source)[1]
    if kind == "HASATTR":
        return hasattr(old, attribute) == hasattr(new, attribute)
    if kind == "NOT_PRESENT_IN_GENERIC_DICT":
        return (attribute in old.__dict__) == (attribute in new.__dict__)
    return False


def _is_same_kind(seen: Any, found: Any) -> bool:
    def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
        return (
            type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, tensor.stride(),
            tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
            dispatch_keys(tensor),
        )  # fmt: skip

    both = isinstance(seen, torch.Tensor) and isinstance(found, torch.Tensor)
    return both and kind(seen) == kind(found)


def _is_settled(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _SETTLED


def _is_table(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, torch.Tensor)


def _is_lasting(value: Any, place: StateRef) -> bool:
    """Whether the place gives the same object each time it is asked, as long as nobody changes it.

    Tensors have addresses of their own to compare, and a bound method is made anew by each look-up.
    """
    if isinstance(value, (torch.Tensor, ModuleType, MethodType)) or place.key in _MODULE_TABLES:
        return False
    return place.get() is value


def _text_of(node: Any) -> str:
    """What `ast.unparse` gives, which takes seconds for the paths of a deep model."""
    if isinstance(node, ast.Name):
        return node.id
    value = getattr(node, "value", None)
    if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(node, ast.Attribute):
            return f"{_text_of(value)}.{node.attr}"
        key = node.slice if isinstance(node, ast.Subscript) else None
        if isinstance(key, ast.Constant) and type(key.value) in (str, int):
            return f"{_text_of(value)}[{key.value!r}]"
    return ast.unparse(node)


def _as_attribute(node: Any) -> Any:
    """`object.__getattribute__(owner, "name")`, as torch 2.11 writes some sources, as `owner.name`."""
    if (
        isinstance(node, ast.Call)
        and _text_of(node.func) == "object.__getattribute__"
        and isinstance(node.args[-1], ast.Constant)
    ):
        return ast.Attribute(_as_attribute(node.args[0]), str(node.args[-1].value), ast.Load())
    return node
