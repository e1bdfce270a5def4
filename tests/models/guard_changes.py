"""Changes between two calls, one or more for each kind of Dynamo's guards: what a model reads, and how that
is changed. `test_guard_changes.py` acts each out; the table in the documents lists them."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import functools
import math
import operator
import sys
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from state_models import HIDDEN, Mood
from torch import nn

HERE = sys.modules[__name__]
CHANGED, MOVED, NONE = "module_state_changed", "moved_address", ""


@dataclasses.dataclass(frozen=True)
class Change:
    """What is put on a model, how forward scales rows by it, and what happens between two calls.

    Attributes:
        kind: a guard's that the trace has for it; NONE where Dynamo has none that notices it.
        outcome: why the next call runs eagerly.
        since: the first torch whose Dynamo traces it.
    """

    kind: str
    setup: Callable
    read: Callable
    change: Callable
    outcome: str = CHANGED
    since: str = "2.11"


def new(value):
    """The value, or what a lambda makes of it for one test alone."""
    return value() if getattr(value, "__name__", "") == "<lambda>" else value


def put(name, value):
    return lambda m, patch: setattr(m, name, new(value))


def set_global(name, value):
    return lambda m, patch: patch.setattr(HERE, name, value)


class Ops:
    """Methods, as the user of a model may keep them."""

    factor = 2.0

    def double(self, x):
        return x * 2

    def triple(self, x):
        return x * 3

    @staticmethod
    def halve(x):
        return x / 2

    @property
    def amount(self):
        return 2.0

    def __call__(self, x):
        return x * 4


class More(Ops):
    """A class of its own, so that changes of it reach no other test."""

    def double(self, x):
        return x * 5


class Given:
    """Has attributes that are found nowhere."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return 2.0


class Number(int):
    pass


def double(x):
    return x * 2.0


def triple(x):
    return x * 3.0


def by(x, factor=2.0):
    return x * factor


def by_keyword(x, *, factor=2.0):
    return x * factor


def calling(function):
    @functools.wraps(function)
    def inner(x):
        return function(x)

    return inner


def fresh(function):
    """A function of its own with the same code."""
    made = types.FunctionType(function.__code__, globals(), argdefs=function.__defaults__)
    made.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return made


ACTIVATION, LIBRARY, SETTINGS, TABLE = F.silu, F, types.SimpleNamespace(act=torch.tanh), {"act": torch.relu}
HELPER = fresh(double)
Pair = collections.namedtuple("Pair", "first second")


def pair(value):
    return Pair(torch.full((HIDDEN,), value), torch.ones(HIDDEN))


def a_class():
    """A subclass of `Ops` that nothing else has."""
    return type("Own", (Ops,), {})


def item(key, value):
    return lambda m, patch: operator.setitem(m.held, key, new(value))


held = functools.partial(put, "held")
apply = lambda m, x: m.held(x)  # noqa: E731
scale = lambda m, x: x * m.held  # noqa: E731

CHANGES = {
    # What is called.
    "an attribute that holds a function of torch in C": Change(
        "BUILTIN_MATCH", held(torch.relu), apply, held(torch.neg)
    ),
    "one that holds a function of torch in Python": Change(
        "CLOSURE_MATCH", held(F.selu), apply, held(F.gelu)
    ),
    "one that holds what forward also calls by its name": Change(
        NONE, held(F.silu), lambda m, x: m.held(F.silu(x)), held(F.gelu)
    ),
    "one that holds a method of `torch.Tensor`": Change(
        "unguarded", held(torch.Tensor.neg), apply, held(torch.Tensor.relu), since="2.12"
    ),
    "one that holds a function of `operator`": Change(
        "BUILTIN_MATCH", held(operator.neg), apply, held(operator.pos)
    ),
    "one that holds an op of `torch.ops`": Change(
        "BUILTIN_MATCH", held(torch.ops.aten.neg), apply, held(torch.ops.aten.relu)
    ),
    "one that holds an overload of `torch.ops`": Change(
        "BUILTIN_MATCH", held(torch.ops.aten.neg.default), apply, held(torch.ops.aten.relu.default)
    ),
    "one that holds a builtin": Change("BUILTIN_MATCH", held(max), lambda m, x: x * m.held(2, 3), held(min)),
    "one that holds a bound method": Change("CLOSURE_MATCH", held(Ops().double), apply, held(Ops().triple)),
    "a bound method replaced by a function": Change("CLOSURE_MATCH", held(Ops().double), apply, held(triple)),
    "an item of a list that holds a bound method": Change(
        "CLOSURE_MATCH", held(lambda: [Ops().double]), lambda m, x: m.held[0](x),
        item(0, lambda: Ops().triple)
    ),
    "an item of a dict that holds a bound method": Change(
        "CLOSURE_MATCH", held(lambda: {"a": Ops().double}), lambda m, x: m.held["a"](x), item("a", triple)
    ),
    "an item of a list that holds a function of torch": Change(
        "BUILTIN_MATCH", held(lambda: [torch.relu]), lambda m, x: m.held[0](x), item(0, torch.neg)
    ),
    "an item of a dict under a member of an enum": Change(
        "BUILTIN_MATCH", held(lambda: {Mood.CALM: torch.relu}),
        lambda m, x: m.held[Mood.CALM](x), item(Mood.CALM, torch.neg),
    ),
    "a tuple that holds a function of torch": Change(
        "BUILTIN_MATCH", held(lambda: (torch.relu,)), lambda m, x: m.held[0](x), held(lambda: (torch.neg,))
    ),
    "a `functools.partial`": Change(
        "TYPE_MATCH", held(lambda: functools.partial(torch.mul, other=2.0)), apply,
        held(lambda: functools.partial(torch.mul, other=3.0)),
    ),
    "a global that holds a function of torch": Change(
        NONE, held(None), lambda m, x: ACTIVATION(x), set_global("ACTIVATION", torch.neg)
    ),
    "a global that holds a Python module": Change(
        NONE, held(None), lambda m, x: LIBRARY.silu(x),
        set_global("LIBRARY", types.SimpleNamespace(silu=torch.neg)),
    ),
    "an attribute that holds a Python module": Change(
        "MODULE_MATCH", held(math), lambda m, x: x * m.held.pi, held(types.SimpleNamespace(pi=3.0))
    ),
    "a global namespace object": Change(
        "TYPE_MATCH", held(None), lambda m, x: SETTINGS.act(x),
        set_global("SETTINGS", types.SimpleNamespace(act=torch.neg)),
    ),
    "an entry of a global namespace object": Change(
        "BUILTIN_MATCH", held(None), lambda m, x: SETTINGS.act(x),
        lambda m, patch: patch.setattr(SETTINGS, "act", torch.neg),
    ),
    "an entry of a global dict": Change(
        "BUILTIN_MATCH", held(None), lambda m, x: TABLE["act"](x),
        lambda m, patch: patch.setitem(TABLE, "act", torch.neg),
    ),
    "an entry of a config that holds a builtin": Change(
        "BUILTIN_MATCH", held(lambda: types.SimpleNamespace(pick=max)), lambda m, x: x * m.held.pick(2, 3),
        lambda m, patch: setattr(m.held, "pick", min),
    ),
    "a class": Change("CLASS_MATCH", held(Ops), lambda m, x: m.held().double(x), held(More)),
    # What functions consist of.
    "the `__code__` of a helper": Change(
        "CLOSURE_MATCH", held(None), lambda m, x: HELPER(x),
        lambda m, patch: patch.setattr(HELPER, "__code__", triple.__code__),
    ),
    "the `__code__` of a function that an attribute holds": Change(
        "CLOSURE_MATCH", held(lambda: fresh(double)), apply,
        lambda m, patch: setattr(m.held, "__code__", triple.__code__),
    ),
    "the `__code__` of a method": Change(
        NONE, held(Ops()), lambda m, x: m.held.double(x),
        lambda m, patch: patch.setattr(Ops.double, "__code__", Ops.triple.__code__),
    ),
    "a default of a helper": Change(
        "CONSTANT_MATCH", held(lambda: fresh(by)), apply,
        lambda m, patch: setattr(m.held, "__defaults__", (3.0,))
    ),
    "the keyword defaults of a helper": Change(
        "CONSTANT_MATCH", held(lambda: fresh(by_keyword)), apply,
        lambda m, patch: setattr(m.held, "__kwdefaults__", {"factor": 3.0}),
    ),
    "an entry of a helper's keyword defaults": Change(
        "CONSTANT_MATCH", held(lambda: fresh(by_keyword)), apply,
        lambda m, patch: m.held.__kwdefaults__.update(factor=3.0),
    ),
    "a cell of a closure": Change(
        "CLOSURE_MATCH", held(lambda: calling(double)), apply,
        lambda m, patch: setattr(m.held.__closure__[0], "cell_contents", triple),
    ),
    # What classes consist of.
    "the class of an object": Change(
        "TYPE_MATCH", held(lambda: Ops()), lambda m, x: m.held.double(x),
        lambda m, patch: setattr(m.held, "__class__", More),
    ),
    "a method of an object's class": Change(
        NONE, held(Ops()), lambda m, x: m.held.double(x),
        lambda m, patch: patch.setattr(Ops, "double", Ops.triple),
    ),
    "a static method that a subclass hides": Change(
        NONE, held(lambda: a_class()()), lambda m, x: m.held.halve(x),
        lambda m, patch: setattr(type(m.held), "halve", staticmethod(triple)),
    ),
    "a method that an object gets for itself": Change(
        "NOT_PRESENT_IN_GENERIC_DICT", held(lambda: Ops()), lambda m, x: m.held.double(x),
        lambda m, patch: setattr(m.held, "double", triple),
    ),
    "a property of a class": Change(
        NONE, held(Ops()), lambda m, x: x * m.held.amount,
        lambda m, patch: patch.setattr(Ops, "amount", property(lambda self: 7.0)),
    ),
    "a property that comes before an attribute": Change(
        "CONSTANT_MATCH", lambda m, patch: (setattr(m, "held", a_class()()), setattr(m.held, "own", 2.0)),
        lambda m, x: x * m.held.own,
        lambda m, patch: setattr(type(m.held), "own", property(lambda self: 9.0)),
    ),
    "an attribute of a class": Change(
        "CONSTANT_MATCH", held(None), lambda m, x: x * Ops.factor,
        lambda m, patch: patch.setattr(Ops, "factor", 3.0)
    ),
    "`__call__` of an object's class": Change(
        NONE, held(Ops()), apply, lambda m, patch: patch.setattr(Ops, "__call__", Ops.triple)
    ),
    "all attributes of an object": Change(
        "CONSTANT_MATCH", held(lambda: types.SimpleNamespace(inner=Ops(), own=2.0)),
        lambda m, x: x * m.held.own,
        lambda m, patch: m.held.__dict__.update(own=3.0),
    ),
    "an attribute that hides a buffer": Change(
        NONE, held(None), lambda m, x: x * m.scale,
        lambda m, patch: vars(m).update(scale=torch.full((HIDDEN,), 2.0)),
    ),
    "an attribute that hides what `__getattr__` gives": Change(
        NONE, held(lambda: Given()), lambda m, x: x * m.held.factor,
        lambda m, patch: setattr(m.held, "factor", 3.0),
    ),
    # Values and containers.
    "a number": Change("CONSTANT_MATCH", held(2.0), scale, held(3.0)),
    "a number of a subclass of int": Change(
        "TYPE_MATCH", held(Number(2)), scale, held(Number(3)), since="2.12"
    ),
    "a dtype": Change(
        "CONSTANT_MATCH", held(torch.float64), lambda m, x: x.to(m.held).float(), held(torch.float16)
    ),
    "a member of an enum": Change(
        "ID_MATCH", held(Mood.CALM), lambda m, x: x * m.held.value, held(Mood.LOUD)
    ),
    "None becomes a value": Change(
        "CONSTANT_MATCH", held(None), lambda m, x: x if m.held is None else x * 2, held(1.0)
    ),
    "an attribute that was None is deleted": Change(
        "CONSTANT_MATCH", held(None), lambda m, x: x if getattr(m, "held", 1) is None else x * 2,
        lambda m, patch: delattr(m, "held"),
    ),
    "a range": Change("CONSTANT_MATCH", held(range(3)), lambda m, x: x * len(m.held), held(range(4))),
    "a slice": Change(
        "CONSTANT_MATCH", held(slice(0, 4)), lambda m, x: x + x[:, m.held].sum(-1, keepdim=True),
        held(slice(0, 3))
    ),
    "a frozen set": Change(
        "SET_CONTAINS", held(frozenset({1})), lambda m, x: x * 2 if 1 in m.held else x, held(frozenset({2}))
    ),
    "the length of a list": Change(
        "SEQUENCE_LENGTH", held(lambda: [2.0]), lambda m, x: x * len(m.held),
        lambda m, patch: m.held.append(3.0)
    ),
    "a key of a dict": Change(
        "DICT_KEYS_MATCH", held(lambda: {"a": 2.0}),
        lambda m, x: [x := x * each for each in m.held.values()][-1],
        lambda m, patch: m.held.update(b=3.0),
    ),
    "whether a dict has a key": Change(
        "DICT_NOT_CONTAINS", held(lambda: {}), lambda m, x: x * 2 if "a" in m.held else x, item("a", 1)
    ),
    "whether a dict loses a key": Change(
        "DICT_CONTAINS", held(lambda: {"a": 1}), lambda m, x: x * 2 if "a" in m.held else x,
        lambda m, patch: m.held.pop("a"),
    ),
    "a member of a set": Change(
        "SET_NOT_CONTAINS", held(lambda: {"b"}), lambda m, x: x * 2 if "a" in m.held else x,
        lambda m, patch: m.held.add("a"),
    ),
    "the mapping behind a view": Change(
        "MAPPING_KEYS_CHECK", held(lambda: types.MappingProxyType({"a": 2.0})), lambda m, x: x * m.held["a"],
        held(lambda: types.MappingProxyType({"a": 3.0})),
    ),
    "whether an object has an attribute": Change(
        "HASATTR", held(lambda: types.SimpleNamespace()),
        lambda m, x: x * 2 if hasattr(m.held, "loud") else x,
        lambda m, patch: setattr(m.held, "loud", 1),
    ),
    "a hook of a module outside of the tree": Change(
        "EMPTY_NN_MODULE_HOOKS_DICT", held(lambda: [nn.GELU()]), lambda m, x: m.held[0](x),
        lambda m, patch: m.held[0].register_forward_hook(lambda module, args, out: out * 3),
    ),
    "a module outside of the tree": Change(
        "TYPE_MATCH", held(lambda: [nn.GELU()]), lambda m, x: m.held[0](x), item(0, lambda: nn.ReLU())
    ),
    # Tensors.
    "a tuple of tensors": Change(
        "TYPE_MATCH", held(lambda: tuple(pair(1.0))), lambda m, x: x * m.held[0],
        held(lambda: tuple(pair(2.0)))
    ),
    "a namedtuple of tensors": Change(
        "TYPE_MATCH", held(lambda: pair(1.0)), lambda m, x: x * m.held.first, held(lambda: pair(2.0))
    ),
    "a tuple of tensors in a dict": Change(
        "TYPE_MATCH", held(lambda: {"a": (pair(1.0), 1)}), lambda m, x: x * m.held["a"][0][0],
        item("a", lambda: (pair(2.0), 1)),
    ),
    "the shape of a parameter of which no element is read": Change(
        "TENSOR_MATCH", held(lambda: nn.Parameter(torch.ones(3))), lambda m, x: x * m.held.shape[0],
        held(lambda: nn.Parameter(torch.ones(4))),
    ),
    "the shape of its data": Change(
        "TENSOR_MATCH", held(lambda: nn.Parameter(torch.ones(3))), lambda m, x: x * m.held.shape[0],
        lambda m, patch: setattr(m.held, "data", torch.ones(4)),
    ),
    "the dtype of a tensor in a list": Change(
        "TENSOR_MATCH", held(lambda: [torch.ones(3)]), lambda m, x: x * m.held[0].element_size(),
        item(0, lambda: torch.ones(3, dtype=torch.float64)),
    ),
    "an attribute of a tensor": Change(
        "CONSTANT_MATCH", lambda m, patch: setattr(m.scale, "note", 2.0), lambda m, x: x * m.scale.note,
        lambda m, patch: setattr(m.scale, "note", 3.0),
    ),
    "a weight that graphs read": Change(
        "TENSOR_MATCH", held(lambda: nn.Parameter(torch.ones(HIDDEN))), scale,
        held(lambda: nn.Parameter(torch.zeros(HIDDEN))), MOVED,
    ),
    "one of two places that hold one function": Change(
        "DUPLICATE_INPUT", lambda m, patch: (setattr(m, "held", torch.relu), setattr(m, "other", torch.relu)),
        lambda m, x: m.held(m.other(x)), put("other", torch.neg),
    ),
    "one of two places that hold one tensor": Change(
        "DUPLICATE_INPUT", lambda m, patch: (setattr(m, "held", torch.ones(3)), setattr(m, "other", m.held)),
        lambda m, x: x * 2 if m.held is m.other else x, put("other", torch.ones(3)),
    ),
    "one of two places that hold one list of names": Change(
        "DUPLICATE_INPUT", lambda m, patch: (setattr(m, "held", ["a"]), setattr(m, "other", m.held)),
        lambda m, x: x * 2 if m.held is m.other else x, put("other", lambda: ["a"]),
    ),
    "two lists of names become one": Change(
        "SEQUENCE_LENGTH", lambda m, patch: (setattr(m, "held", ["a"]), setattr(m, "other", ["a"])),
        lambda m, x: x * 2 if m.held is m.other else x, lambda m, patch: setattr(m, "other", m.held),
    ),
    "two tensors become one": Change(
        "TENSOR_MATCH",
        lambda m, patch: (setattr(m, "held", torch.ones(3)), setattr(m, "other", torch.ones(3))),
        lambda m, x: x * 2 if m.held is m.other else x, lambda m, patch: setattr(m, "other", m.held),
    ),
    # Torch and Python themselves.
    "a function of torch": Change(
        "CLOSURE_MATCH", held(None), lambda m, x: F.softsign(x),
        lambda m, patch: patch.setattr(F, "softsign", triple)
    ),
    "a function of Python's library": Change(
        "BUILTIN_MATCH", held(None), lambda m, x: operator.neg(x),
        lambda m, patch: patch.setattr(operator, "neg", triple)
    ),
    "a builtin": Change(
        "BUILTIN_MATCH", held(None), lambda m, x: x * len(chr(5)),
        lambda m, patch: patch.setattr(builtins, "chr", lambda number: "two"),
    ),
    "a global that hides a builtin": Change(
        NONE, held(None), lambda m, x: x * abs(-2),
        lambda m, patch: patch.setattr(HERE, "abs", lambda number: 7, raising=False),
    ),
}  # fmt: skip
