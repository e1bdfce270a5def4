"""Turns Dynamo's guards into facts: what a trace read of the model, for each call to compare [I4, I10].

Each guard has a source (`sources.py`) and a kind with a rule (`guard_kinds.py`); each place becomes one fact.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from piecewise import torch_api
from piecewise.calls.structure import PLAIN
from piecewise.trace.dynamo import guard_kinds
from piecewise.trace.dynamo.guard_kinds import Lookup, Rule, is_asked_of, owner_and_attribute
from piecewise.trace.dynamo.sources import Scope, Step, readable_path
from runners.errors import PiecewiseError
from runners.state.same_value import table_content
from runners.state.state_check import InnerRef, StateFacts, StateRef, kind_of


def has_adapters(module: nn.Module) -> bool:
    """Whether a module is a layer with PEFT's adapters; a transformers model has methods of these names."""
    names = getattr(module, "active_adapters", None)
    return isinstance(names, (list, tuple)) and isinstance(getattr(module, "disable_adapters", None), bool)


def adapters_in_use(model: nn.Module) -> str:
    """Writes "adapters a, b", "adapter a (merged)" or "no adapter", for a report; empty without any."""
    active: dict[str, None] = {}
    merged: dict[str, None] = {}
    layers: list[Any] = [module for module in model.modules() if has_adapters(module)]
    for layer in layers:
        merged |= dict.fromkeys(map(str, getattr(layer, "merged_adapters", None) or ()))
        active |= {} if layer.disable_adapters else dict.fromkeys(map(str, layer.active_adapters))
    found = [f"{name} (merged)" for name in merged] + [name for name in active if name not in merged]
    if not found:
        return "no adapter" if layers else ""
    return f"adapter{'s' if len(found) > 1 else ''} {', '.join(found)}"


_MODULE_TABLES = ("_modules", "_parameters", "_buffers")
# Inputs, which the signature compares; hooks that forward does not have, or that are listed elsewhere.
_NOISE = re.compile(r"\bL\['(?!model'\])|\._backward(_pre)?_hooks$|_hooks_with_kwargs$")
# Packages whose classes have nothing that a model sets.
_SETTLED = frozenset({"torch", "builtins"}) | frozenset(sys.stdlib_module_names) - {"__main__"}
_HEAP_TYPE = 1 << 9  # of `type.__flags__`: the class of its objects may be set
# Depth to which attributes of tensor subclasses are compared, except for what is in these.
_MAX_DEPTH = 4
_CLOSED = (int, *PLAIN, type, ModuleType, FunctionType, MethodType, torch.Tensor)


class FactFinder:
    """Collects facts, each place once; starts with the module tree, without the root's call if `skip_root`.
    `classes` holds the classes of all objects on the way to what was read and of the model's modules;
    `functions` holds the functions that were read."""

    def __init__(self, model: nn.Module, *, skip_root: bool) -> None:
        self.values: dict[Any, tuple[StateRef, Any]] = {}
        self._tensors: dict[Any, tuple[StateRef, Any]] = {}
        self._tables: dict[Any, tuple[Any, Any, str]] = {}
        self._types: dict[int, tuple[Any, type, str]] = {}
        self._answers: dict[Any, tuple[Callable[[Any, Any], bool], Any, Any, bool, str]] = {}
        self.classes: dict[type, None] = {}
        self.functions: dict[int, FunctionType] = {}
        self._contents: dict[int, Any] = {}
        self._tree = {id(module): path for path, module in model.named_modules()}
        self._adapted = {id(vars(module)) for module in model.modules() if has_adapters(module)}
        self._add_module_tree(model, skip_root=skip_root)

    def facts(self) -> StateFacts:
        found: Any = (self.values, self._tensors, self._tables, self._types, self._answers)
        return StateFacts(*(tuple(each.values()) for each in found))

    def add_value(self, ref: StateRef, value: Any) -> None:
        place = id(ref.owner), ref.key, ref.is_attribute
        is_named = type(value) is list and all(type(item) is str for item in value)
        if is_named and id(ref.owner) in self._adapted:
            # Each switch of adapters makes a new, equal list of names.
            self._answers.setdefault(place, (_holds_names, ref, tuple(value), True, ref.path))
        else:
            self.values.setdefault(place, (ref, value))
        self.add_code(value, ref.path)

    def add_table(self, table: Any, path: str) -> None:
        self._tables.setdefault(id(table), (table, table_content(table), path))

    def add_type(self, item: Any, path: str) -> None:
        """Adds the class of an object, and the identity of its `__dict__`, if these may be set."""
        if type(item).__flags__ & _HEAP_TYPE and not isinstance(item, (type, torch.Tensor)):
            self._types.setdefault(id(item), (item, type(item), path))

    def add_answer(self, ask: Callable[[Any, Any], bool], item: Any, what: Any, path: str) -> None:
        self._answers.setdefault((ask, id(item), what), (ask, item, what, ask(item, what), path))

    def add_code(self, value: Any, path: str) -> None:
        """Adds the parts of a function or of a method's function; ignores anything else."""
        function = value.__func__ if isinstance(value, MethodType) else value
        if not isinstance(function, FunctionType) or id(function) in self.functions:
            return
        self.functions[id(function)] = function
        ref = StateRef(function, "__code__", f"the code of {path}", is_attribute=True)
        self.add_value(ref, function.__code__)
        for key in ("__defaults__", "__kwdefaults__"):  # torch 2.11 guards no default by itself
            if (defaults := getattr(function, key)) is not None:
                self.add_value(StateRef(function, key, f"{path}.{key}", is_attribute=True), defaults)
        self._add_items(function.__kwdefaults__, function.__kwdefaults__ or {}, f"{path}.__kwdefaults__")

    def add_parameters(self, forward: Any) -> None:
        """Adds what `inspect.signature` reads: defaults replace arguments that are not passed."""
        while forward is not None:
            function = getattr(forward, "__func__", forward)
            self.add_code(function, "forward")
            forward = getattr(function, "__wrapped__", None)

    def _add_module_tree(self, model: nn.Module, *, skip_root: bool) -> None:
        for path, module in model.named_modules():
            name = f"model.{path}" if path else "model"
            names = module.__dict__
            for key, child in module._modules.items():
                self.add_value(StateRef(module._modules, key, f"{name}.{key}"), child)
            self.add_table(module._modules, f"the submodules of {name}")
            for key in _MODULE_TABLES:
                self.add_value(StateRef(names, key, f"{name}.{key}"), names[key])
            self.add_value(StateRef(names, "training", f"{name}.training"), module.training)
            self._types.setdefault(id(module), (module, type(module), name))
            self.classes[type(module)] = None
            if path or not skip_root:
                self.add_value(StateRef(names, "forward", f"{name}.forward"), names.get("forward"))
                self._add_hooks(names, "", name)
            owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)
            if owner is not None:
                ref = StateRef(owner, "forward", f"{owner.__name__}.forward", is_attribute=True)
                self.add_value(ref, ref.get())
        self._add_hooks(vars(module_hooks), "_global", "every module")

    def _add_hooks(self, names: Mapping[str, Any], prefix: str, owner: str) -> None:
        for kind, title in (("_forward_pre_hooks", "forward pre-hooks"), ("_forward_hooks", "forward hooks")):
            hooks = names[prefix + kind]
            self.add_table(hooks, f"the {title} of {owner}")
            for key, hook in hooks.items():
                self.add_value(StateRef(hooks, key, f"a hook among the {title} of {owner}"), hook)
            for how in ("_with_kwargs", "_always_called") if hooks else ():
                if f"{prefix}{kind}{how}" in names:
                    self.add_table(names[f"{prefix}{kind}{how}"], f"the {title} of {owner} ({how})")

    def _add_class(self, cls: type, path: str) -> None:
        """Adds plain attributes of a class: torch 2.11 takes them for constants and guards none."""
        for base in cls.__mro__ if isinstance(cls, type) else ():
            if base.__module__.partition(".")[0] in _SETTLED:
                continue
            for name, value in vars(base).items():
                if isinstance(value, (int, *PLAIN)) and not name.startswith("__"):
                    ref = StateRef(base, name, f"{path}.{name}", is_attribute=True)
                    self.add_value(ref, value)

    def add_guard(self, guard: torch_api.SeenGuard, scope: Scope) -> None:
        """Adds one guard of the trace and the path that leads to it; raises if no call could compare it."""
        rule = guard_kinds.rule_of(guard)
        if rule is Rule.REFUSED:
            raise guard_kinds.refusal(guard)
        sources = (owner_and_attribute(guard)[0], *filter(None, [guard.other]))
        if not is_asked_of(guard) or any(map(_NOISE.search, sources)):
            return
        try:
            paths = [scope.steps(source) for source in sources]
            for steps in paths:
                self._add_path(steps)
            if any(step.is_fresh for steps in paths for step in steps):
                self._add_lookup(guard, scope)
            elif rule is not Rule.SAME_OBJECT:
                self._add_leaf(guard, rule, paths[0][0], readable_path(sources[0]), scope)
        except PiecewiseError:
            raise
        except Exception as error:
            raise guard_kinds.refusal(guard) from error

    def _add_path(self, steps: Iterable[Step]) -> None:
        """Adds what makes each step lead to the next; a tensor at the end may be replaced."""
        for position, step in enumerate(steps):
            cls = step.value if isinstance(step.value, type) else type(step.value)
            self.classes[cls] = None
            if _answers_itself(cls):  # an attribute of the object's own would hide that
                self.add_table(getattr(step.value, "__dict__", ()), readable_path(f"vars({cls.__name__})"))
            for kind, *fact in step.facts:
                getattr(self, f"add_{kind}")(*fact)
            if step.place is not None and (position or not isinstance(step.value, torch.Tensor)):
                self.add_value(step.place, step.value)

    def _add_lookup(self, guard: torch_api.SeenGuard, scope: Scope) -> None:
        self.add_answer(Lookup.holds, Lookup(guard, scope), None, readable_path(guard.source))

    def _add_leaf(self, guard: torch_api.SeenGuard, rule: Rule, leaf: Step, path: str, scope: Scope) -> None:
        """Adds what a guard asks beyond the identity of the object at its path."""
        value, attribute = leaf.value, owner_and_attribute(guard)[1]
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and leaf.place is not None and (guard.kind == "HASATTR" or rule is Rule.ATTRIBUTE):
            # Asked of the tensor at the time of the call; the fact holds no tensor.
            ask = _has_attribute if guard.kind == "HASATTR" else _has_own_attribute
            self.add_answer(ask, leaf.place, attribute, path)
        elif is_tensor and rule in (Rule.TENSOR, Rule.TYPE, Rule.VALUE, Rule.METADATA):
            if leaf.place is not None:
                self._tensors.setdefault((id(leaf.place.owner), leaf.place.key), (leaf.place, kind_of(value)))
            for key, item in guard_kinds.metadata_of(value).items() if rule is Rule.METADATA else ():
                ref = None if leaf.place is None else InnerRef(leaf.place, key, f"{path}.{key}")
                self.add_value(ref or StateRef(vars(value), key, f"{path}.{key}"), item)
                self._add_content(item, f"{path}.{key}", _MAX_DEPTH)
        elif rule is Rule.CODE:
            self.add_code(value, path)
        elif rule is Rule.TYPE:
            self.add_type(value, path)
        elif rule is Rule.CONTENT and hasattr(value, "__len__") and not is_tensor:
            self.add_table(value, path)
            if guard.kind == "DICT_VERSION":
                self._add_items(value, value, path)
        elif rule is Rule.MEMBER:
            self.add_answer(operator.contains, value, guard.arguments["key"], path)
        elif guard.kind == "HASATTR":
            self.add_answer(hasattr, value, attribute, path)
        elif rule is Rule.ATTRIBUTE:
            if attribute != "forward" or id(value) not in self._tree:  # the module tree has those
                self.add_answer(operator.contains, value.__dict__, attribute, path)
        elif rule is Rule.OPAQUE and torch_api.opaque_answer(value) is not None:
            self._add_lookup(guard, scope)
        elif rule is Rule.VALUE and isinstance(value, (set, list, dict)):
            self.add_table(value, path)
            if not isinstance(value, set):
                self._add_items(value, dict(value if isinstance(value, dict) else enumerate(value)), path)
        if guard.kind == "CLASS_MATCH":
            self._add_class(value, path)

    def _add_items(self, owner: Any, items: Mapping[Any, Any], path: str) -> None:
        for key, item in items.items():
            self.add_value(StateRef(owner, key, f"{path}[{key!r}]"), item)

    def _add_content(self, value: Any, path: str, depth: int) -> None:
        """Adds the contents of a tensor subclass's attribute, such as a block size or a layout."""
        if not depth or id(value) in self._contents or isinstance(value, _CLOSED):
            return
        self._contents[id(value)] = value
        attributes = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(value, (list, dict, set)):
            self.add_table(value, path)
        else:
            self.add_type(value, path)
        owners: list[Any] = [(value, dict(enumerate(value)))] if isinstance(value, (list, tuple)) else []
        owners += [(attributes, dict(attributes))] if isinstance(attributes, dict) else []
        for owner, items in owners:
            for key, item in items.items():
                self.add_value(StateRef(owner, key, f"{path}.{key}"), item)
                self._add_content(item, f"{path}.{key}", depth - 1)


def _answers_itself(cls: type) -> bool:
    """Whether a class has `__getattr__`; lazy namespaces such as `torch.ops` hide nothing."""
    is_namespace = issubclass(cls, (nn.Module, ModuleType)) or cls.__module__.partition(".")[0] in _SETTLED
    return not is_namespace and isinstance(getattr(cls, "__getattr__", None), FunctionType)


def _holds_names(place: StateRef, names: tuple[str, ...]) -> bool:
    now = place.get()
    return type(now) is list and all(type(item) is str for item in now) and tuple(now) == names


def _has_attribute(place: StateRef, name: str) -> bool:
    return hasattr(place.look(), name)


def _has_own_attribute(place: StateRef, name: str) -> bool:
    return name in vars(place.look())
