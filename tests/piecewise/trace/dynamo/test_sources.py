"""Dynamo's sources are looked up step by step, each step once."""

from __future__ import annotations

import types

import pytest

from piecewise.trace.dynamo.sources import Scope, owner_and_name


def test_each_step_is_looked_up_once():
    reads = []

    class Table(dict):
        def __getitem__(self, key):
            reads.append(key)
            return super().__getitem__(key)

    model = types.SimpleNamespace(table=Table(first=types.SimpleNamespace(width=3, height=4)))
    scope = Scope({"model": model}, {})
    first = model.table["first"]
    reads.clear()
    for _ in range(2):
        steps = scope.steps("L['model'].table['first'].width")
        assert [step.value for step in steps[:3]] == [3, first, model.table]
    assert scope.find("L['model'].table['first'].height").value == 4
    assert reads == ["first"]


@pytest.mark.parametrize(
    "source",
    [
        "L['model'].sizes[0]",
        "L['model'].sizes[-1]",
        "L['model'].sizes[1:2]",
        "L['model'].table[(1, 'a')]",
        "L['model'].table[None]",
        "L['model'].table[1e999]",
        "L['model'].table[...]",
        "L['model'].table[\"it's\"]",
        "L['model'].table['a\\nb']",
        "L['model'].table['ä']['b']",
        "L['model'].table[G['Kind'].FIRST]",
        "dict(type(L['model']).__dict__)['width']",
        "object.__getattribute__(L['model'], 'sizes')[0]",
        "list(dict.keys(L['model'].table))[1]",
        "(L['a'] + L['b'])[1]",
        "(-L['c']).real",
        "[1, 2][0]",
    ],
)
def test_a_source_gives_what_python_gives(source):
    class Model:
        width = 3
        sizes = (4, 5)

    class Kind:
        FIRST = 1

    keys = (1, "a"), None, float("inf"), ..., "it's", "a\nb", Kind.FIRST
    model = Model()
    model.table = {key: str(key) for key in keys} | {"ä": {"b": 6}}
    names = {"model": model, "a": [1], "b": [2], "c": 7.0}
    found = Scope(names, {"Kind": Kind}).find(source).value
    assert found == eval(source, {"L": names, "G": {"Kind": Kind}})


def test_values_beside_each_other_are_not_taken_for_one_another():
    scope = Scope({"a": [1], "b": [2]}, {})
    assert scope.find("(L['a'] + L['b'])[1]").value == 2
    assert scope.find("L['a'] + [L['b'][0]]").value == [1, 2]


@pytest.mark.parametrize(
    ("source", "owner", "name"),
    [
        ("L['model'].block.scale", "L['model'].block", "scale"),
        # torch 2.11 writes a name that is no identifier so.
        ("getattr(L['model']._modules['block'], '0.5')", "L['model']._modules['block']", "0.5"),
        ("getattr(L['model'].a, 'b)c')", "L['model'].a", "b)c"),
    ],
)
def test_the_attribute_that_a_source_ends_with(source, owner, name):
    assert owner_and_name(source) == (owner, name)
