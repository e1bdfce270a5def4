"""[I10, I6]: whatever a guard of Dynamo's asks is compared between calls; what changed runs eagerly."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from guard_changes import CHANGES, More, Ops, double, fresh, triple
from state_models import Model, graph, new_model, serve, tokens
from torch import nn

import piecewise
from piecewise import torch_api
from piecewise.errors.trace import NotOneGraph, StateNotCompared
from piecewise.trace.dynamo.guard_kinds import GUARD_KINDS, Rule, rule_of
from piecewise.trace.dynamo.sources import Scope
from piecewise.trace.state.state import FactFinder
from runners.state.state_check import StateCheck

TORCH = ".".join(torch.__version__.split(".")[:2])


def kinds_seen(monkeypatch):
    """The kinds of the guards of all traces from here on."""
    seen, add_guard = set(), FactFinder.add_guard

    def noting(self, guard, scope):
        seen.add(guard.kind)
        return add_guard(self, guard, scope)

    monkeypatch.setattr(FactFinder, "add_guard", noting)
    return seen


@pytest.mark.parametrize("what", CHANGES)
def test_I10_what_changed_runs_eagerly_until_a_refresh(what, monkeypatch):
    case, seen = CHANGES[what], kinds_seen(monkeypatch)
    model = new_model(before=lambda model, x: case.read(model, x))
    case.setup(model, monkeypatch)
    if case.since > TORCH:
        with pytest.raises((StateNotCompared, NotOneGraph), match="guard_changes.py"):
            graph(model.eval(), buckets=(8,))
        return
    graphed = graph(model.eval(), buckets=(8,))
    known = GUARD_KINDS.get(case.kind)
    assert known is None or case.kind in seen or not known.since <= TORCH <= known.until, sorted(seen)
    assert serve(graphed, tokens(5)) == "replay"
    with torch.no_grad():
        case.change(model, monkeypatch)
    assert [serve(graphed, tokens(5)) for _ in range(2)] == [case.outcome] * 2
    graphed.refresh()
    assert serve(graphed, tokens(5)) == "replay"


def test_the_table_has_each_kind_of_this_torch_and_no_other():
    known = {
        kind
        for kind, entry in GUARD_KINDS.items()
        if entry.since <= TORCH <= entry.until and kind != torch_api.SeenGuard.UNGUARDED
    }
    assert torch_api.guard_kinds() == known


def test_a_kind_that_the_table_lacks_is_a_refusal_that_names_it():
    guard = torch_api.SeenGuard("L['model'].held", "OF_ANOTHER_TORCH", {})
    with pytest.raises(StateNotCompared, match=r"(?s)model\.held.*OF_ANOTHER_TORCH.*Rule:.*Fix:"):
        rule_of(guard)


class Sub(torch.Tensor):
    pass


def to_another_shape(tensor):
    tensor.data = torch.ones(4)


def of_kind(kind, value, **arguments):
    """Facts of one guard that looks at ``model.held``."""
    model = nn.Module()
    model.held = value
    finder = FactFinder(model, skip_root=False)
    finder.add_guard(torch_api.SeenGuard("L['model'].held", kind, arguments), Scope({"model": model}, {}))
    return model, StateCheck(facts=finder.facts())


# Rule → a value, another of which the answer differs, what the guard is asked with, and a change in place.
ASKED = {
    Rule.VALUE: lambda: (2.0, 3.0, {}, None),
    Rule.CODE: lambda: (fresh(double), triple, {}, lambda value: setattr(value, "__code__", triple.__code__)),
    Rule.TYPE: lambda: (Ops(), 1, {}, lambda value: setattr(value, "__class__", More)),
    Rule.CONTENT: lambda: ({"a": 1}, {"b": 1}, {}, lambda value: value.update(c=1)),
    Rule.MEMBER: lambda: ({"a"}, {"b"}, {"key": "a"}, lambda value: value.remove("a")),
    Rule.ATTRIBUTE: lambda: (Ops(), 1, {"attr": "a"}, lambda value: setattr(value, "a", 1)),
    Rule.TENSOR: lambda: (torch.ones(3), torch.ones(4), {}, to_another_shape),
    Rule.METADATA: lambda: (torch.ones(3).as_subclass(Sub), torch.ones(4), {}, to_another_shape),
    Rule.OPAQUE: lambda: (Ops(), Ops(), {}, None),
}


@pytest.mark.parametrize("kind", GUARD_KINDS)
def test_I10_each_kind_is_compared_by_its_rule(kind):
    rule = GUARD_KINDS[kind].rule
    if rule is Rule.REFUSED:
        with pytest.raises(StateNotCompared, match=rf"(?s)model\.held.*{kind}.*Rule:.*Fix:"):
            of_kind(kind, iter([]))
        return
    if rule in (
        Rule.PROCESS,
        Rule.NO_EFFECT,
        Rule.SIZES,
        Rule.SAME_OBJECT,
    ):  # test_validity.py, test_sizes.py and below
        return
    value, other, arguments, change = ASKED[rule]()
    model, check = of_kind(kind, value, **arguments)
    check.until_stable()
    assert check.is_unchanged()
    model.held = other
    assert not check.is_unchanged() and "model.held" in check.find_change().detail
    model.held = value
    assert check.find_change() is None
    if change is not None:
        change(value)
        assert not check.is_unchanged() and "model.held" in check.find_change().detail


def test_I10_what_each_look_up_makes_anew_is_asked_anew():
    class Held:
        amount = 2.0
        made = property(lambda self: types.SimpleNamespace(amount=self.amount))

    model = nn.Module()
    model.held = Held()
    finder, scope = FactFinder(model, skip_root=False), Scope({"model": model}, {})
    finder.add_guard(torch_api.SeenGuard("L['model'].held.made.amount", "CONSTANT_MATCH", {}), scope)
    check = StateCheck(facts=finder.facts())
    check.until_stable()
    assert check.is_unchanged()
    model.held.amount = 3.0
    assert not check.is_unchanged() and "model.held.made.amount" in check.find_change().detail


@pytest.mark.parametrize(
    "iterator", [iter((1.0, 2.0)), iter(range(1, 3)), itertools.count(1)], ids=["tuple", "range", "count"]
)
def test_I10_an_iterator_that_forward_reads_is_refused(iterator):
    model = new_model(before=lambda model, x: x * next(model.steps))
    model.steps = iterator
    with pytest.raises((StateNotCompared, NotOneGraph), match=r"(?s)Rule:.*Fix:"):
        graph(model)


def test_I6_a_shape_alone_is_read_of_another_parameter_that_has_it():
    model = new_model(before=lambda model, x: x * model.held.shape[0])
    model.held = nn.Parameter(torch.ones(3))
    graphed = graph(model, buckets=(8,))
    model.held = nn.Parameter(torch.zeros(3))
    assert serve(graphed, tokens(5)) == "replay"


class WithDefaults(nn.Module):
    """Its forward has defaults of each kind."""

    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, ids, factor=2.0, times=2, *, shift=1.0, more=3):
        return self.inner(ids) * factor * times + shift * more


DEFAULTS = {
    "a float": ("__defaults__", (5.0, 2)),
    "an int": ("__defaults__", (2.0, 7)),
    "an int for a float": ("__defaults__", (3, 2)),
    "a keyword's": ("__kwdefaults__", {"shift": 4.0, "more": 3}),
    "a keyword's int": ("__kwdefaults__", {"shift": 1.0, "more": 4}),
    "inside the keywords'": ("__kwdefaults__", None),
}


@pytest.mark.parametrize("in_place", [False, True], ids=["compiled", "enabled"])
@pytest.mark.parametrize("what", DEFAULTS)
def test_I10_defaults_of_the_models_own_forward(what, in_place, monkeypatch):
    name, value = DEFAULTS[what]
    forward = WithDefaults.forward
    monkeypatch.setattr(forward, "__kwdefaults__", dict(forward.__kwdefaults__))
    monkeypatch.setattr(forward, "__defaults__", forward.__defaults__)
    torch.manual_seed(0)
    make = piecewise.enable if in_place else piecewise.compile
    graphed = make(WithDefaults().eval(), buckets=(8,), progress=False)
    graphed.capture(tokens(7))
    assert serve(graphed, tokens(5)) == "replay"
    if value is None:
        forward.__kwdefaults__["shift"] = 9.0
    else:
        setattr(forward, name, value)
    assert serve(graphed, tokens(5)) == "module_state_changed"
    for again, factor in ((graphed.refresh, 2.5), (lambda: graphed.capture(tokens(7)), 3.5)):
        again()
        assert serve(graphed, tokens(5)) == "replay"
        forward.__defaults__ = (factor, 2)
        assert serve(graphed, tokens(5)) == "module_state_changed"


def test_I6_a_namespace_that_fills_up_as_it_is_asked_is_no_change():
    """`torch.ops` keeps each namespace that somebody asks for."""
    graphed = graph(new_model(before=lambda model, x: torch.ops.aten.relu(x)).eval(), buckets=(8,))
    assert serve(graphed, tokens(5)) == "replay"
    assert torch.ops.asked_for_here is vars(torch.ops)["asked_for_here"]
    assert serve(graphed, tokens(5)) == "replay"


def test_I6_what_torch_notes_of_an_op_is_no_change(monkeypatch):
    """An op's `__dict__` grows as torch is asked about the op, for example by a dispatch mode."""
    op = torch.ops.aten.relu.default
    graphed = graph(
        new_model(before=lambda model, x: x if "nothing" in vars(model) else op(x)).eval(), buckets=(8,)
    )
    assert serve(graphed, tokens(5)) == "replay"
    monkeypatch.setitem(vars(op), "_noted", object())
    assert serve(graphed, tokens(5)) == "replay"
