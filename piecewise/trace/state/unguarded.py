"""Finds state that forward depends on but that no Dynamo guard compares.

* One tensor at several places (tied weights) is one input of the graph, read at the first place.
* A replay does not repeat a write of the value that is already there: each call must find that value.
* A class of modules whose `__call__` is replaced no longer runs only forward.
* Dynamo reads flags of tensors (`requires_grad`), the environment and an object's `__dict__` like constants.
  If the names in the traced code show that forward reads one, each call compares it as a whole, since
  nothing tells which entry decided.
"""

from __future__ import annotations

import builtins
import operator
import os
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import nn

from piecewise.settings.sources import environment
from piecewise.trace.dynamo.run import DynamoRun
from piecewise.trace.dynamo.sources import Scope, resolve
from piecewise.trace.state.state import FactFinder
from runners.state.state_check import StateRef

_SETTLED_CLASSES = (object, nn.Module, torch.Tensor)
# By these names forward may list attributes, or ask if an input is a Parameter or requires grad.
TABLES = frozenset({"__dict__", "vars"})
FLAGS = frozenset({"requires_grad", "is_leaf", "grad_fn", "Parameter"})


def names_read(code: Iterable[CodeType]) -> frozenset[str]:
    """Collects names of globals and attributes in code that is neither torch's nor Python's own."""
    torchs, pythons = os.path.dirname(torch.__file__), os.path.dirname(os.__file__)

    def is_settled(path: str) -> bool:
        # Installed packages lie below Python's library, too.
        return path.startswith(torchs) or (path.startswith(pythons) and "site-packages" not in path)

    return frozenset(name for each in code if not is_settled(each.co_filename) for name in each.co_names)


def add_unguarded(finder: FactFinder, run: DynamoRun, *, places: dict[int, StateRef], scope: Scope) -> None:
    """Adds the facts that forward read without a guard; `places`: tensor's id → the place the graph reads."""
    names = names_read(run.code)
    modules = [(f"model.{path}" if path else "model", module) for path, module in run.model.named_modules()]
    _add_methods(finder, run.code, scope)
    _add_builtins(finder, run.code)
    # Dynamo treats `__call__` as the way to forward, without a guard.
    for cls in dict.fromkeys(type(module) for _, module in modules):
        place = StateRef(cls, "__call__", f"{cls.__name__}.__call__", is_attribute=True)
        finder.add_value(place, place.get())
    for place, other in _ties(run, places, scope):
        finder.add_answer(_is_there, place, Said(f"the tensor of {other.path}", other), place.path)
    for place in _stored(finder, run.stores, scope):
        value = place.get()
        if not isinstance(value, torch.Tensor):
            finder.add_value(place, value)
        elif id(value) not in places or not _is_one(places[id(value)], place):
            # A weak reference, since a suspended trace holds no tensor.
            finder.add_answer(_is_there, place, Said("what forward sets", weakref.ref(value)), place.path)
    for path, module in modules if names & FLAGS else ():
        for owner in (module._parameters, module._buffers):
            for key in [key for key, tensor in owner.items() if tensor is not None]:
                finder.add_answer(_requires_grad, owner, key, f"the tensors of {path} that require grad")
    if names & {"environ", "getenv"}:
        finder.add_answer(_is_environment, environment(), Said("the value read"), "the environment")
    if names & TABLES:
        for path, module in modules:
            finder.add_table(vars(module), f"vars({path})")
        settled = (nn.Module, type, FunctionType, MethodType, ModuleType)
        for place, _ in list(finder.values.values()):
            value = place.get()
            attributes = getattr(value, "__dict__", None)
            # An op keeps what torch was asked about it, such as its schema's handle.
            is_op = type(value).__module__ == "torch._ops"
            if isinstance(attributes, dict) and not isinstance(value, settled) and not is_op:
                finder.add_table(attributes, f"vars({place.path})")


def _requires_grad(owner: Mapping[str, torch.Tensor], key: str) -> bool:
    return owner[key].requires_grad


def _is_environment(seen: dict[str, str], _: Said) -> bool:
    return environment() == seen


def _ties(run: DynamoRun, places: dict[int, StateRef], scope: Scope) -> Iterable[tuple[StateRef, StateRef]]:
    """Pairs the place where the graph reads a tensor with each other place where forward reads it."""
    found = {}
    for guard in run.guards:
        pair = (guard.source, guard.other) if guard.other else ()
        refs = [ref for source in pair if (ref := resolve(source, scope)) is not None]
        for other in refs:
            tensor = other.get()
            place = places.get(id(tensor), refs[-1]) if isinstance(tensor, torch.Tensor) else other
            if not _is_one(place, other):
                found[id(other.owner), other.key] = place, other
    return found.values()


def _is_one(place: StateRef, other: StateRef) -> bool:
    return (id(place.owner), place.key) == (id(other.owner), other.key)


def _stored(finder: FactFinder, sources: Iterable[str], scope: Scope) -> Iterable[StateRef]:
    """Finds places that forward sets; for a container, its items, whose keys are compared."""
    for source in dict.fromkeys(sources):
        place = resolve(source, scope)
        value = place.get() if place is not None else None
        if place is not None and isinstance(value, (list, dict, set, deque)):
            finder.add_table(value, place.path)
            keys: Iterable[object] = value if isinstance(value, dict) else range(len(value))
            for key in () if isinstance(value, set) else keys:
                yield StateRef(value, key, f"{place.path}[{key!r}]")
        elif place is not None:  # else it was there for a while alone
            yield place


def _add_methods(finder: FactFinder, code: Sequence[CodeType], scope: Scope) -> None:
    """Adds methods and properties that forward ran: Dynamo guards an object's class, not its attributes."""
    traced = set(map(id, code))
    for cls in list(finder.classes):
        for at, base in enumerate(cls.__mro__):
            for name, item in vars(base).items() if base not in _SETTLED_CLASSES else ():
                function = getattr(item, "__func__", None) or getattr(item, "fget", None) or item
                if isinstance(function, FunctionType) and id(function.__code__) in traced:
                    path = f"{base.__name__}.{name}"
                    finder.add_value(StateRef(scope.class_table(base), name, path), item)
                    finder.add_code(function, path)
                    for other in cls.__mro__[:at]:
                        finder.add_answer(operator.contains, scope.class_table(other), name, other.__name__)


def _add_builtins(finder: FactFinder, code: Sequence[CodeType]) -> None:
    """Adds builtins that functions named, which a global of the same name would hide."""
    traced = set(map(id, code))
    for function in list(finder.functions.values()):
        names, pending = function.__globals__, [function.__code__]
        while pending:
            each = pending.pop()
            pending += [item for item in each.co_consts if isinstance(item, CodeType)]
            for name in each.co_names if id(each) in traced else ():
                if name not in names and hasattr(builtins, name):
                    finder.add_answer(operator.contains, names, name, names.get("__name__", "the globals"))


class Said:
    """Describes a change, such as "the tensor of model.head.weight"; `get` returns the expected value."""

    def __init__(self, text: str, expected: StateRef | weakref.ref[torch.Tensor] | None = None) -> None:
        self.text = text
        self.get = expected.get if isinstance(expected, StateRef) else expected

    def __repr__(self) -> str:
        return self.text


def _is_there(place: StateRef, other: Said) -> bool:
    assert other.get is not None
    return place.get() is other.get()
