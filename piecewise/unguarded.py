"""What forward relied on and no single guard of Dynamo's compares: found in its guards and the code traced.

* One tensor at several places (tied weights) is one input of the graph, read at the first place.
* A class of modules whose `__call__` is replaced no longer runs forward alone.
* Flags of tensors (`requires_grad`), the environment and an object's `__dict__` are read like constants. The
  names that the traced code holds tell which of them forward reads; then they are compared on each call as a
  whole, for nothing tells which entry decided.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from piecewise.config import environment
from piecewise.state import Scope, resolve
from runners.state_check import StateFacts, StateRef, table_content

_FLAGS = frozenset({"requires_grad", "is_leaf", "grad_fn", "Parameter"})
_ENVIRONMENT = frozenset({"environ", "getenv"})
_ATTRIBUTE_TABLES = frozenset({"__dict__", "vars"})


def names_read(code: Iterable[CodeType]) -> frozenset[str]:
    """Names of globals and attributes in code that is neither torch's nor Python's own."""
    settled = os.path.dirname(torch.__file__), os.path.dirname(os.__file__)
    theirs = [
        each for each in code if not each.co_filename.startswith(settled) or _is_installed(each.co_filename)
    ]
    return frozenset(name for each in theirs for name in each.co_names)


def reads_attribute_tables(names: frozenset[str]) -> bool:
    """Whether forward may read names of attributes."""
    return bool(names & _ATTRIBUTE_TABLES)


def _is_installed(path: str) -> bool:
    """Whether a file below Python's library is a package of its own, and not torch."""
    return "site-packages" in path and not path.startswith(os.path.dirname(torch.__file__))


def reads_flags(names: frozenset[str]) -> bool:
    """Whether forward may ask what kind of tensor it was given: a Parameter, or one that requires grad."""
    return bool(names & _FLAGS)


def facts_unguarded(
    facts: StateFacts,
    model: nn.Module,
    *,
    names: frozenset[str],
    ties: Iterable[Sequence[str]],
    places: Mapping[int, StateRef],
    scope: Scope,
) -> StateFacts:
    """`facts`, with those that forward read and no guard compares.

    Args:
        names: what `names_read` found in the traced code.
        ties: sources that gave one tensor.
        places: id of a tensor of the model → the place at which the graph reads it.
    """
    values = [*facts.values, *_calls(model)]
    answers, tables = [*facts.answers, *_ties(ties, places, scope)], [*facts.tables]
    if reads_flags(names):
        for path, module in model.named_modules():
            for key, tensor in {**module._parameters, **module._buffers}.items():
                owner = module._parameters if key in module._parameters else module._buffers
                if tensor is not None:
                    place = StateRef(owner, key, f"model.{path}.{key}" if path else f"model.{key}")
                    flag = tensor.requires_grad
                    answers.append((_requires_grad, place, Said("requires_grad"), flag, place.path))
    if names & _ENVIRONMENT:
        answers.append((_is_environment, environment(), Said("the value read"), True, "the environment"))
    if names & _ATTRIBUTE_TABLES:
        tables += _attribute_tables(model, facts)
    return StateFacts(tuple(values), tuple(tables), facts.types, tuple(answers))


def _calls(model: nn.Module) -> Iterator[tuple[StateRef, Any]]:
    """How each class of module is called: Dynamo takes `__call__` for the way to forward, unguarded."""
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        place = StateRef(cls, "__call__", f"{cls.__name__}.__call__", is_attribute=True)
        yield place, place.get()


def _requires_grad(place: StateRef, _: Said) -> bool:
    return bool(place.get().requires_grad)


def _is_environment(seen: dict[str, str], _: Said) -> bool:
    return environment() == seen


def _attribute_tables(model: nn.Module, facts: StateFacts) -> Iterator[tuple[Any, Any, str]]:
    """The names in the `__dict__` of each module, and of each other object that forward reached."""
    for path, module in model.named_modules():
        yield vars(module), table_content(vars(module)), f"vars(model{'.' + path if path else ''})"
    settled = (nn.Module, type, FunctionType, MethodType, ModuleType)
    for place, value in facts.values:
        names = getattr(value, "__dict__", None)
        if isinstance(names, dict) and not isinstance(value, settled):
            yield names, table_content(names), f"vars({place.path})"


def _ties(sources: Iterable[Sequence[str]], places: Mapping[int, StateRef], scope: Scope) -> list[Any]:
    """That tensors which forward reads at several places are one tensor at all of them."""
    found = {}
    for source in itertools.chain.from_iterable(sources):
        other = resolve(source, scope)
        place = places.get(id(other.get())) if other is not None else None
        if other is None or place is None or (id(place.owner), place.key) == (id(other.owner), other.key):
            continue
        said = Said(f"the tensor of {other.path}", other)
        found[id(other.owner), other.key] = (_is_tied, place, said, True, place.path)
    return list(found.values())


class Said:
    """What a change is told with: "the tensor of model.head.weight" (was in model.embedding.weight)."""

    def __init__(self, text: str, place: StateRef | None = None) -> None:
        self.text, self.place = text, place

    def __repr__(self) -> str:
        return self.text


def _is_tied(place: StateRef, other: Said) -> bool:
    assert other.place is not None
    return place.get() is other.place.get()
