"""Lists the kinds of Dynamo guards, and how a call compares what each kind guards.

A replay runs no Dynamo guard: one pass over all guards costs as much as the launches that the replay saves.
Each kind has a rule instead, by which `state.py` compares it in nanoseconds. A trace with a guard of unknown
kind, as of a newer torch, is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from piecewise import torch_api
from piecewise.errors.trace import StateNotCompared
from piecewise.trace.dynamo.sources import Scope, owner_and_name, readable_path
from runners.state.same_value import is_same_value, table_content


class Rule(enum.Enum):
    """Says what each call compares; the text completes "a call compares ..."."""

    VALUE = "the object there: the very one, or an equal plain value"
    CODE = "the function there, and its `__code__`"
    TYPE = "the object there, and its class"
    CONTENT = "the container there, and its keys (of a sequence, its length)"
    MEMBER = "the container there, and whether it has the key"
    ATTRIBUTE = "the object there, and whether it has the attribute"
    TENSOR = "the tensor's address where graphs read it; else its class, dtype, device, sizes and strides"
    METADATA = "the tensor there, and each attribute that it has"
    OPAQUE = "the object there, and what its class registered for comparison"
    SAME_OBJECT = "that both places give one object"
    PROCESS = "the settings of the process and the thread"
    NO_EFFECT = "nothing: it has no effect without gradients"
    SIZES = "the sizes of the call's inputs, and of the bucket"
    REFUSED = "nothing: the trace is refused"


class GuardKind(NamedTuple):
    """Describes a kind of guard: its rule, Dynamo's question, and the torch versions that have the kind."""

    rule: Rule
    asks: str
    since: str = "2.11"
    until: str = "2.14"


_BASES_OF_CONSTANTS = (int, float, str, bytes, complex)
_FIXES = dict.fromkeys(
    ("TUPLE_ITERATOR_LEN", "RANGE_ITERATOR_MATCH", "COUNT_ITERATOR_MATCH"),
    "keep a list or a tuple instead, or make the iterator inside forward",
) | {"COW_TENSOR_MATCH": "keep forward from asking whether a tensor's memory is shared"}

GUARD_KINDS = {
    "HASATTR": GuardKind(Rule.ATTRIBUTE, "has it this attribute?"),
    "NOT_PRESENT_IN_GENERIC_DICT": GuardKind(Rule.ATTRIBUTE, "is the attribute not in its `__dict__`?"),
    "TYPE_MATCH": GuardKind(Rule.TYPE, "is it of this class?"),
    "FAKE_SCRIPT_TYPE_MATCH": GuardKind(Rule.TYPE, "is the opaque object of this class?", since="2.13"),
    "DICT_VERSION": GuardKind(Rule.CONTENT, "was the dict not written?"),
    "DICT_CONTAINS": GuardKind(Rule.MEMBER, "has the dict this key?"),
    "DICT_NOT_CONTAINS": GuardKind(Rule.MEMBER, "lacks the dict this key?", since="2.12"),
    "SET_CONTAINS": GuardKind(Rule.MEMBER, "is this in the set?"),
    "SET_NOT_CONTAINS": GuardKind(Rule.MEMBER, "is this not in the set?", since="2.12"),
    "BOOL_MATCH": GuardKind(Rule.VALUE, "is it this bool?"),
    "NONE_MATCH": GuardKind(Rule.VALUE, "is it None?"),
    "ID_MATCH": GuardKind(Rule.VALUE, "is it this object?"),
    "NOT_NONE_MATCH": GuardKind(Rule.TENSOR, "is it not None?"),
    "DISPATCH_KEY_SET_MATCH": GuardKind(Rule.VALUE, "is it this set of dispatch keys?"),
    "DUAL_LEVEL": GuardKind(Rule.PROCESS, "is forward-mode differentiation as deep?"),
    "FUNCTORCH_STACK_MATCH": GuardKind(Rule.PROCESS, "are the same function transforms active?"),
    "AUTOGRAD_SAVED_TENSORS_HOOKS": GuardKind(Rule.NO_EFFECT, "are the same hooks for saved tensors set?"),
    "TENSOR_SUBCLASS_METADATA_MATCH": GuardKind(Rule.METADATA, "has the subclass this metadata?"),
    "DTENSOR_SPEC_MATCH": GuardKind(Rule.VALUE, "is the DTensor placed so?"),
    "OPAQUE_OBJ_GUARD_FN_MATCH": GuardKind(Rule.OPAQUE, "does the opaque object's guard answer the same?"),
    "COW_TENSOR_MATCH": GuardKind(Rule.REFUSED, "is the tensor copied on write?", since="2.14"),
    "EQUALS_MATCH": GuardKind(Rule.VALUE, "is it equal?"),
    "CONSTANT_MATCH": GuardKind(Rule.VALUE, "is it this constant?"),
    "CONSTANT_SUBCLASS_MATCH": GuardKind(Rule.VALUE, "is the number or text in it this one?", since="2.12"),
    "NN_MODULE": GuardKind(Rule.VALUE, "is it this module?"),
    "FUNCTION_MATCH": GuardKind(Rule.CODE, "is it this function?"),
    "CLASS_MATCH": GuardKind(Rule.VALUE, "is it this class?"),
    "MODULE_MATCH": GuardKind(Rule.VALUE, "is it this Python module?"),
    "CLOSURE_MATCH": GuardKind(Rule.CODE, "is it a function with this code?"),
    "BUILTIN_MATCH": GuardKind(Rule.VALUE, "is it this builtin?"),
    "SEQUENCE_LENGTH": GuardKind(Rule.CONTENT, "is it as long?"),
    "TUPLE_ITERATOR_LEN": GuardKind(Rule.REFUSED, "has the iterator as many items left?"),
    "RANGE_ITERATOR_MATCH": GuardKind(Rule.REFUSED, "is the iterator at the same number?"),
    "COUNT_ITERATOR_MATCH": GuardKind(Rule.REFUSED, "is the counter at the same number?", since="2.12"),
    "DUPLICATE_INPUT": GuardKind(Rule.SAME_OBJECT, "are both one object?"),
    "WEAKREF_ALIVE": GuardKind(Rule.VALUE, "is it alive?"),
    "MAPPING_KEYS_CHECK": GuardKind(Rule.CONTENT, "has the mapping these keys, in order?"),
    "DICT_KEYS_MATCH": GuardKind(Rule.CONTENT, "has the dict these keys?"),
    "EMPTY_NN_MODULE_HOOKS_DICT": GuardKind(Rule.CONTENT, "has the module no hooks?"),
    "GRAD_MODE": GuardKind(Rule.PROCESS, "is the grad mode the same?"),
    "DETERMINISTIC_ALGORITHMS": GuardKind(Rule.PROCESS, "are deterministic algorithms asked for?"),
    "FSDP_TRAINING_STATE": GuardKind(Rule.NO_EFFECT, "is FSDP in the same phase?"),
    "GLOBAL_STATE": GuardKind(
        Rule.PROCESS, "are autocast, default dtype, tf32 and number of threads the same?"
    ),
    "TORCH_FUNCTION_STATE": GuardKind(Rule.PROCESS, "are the same modes for torch functions active?"),
    "DEFAULT_DEVICE": GuardKind(Rule.PROCESS, "is the default device the same?"),
    "SHAPE_ENV": GuardKind(Rule.SIZES, "do the sizes fulfil the trace's conditions?"),
    "TENSOR_MATCH": GuardKind(Rule.TENSOR, "is it a tensor of this kind?"),
    torch_api.SeenGuard.UNGUARDED: GuardKind(Rule.VALUE, "nothing: it was read, and has no guard"),
}


def rule_of(guard: torch_api.SeenGuard) -> Rule:
    """Finds the rule of a guard; raises `StateNotCompared` for a kind that this version does not know."""
    if guard.kind not in GUARD_KINDS:
        raise refusal(guard, fix="ask for a version that knows your torch, or use torch 2.11 to 2.14")
    return GUARD_KINDS[guard.kind].rule


def is_asked_of(guard: torch_api.SeenGuard) -> bool:
    """Whether a guard asks about the object at its source, and not about the process or sizes."""
    known = GUARD_KINDS.get(guard.kind)
    return known is None or known.rule not in (Rule.PROCESS, Rule.NO_EFFECT, Rule.SIZES)


def refusal(guard: torch_api.SeenGuard, *, fix: str | None = None) -> StateNotCompared:
    """Makes the error for a trace that relied on a guard which calls cannot compare."""
    known = GUARD_KINDS.get(guard.kind)
    path, kind = (
        readable_path(guard.source) or "a setting",
        guard.kind + (f" ({known.asks})" if known else ""),
    )
    return StateNotCompared(path=path, kind=kind, fix=fix or _FIXES.get(guard.kind))


def looked_at(guard: torch_api.SeenGuard) -> tuple[str, ...]:
    """Writes what a guard compares as Python source: one expression, or two that must be one object."""
    source = owner_and_attribute(guard)[0]
    return (source, guard.other) if guard.other else (source,)


def owner_and_attribute(guard: torch_api.SeenGuard) -> tuple[str, Any]:
    """Finds the owner that a guard reads, and the attribute if the guard asks for one."""
    source, attribute = guard.source, guard.arguments.get("attr")
    if guard.kind == "HASATTR" and attribute is None:  # torch 2.11 names the attribute in the source
        return owner_and_name(source)
    return source, attribute


def is_same_to(guard: torch_api.SeenGuard, seen: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether a guard that held for the values `seen` holds for the values `found`."""
    if guard.other:
        return found[0] is found[1]
    known = GUARD_KINDS.get(guard.kind)
    if known is None or known.rule is Rule.REFUSED:
        return False
    if known.rule is Rule.METADATA:
        try:  # by equality: the weight of each layer has objects of its own
            return bool(seen[0].__tensor_flatten__() == found[0].__tensor_flatten__())
        except Exception:  # a tensor in there has no one answer
            return False
    return is_same_value(answer_of(guard, found[0]), answer_of(guard, seen[0]))


def answer_of(guard: torch_api.SeenGuard, value: Any) -> Any:
    """Computes the guard's answer for `value`, for `is_same_value` to compare."""
    rule = GUARD_KINDS[guard.kind].rule
    if rule is Rule.TENSOR and isinstance(value, torch.Tensor):
        return (
            type(value), value.dtype, value.device, value.layout, value.shape, value.stride(),
            value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference(),
            torch_api.dispatch_keys(value),
        )  # fmt: skip
    if rule is Rule.TENSOR:
        return None
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
    if isinstance(value, (list, set)):
        return type(value), (tuple if isinstance(value, list) else frozenset)(value)
    return (type(value), tuple(value.items())) if isinstance(value, dict) else value


def metadata_of(tensor: Any) -> dict[str, Any]:
    """Reads the non-tensor attributes of a tensor subclass, without Dynamo's own marks."""
    items = vars(tensor).items()
    return {k: v for k, v in items if not isinstance(v, torch.Tensor) and not k.startswith("_dynamo")}


class Lookup:
    """Asks a guard anew on each call, for sources where each look-up makes a new object."""

    def __init__(self, guard: torch_api.SeenGuard, scope: Scope) -> None:
        self._guard = guard
        self._read = scope.reader(looked_at(guard))
        self._seen = self._answer()

    def _answer(self) -> Any:
        values = self._read()
        return values[0] is values[1] if self._guard.other else answer_of(self._guard, *values)

    def holds(self, _: None) -> bool:
        """Whether the answer is unchanged; `StateFacts` passes an argument."""
        return is_same_value(self._answer(), self._seen)

    def __repr__(self) -> str:
        return "the value read"
