"""[I10]: many dicts compared by their numbers, or by their values where the numbers tell nothing."""

from __future__ import annotations

import dataclasses
import gc
import operator
import weakref

import pytest
from dict_things import Other, Thing, needs_numbers, thing
from torch import nn

from piecewise import torch_api
from runners.state.watched_dicts import NOTHING, WatchedDicts


@pytest.fixture(params=[pytest.param("numbers", marks=needs_numbers), "values"])
def way(request):
    return request.param


@pytest.fixture
def watched(way):
    """Both ways to compare."""
    return WatchedDicts(torch_api.dict_versions if way == "numbers" else None)


@dataclasses.dataclass
class Numbers:
    """Counts how often numbers are taken."""

    taken: int = 0
    before: object = None

    def __call__(self, *args):
        self.taken += 1
        if self.before is not None:
            self.before()
        return torch_api.dict_versions(*args)


CHANGES = {
    "attribute set": lambda item: setattr(item, "a", 2.0),
    "attribute added": lambda item: setattr(item, "b", 2.0),
    "attribute deleted": lambda item: delattr(item, "a"),
    "written through the dict": lambda item: item.__dict__.update(a=2.0),
    "other attributes": lambda item: setattr(item, "__dict__", dict(item.__dict__)),
    "other class": lambda item: setattr(item, "__class__", Other),
}


@pytest.mark.parametrize("which", range(0, 150, 29))
def test_I10_a_value_in_any_of_many_dicts(watched, which):
    owners = [{"seen": object(), "unseen": 0} for _ in range(150)]
    for owner in owners:
        watched.add_value(owner, "seen", owner["seen"])
    assert watched.are_unchanged()
    owners[which]["unseen"] = 1
    assert watched.are_unchanged()
    seen = owners[which].pop("seen")
    assert not watched.are_unchanged() and not watched.are_unchanged()
    owners[which]["seen"] = seen
    assert watched.are_unchanged()


def test_I10_a_value_that_is_equal_and_not_the_same_is_a_change(watched):
    owner = {"k": 1.0}
    kept, index = watched.add_value(owner, "k", owner["k"])
    assert watched.are_unchanged()
    owner["k"] = float("1.0")
    assert not watched.are_unchanged()
    kept[index] = owner["k"]
    assert watched.are_unchanged()


@pytest.mark.parametrize("change", ["other attributes", "other class"])
def test_I10_an_object_of_which_no_attribute_counts(watched, change):
    items = [thing(a=1.0), thing(a=1.0)]
    for item in items:
        watched.add_object(item, Thing)
    assert watched.are_unchanged()
    items[1].a = 5.0
    assert watched.are_unchanged()
    CHANGES[change](items[1])
    assert not watched.are_unchanged()


def test_I10_an_answer_that_depends_on_the_keys(watched, way):
    owner, asked = {"a": 1}, []

    def ask():
        asked.append(1)
        return len(owner)

    watched.add_answer(owner, ask, 1)
    assert watched.are_unchanged()
    num_asked = len(asked)
    assert watched.are_unchanged()
    assert (len(asked) == num_asked) == (way == "numbers")
    owner["b"] = 2
    assert not watched.are_unchanged()
    del owner["b"]
    assert watched.are_unchanged()


FILLS = {
    "update": lambda owner: owner.update(a=1),
    "union in place": lambda owner: operator.ior(owner, {"a": 1}),
    "item": lambda owner: operator.setitem(owner, "a", 1),
    "setdefault": lambda owner: owner.setdefault("a", 1),
}


@pytest.mark.parametrize("fill", FILLS)
def test_I10_a_dict_without_items_that_is_filled(watched, fill):
    owner, item = {}, Thing()
    watched.add_answer(owner, lambda: "a" in owner, False)
    watched.add_object(item, Thing)
    watched.add_value(item.__dict__, "a", NOTHING)
    for filled in (owner, item.__dict__):
        assert watched.are_unchanged() and watched.are_unchanged()
        FILLS[fill](filled)
        assert not watched.are_unchanged()
        filled.clear()


def test_a_value_that_was_another_from_the_start(watched):
    watched.add_value({"k": 1}, "k", 2)
    assert not watched.are_unchanged()


def test_a_class_that_was_another_from_the_start(watched):
    watched.add_object(thing(), Other)
    assert not watched.are_unchanged()


@needs_numbers
def test_numbers_are_taken_once_where_nothing_is_written():
    owner = {"k": 1}
    watched = WatchedDicts(numbers := Numbers())
    watched.add_value(owner, "k", owner["k"])
    assert all(watched.are_unchanged() for _ in range(100))
    assert numbers.taken == 1


@needs_numbers
def test_numbers_are_taken_again_after_a_write_that_did_not_matter():
    owner = {"k": 1}
    watched = WatchedDicts(numbers := Numbers())
    watched.add_value(owner, "k", owner["k"])
    for _ in range(3):
        assert all(watched.are_unchanged() for _ in range(20))
        owner["note"] = object()
    assert numbers.taken == 3


@needs_numbers
def test_a_dict_that_is_written_on_each_call_seldom_has_its_numbers_taken():
    owner = {"k": 1}
    watched = WatchedDicts(numbers := Numbers())
    watched.add_value(owner, "k", owner["k"])
    for count in range(5000):
        owner["count"] = count + 1000
        assert watched.are_unchanged()
    assert numbers.taken <= 15
    owner["k"] = 2
    assert not watched.are_unchanged()


@needs_numbers
def test_a_write_while_numbers_are_taken_is_noticed():
    owner = {"k": 1}
    watched = WatchedDicts(numbers := Numbers())
    watched.add_value(owner, "k", owner["k"])

    numbers.before = lambda: owner.update(k=2)
    watched.are_unchanged()
    assert not watched.are_unchanged()


def test_nothing_outlives_the_comparison(way):
    item = nn.Linear(2, 2)
    watched = WatchedDicts(torch_api.dict_versions if way == "numbers" else None)
    watched.add_object(item, nn.Linear)
    watched.add_value(item._parameters, "weight", item.weight)
    assert watched.are_unchanged()
    gone = weakref.ref(item), weakref.ref(item.weight)
    del item
    assert gone[0]() is not None
    del watched
    gc.collect()
    assert gone[0]() is None and gone[1]() is None
