"""Finds state that forward depends on but that no Dynamo guard compares.

* One tensor at several places (tied weights) is one input of the graph, read at the first place.
* What forward sets to what it is already, no replay sets: it must be that at each call.
* A class of modules whose `__call__` is replaced no longer runs forward alone.
* Flags of tensors (`requires_grad`), the environment and an object's `__dict__` are read like constants. The
  names that the traced code holds tell which of them forward reads; then they are compared on each call as a
  whole, for nothing tells which entry decided.
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

# Their methods are torch's and Python's own.
_SETTLED_CLASSES = (object, nn.Module, torch.Tensor)


def names_read(code: Iterable[CodeType]) -> frozenset[str]:
    """Collects names of globals and attributes in code that is neither torch's nor Python's own."""
    torchs, pythons = os.path.dirname(torch.__file__), os.path.dirname(os.__file__)

    def is_settled(path: str) -> bool:
        # Below Python's library are installed packages, too.
        return path.startswith(torchs) or (path.startswith(pythons) and "site-packages" not in path)

    return frozenset(name for each in code if not is_settled(each.co_filename) for name in each.co_names)


def reads_attribute_tables(names: frozenset[str]) -> bool:
    """Whether forward may read names of attributes."""
    return bool(names & {"__dict__", "vars"})


def reads_flags(names: frozenset[str]) -> bool:
    """Whether forward may ask what kind of tensor it was given: a Parameter, or one that requires grad."""
    return bool(names & {"requires_grad", "is_leaf", "grad_fn", "Parameter"})


def add_unguarded(
    finder: FactFinder, run: DynamoRun, *, places: Mapping[int, StateRef], scope: Scope
) -> None:
    """Adds the facts that forward read and no guard compares; `places` maps the id of a tensor of the model
    to the place at which the graph reads it.
    """
    names = names_read(run.code)
    modules = [(f"model.{path}" if path else "model", module) for path, module in run.model.named_modules()]
    _add_methods(finder, run.code, scope)
    _add_builtins(finder, run.code)
    # Dynamo takes `__call__` for the way to forward, unguarded.
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
            # Weakly, since a suspended trace holds no tensor.
            finder.add_answer(_is_there, place, Said("what forward sets", weakref.ref(value)), place.path)
    for path, module in modules if reads_flags(names) else ():
        for owner in (module._parameters, module._buffers):
            for key in [key for key, tensor in owner.items() if tensor is not None]:
                finder.add_answer(_requires_grad, owner, key, f"the tensors of {path} that require grad")
    if names & {"environ", "getenv"}:
        finder.add_answer(_is_environment, environment(), Said("the value read"), "the environment")
    if reads_attribute_tables(names):
        for path, module in modules:
            finder.add_table(vars(module), f"vars({path})")
        settled = (nn.Module, type, FunctionType, MethodType, ModuleType)
        for place, _ in list(finder.values.values()):
            value = place.get()
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict) and not isinstance(value, settled):
                finder.add_table(attributes, f"vars({place.path})")


def _requires_grad(owner: Mapping[str, torch.Tensor], key: str) -> bool:
    return owner[key].requires_grad


def _is_environment(seen: dict[str, str], _: Said) -> bool:
    return environment() == seen


def _ties(
    run: DynamoRun, places: Mapping[int, StateRef], scope: Scope
) -> Iterable[tuple[StateRef, StateRef]]:
    """Pairs the places of a tensor that forward reads at several: where the graph reads it, and another."""
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
    """Places that forward sets; of a container, those of its items, for its keys are compared."""
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
    """Methods and properties that forward ran: Dynamo guards an object's class, and not what that has."""
    traced = set(map(id, code))
    for cls in list(finder.classes):
        before: list[type] = []
        for base in cls.__mro__:
            for name, item in vars(base).items() if base not in _SETTLED_CLASSES else ():
                function = getattr(item, "__func__", None) or getattr(item, "fget", None) or item
                if isinstance(function, FunctionType) and id(function.__code__) in traced:
                    path = f"{base.__name__}.{name}"
                    finder.add_value(StateRef(scope.class_table(base), name, path), item)
                    finder.add_code(function, path)
                    for other in before:
                        finder.add_answer(operator.contains, scope.class_table(other), name, other.__name__)
            before.append(base)


def _add_builtins(finder: FactFinder, code: Sequence[CodeType]) -> None:
    """Builtins that functions named, which a global of the same name would hide."""
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
    """Words a change, such as "the tensor of model.head.weight"; `get` gives what is expected there."""

    def __init__(self, text: str, expected: StateRef | weakref.ref[torch.Tensor] | None = None) -> None:
        self.text = text
        self.get = expected.get if isinstance(expected, StateRef) else expected

    def __repr__(self) -> str:
        return self.text


def _is_there(place: StateRef, other: Said) -> bool:
    assert other.get is not None
    return place.get() is other.get()
