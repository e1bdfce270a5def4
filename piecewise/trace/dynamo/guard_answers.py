"""What a guard asks of what it looks at, as something that compares: from layer to layer of a model, and on
each call where no place can be compared instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piecewise import torch_api
from piecewise.trace.dynamo.guard_kinds import GUARD_KINDS, Rule
from piecewise.trace.dynamo.sources import Scope, owner_and_name
from runners.state.same_value import is_same_value, table_content

_BASES_OF_CONSTANTS = (int, float, str, bytes, complex)


def looked_at(guard: torch_api.SeenGuard) -> tuple[str, ...]:
    """Python source of what a guard compares: one expression, or two that are to be one object."""
    source = owner_and_attribute(guard)[0]
    return (source, guard.other) if guard.other else (source,)


def owner_and_attribute(guard: torch_api.SeenGuard) -> tuple[str, Any]:
    """Where a guard looks, and at which attribute, where it asks for one."""
    source, attribute = guard.source, guard.arguments.get("attr")
    if guard.kind == "HASATTR" and attribute is None:  # torch 2.11 names the attribute in the source
        return owner_and_name(source)
    return source, attribute


def is_same_to(guard: torch_api.SeenGuard, seen: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether a guard that held for `seen` holds for `found`: values of what it looks at."""
    if guard.other:
        return found[0] is found[1]
    known = GUARD_KINDS.get(guard.kind)
    if known is None or known.rule is Rule.REFUSED:
        return False
    if known.rule is Rule.METADATA:
        return _has_equal_metadata(seen[0], found[0])
    return is_same_value(answer_of(guard, found[0]), answer_of(guard, seen[0]))


def answer_of(guard: torch_api.SeenGuard, value: Any) -> Any:
    """What the guard asks of `value`, for `is_same_value` to compare."""
    rule = GUARD_KINDS[guard.kind].rule
    if rule is Rule.TENSOR:
        return _kind_for_layers(value)
    if guard.kind == "CONSTANT_SUBCLASS_MATCH":
        base = next((base for base in _BASES_OF_CONSTANTS if isinstance(value, base)), None)
        return (type(value), value if base is None else base(value))
    if rule is Rule.TYPE:
        return type(value)
    if rule is Rule.CONTENT:
        return type(value), table_content(value)
    if rule is Rule.MEMBER:
        return guard.arguments["key"] in value
    if guard.kind == "HASATTR":
        return hasattr(value, owner_and_attribute(guard)[1])
    if rule is Rule.ATTRIBUTE:
        return owner_and_attribute(guard)[1] in value.__dict__
    if rule is Rule.METADATA:
        return type(value), tuple(metadata_of(value).items())
    if rule is Rule.OPAQUE:
        return value, torch_api.opaque_answer(value)
    return _frozen(value)


def metadata_of(tensor: Any) -> dict[str, Any]:
    """The attributes of a tensor of a subclass that are no tensors, without Dynamo's own marks."""
    return {
        key: item
        for key, item in vars(tensor).items()
        if not isinstance(item, torch.Tensor) and not key.startswith("_dynamo")
    }


def _has_equal_metadata(seen: Any, found: Any) -> bool:
    """Whether tensors of one subclass, which other guards compare, say the same of what is inside."""
    try:  # by equality: the weight of each layer has objects of its own
        return bool(seen.__tensor_flatten__() == found.__tensor_flatten__())
    except Exception:  # a tensor in there has no one answer
        return False


def _frozen(value: Any) -> Any:
    """A container as what it holds now."""
    if isinstance(value, (list, set)):
        return type(value), (tuple if isinstance(value, list) else frozenset)(value)
    return (type(value), tuple(value.items())) if isinstance(value, dict) else value


def _kind_for_layers(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return None
    return (
        type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, tensor.stride(),
        tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
        torch_api.dispatch_keys(tensor),
    )  # fmt: skip


class Lookup:
    """A guard that is asked anew on each call, at its source: what is found there is made by each look-up."""

    def __init__(self, guard: torch_api.SeenGuard, scope: Scope) -> None:
        self._guard = guard
        self._read = scope.reader(looked_at(guard))
        self._seen = self._answer()

    def _answer(self) -> Any:
        values = self._read()
        return values[0] is values[1] if self._guard.other else answer_of(self._guard, *values)

    def holds(self, _: None) -> bool:
        """Whether the answer is what it was; a question of `StateFacts`, which has an argument."""
        return is_same_value(self._answer(), self._seen)

    def __repr__(self) -> str:
        return "the value read"
