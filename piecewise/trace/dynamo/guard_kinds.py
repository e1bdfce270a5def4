"""Every kind of guard that Dynamo has, and what compares it on a call.

A replay runs none of Dynamo's guards: one pass over all of them costs as much as the launches that it saves.
Each of them says what a trace relied on, though, so each kind has a rule here, under which `state.py` turns
it into something that is compared in a few nanoseconds. A kind that has none, as of a torch that is newer
than this table, is a refusal of the trace.
"""

from __future__ import annotations

import dataclasses
import enum

from piecewise import torch_api
from piecewise.errors.trace import StateNotCompared
from piecewise.trace.dynamo.sources import readable_path


class Rule(enum.Enum):
    """What is compared on each call; the text completes "a call compares ..."."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class GuardKind:
    """One kind.

    Attributes:
        rule: how it is compared.
        asks: what Dynamo asks.
        since, until: the versions of torch that have it, of those that are supported.
    """

    rule: Rule
    asks: str
    since: str = "2.11"
    until: str = "2.14"


_FIX_ITERATOR = "keep a list or a tuple instead, or make the iterator inside forward"
_FIXES = {
    "TUPLE_ITERATOR_LEN": _FIX_ITERATOR,
    "RANGE_ITERATOR_MATCH": _FIX_ITERATOR,
    "COUNT_ITERATOR_MATCH": _FIX_ITERATOR,
    "COW_TENSOR_MATCH": "keep forward from asking whether a tensor's memory is shared",
}

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
    """How a guard is compared.

    Raises:
        StateNotCompared: it is of a kind that this version does not know.
    """
    known = GUARD_KINDS.get(guard.kind)
    if known is None:
        raise refusal(guard, fix="ask for a version that knows your torch, or use torch 2.11 to 2.14")
    return known.rule


def is_asked_of(guard: torch_api.SeenGuard) -> bool:
    """Whether a guard asks about what its source leads to, and not about the process or its sizes."""
    known = GUARD_KINDS.get(guard.kind)
    return known is None or known.rule not in (Rule.PROCESS, Rule.NO_EFFECT, Rule.SIZES)


def refusal(guard: torch_api.SeenGuard, *, fix: str | None = None) -> StateNotCompared:
    """Why a trace that relied on this cannot be used."""
    known = GUARD_KINDS.get(guard.kind)
    return StateNotCompared(
        path=readable_path(guard.source) or "a setting",
        kind=guard.kind + (f" ({known.asks})" if known else ""),
        fix=fix or _FIXES.get(guard.kind),
    )
