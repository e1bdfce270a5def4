"""Python state that programs read, and changes of it between calls: one for each kind of what guards ask."""

from __future__ import annotations

import collections
import operator
import types

import torch
import torch.nn.functional as F
from torch import nn
from toy_models import HIDDEN

Pair = collections.namedtuple("Pair", "first second")


class Scaler:
    """Has methods that models keep."""

    def __init__(self, factor):
        self.factor = factor

    def scale(self, x):
        return x * self.factor

    def negate(self, x):
        return -x * self.factor


class Mirror(Scaler):
    def scale(self, x):
        return x.flip(-1) * self.factor


def shift(x, amount=0.25):
    return x + amount


def unshift(x, amount=0.25):
    return x - amount


def fresh(function):
    """A function of its own with the same code and defaults."""
    return types.FunctionType(function.__code__, globals(), argdefs=function.__defaults__)


class Held:
    """What a program holds beside modules and buffers."""

    def __init__(self, *, dtype, device):
        self.options = dict(dtype=dtype, device=device)
        self.function, self.method, self.helper = torch.tanh, Scaler(0.5).scale, fresh(shift)
        self.functions, self.table = [torch.sin, Scaler(0.5).negate], {"a": operator.neg}
        self.namespace = types.SimpleNamespace(act=F.silu, factor=0.5)
        self.scaler, self.numbers, self.keys, self.moods = Scaler(0.5), [0.5, 0.25], {"a": 1}, {"calm"}
        self.sized, self.pair, self.none = nn.Parameter(torch.ones(3)), self.pair_of(0.5), None

    def pair_of(self, value):
        return Pair(torch.full((HIDDEN,), value, **self.options), (torch.zeros(HIDDEN, **self.options), 1))


# How programs read it: each takes (what is at hand, two tensors [n, h]) and returns new ones ----------------


def held_functions(m, a, b):
    return [m.held.function(a), m.held.method(b), m.held.helper(a)]


def held_in_containers(m, a, b):
    for function in m.held.functions:
        a = torch.tanh(function(a))
    return [a, m.held.table["a"](b)]


def held_in_objects(m, a, b):
    return [m.held.namespace.act(a) * m.held.namespace.factor, m.held.scaler.scale(b)]


def held_numbers(m, a, b):
    for number in m.held.numbers:
        a = a * number
    return [a + len(m.held.keys), b if m.held.none is None else b * 0.5]


def held_memberships(m, a, b):
    loud = "loud" in m.held.moods or "b" in m.held.keys or hasattr(m.held, "loud")
    return [a * 0.5 if loud else torch.tanh(a)]


def held_tensors(m, a, b):
    return [a * m.held.pair.first + m.held.pair[1][0], b * (1.0 / m.held.sized.shape[0])]


def bound_again(m, a, b):
    m.model.load += 0.5
    return [torch.tanh(a + m.model.load[0])]


OPS = (
    held_functions, held_in_containers, held_in_objects, held_numbers, held_memberships, held_tensors,
    bound_again,
)  # fmt: skip

# Changes between two calls: each takes what is held ---------------------------------------------------------


def other(now, first, second):
    return second if now is first else first


def put(name, first, second):
    return lambda held: setattr(held, name, other(getattr(held, name), first, second))


def toggled(members, item):
    (members.discard if item in members else members.add)(item)


def toggled_key(table, key):
    if table.pop(key, None) is None:
        table[key] = 1


def toggled_attribute(held):
    if held.__dict__.pop("loud", None) is None:
        held.loud = 1


def set_code(held):
    code = other(held.helper.__code__, shift.__code__, unshift.__code__)
    held.helper.__code__ = code


def set_item(name, key, first, second):
    def change(held):
        container = getattr(held, name)
        container[key] = other(container[key], first, second)

    return change


def set_attribute(name, attribute, first, second):
    def change(held):
        owner = getattr(held, name)
        setattr(owner, attribute, other(getattr(owner, attribute), first, second))

    return change


# A method of tensors; Dynamo of torch 2.11 cannot trace one that is held.
TANH = torch.Tensor.tanh if torch.__version__ >= "2.12" else torch.erf

CHANGES = (
    put("function", torch.tanh, torch.sin),
    put("function", TANH, torch.sigmoid),
    put("method", Scaler(0.5).scale, Scaler(0.5).negate),
    put("method", fresh(shift), Mirror(0.5).scale),
    put("helper", fresh(shift), fresh(unshift)),
    set_code,
    set_attribute("helper", "__defaults__", (0.25,), (0.75,)),
    set_item("functions", 0, torch.sin, torch.cos),
    set_item("functions", 1, Scaler(0.5).negate, shift),
    set_item("table", "a", operator.neg, operator.pos),
    set_attribute("namespace", "act", F.silu, F.gelu),
    set_attribute("namespace", "factor", 0.5, 0.25),
    lambda held: setattr(held, "namespace", types.SimpleNamespace(act=torch.sin, factor=0.5)),
    set_attribute("scaler", "__class__", Scaler, Mirror),
    set_attribute("scaler", "factor", 0.5, 0.25),
    lambda held: setattr(held.scaler, "scale", fresh(unshift)),
    set_item("numbers", 0, 0.5, -0.5),
    lambda held: held.numbers.append(0.5),
    lambda held: toggled_key(held.keys, "b"),
    lambda held: toggled(held.moods, "loud"),
    toggled_attribute,
    put("none", None, 1),
    lambda held: setattr(held, "sized", nn.Parameter(torch.ones(held.sized.shape[0] % 3 + 2))),
    lambda held: setattr(held.sized, "data", torch.ones(held.sized.shape[0] % 3 + 2)),
    lambda held: setattr(held, "pair", held.pair_of(-0.5)),
)
