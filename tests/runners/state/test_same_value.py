"""[I6]: values are compared without asking objects of the user's anything, and no comparison raises."""

from __future__ import annotations

import collections
import functools
import math
import operator

import pytest
import torch

from piecewise import torch_api
from runners.state import state_check
from runners.state.same_value import has_content, is_same_value, table_content
from runners.state.state_check import StateFacts, StateRef, kind_of

TENSOR, OTHER = torch.ones(3), torch.ones(3)
Pair = collections.namedtuple("Pair", "first second")


class Hostile:
    """Raises whatever it is asked."""

    def __eq__(self, other):
        raise RuntimeError("compared")

    def __hash__(self):
        return 1

    def __repr__(self):
        raise RuntimeError("shown")

    def __len__(self):
        raise RuntimeError("counted")

    @property
    def amount(self):
        raise RuntimeError("read")


class HostileNumber(float):
    __slots__ = ()
    __eq__ = __repr__ = Hostile.__eq__
    __hash__ = float.__hash__


class Noted(float):
    """Holds more than its value."""


def noted(value, note):
    made = Noted(value)
    made.note = note
    return made


numpy = pytest.importorskip("numpy")
HOSTILE = Hostile()
PAIRS = [
    (TENSOR, TENSOR, True),
    (TENSOR, OTHER, False),
    ((TENSOR, 1), (TENSOR, 1), True),
    ((TENSOR, 1), (OTHER, 1), False),
    (((TENSOR,), 2.0), ((OTHER,), 2.0), False),
    (Pair(TENSOR, OTHER), Pair(TENSOR, OTHER), True),
    (Pair(TENSOR, OTHER), Pair(OTHER, OTHER), False),
    (Pair(1, 2), (1, 2), False),
    ((1, 2), (1, 2, 3), False),
    ((1,), (True,), False),
    ((0.0,), (-0.0,), False),
    (torch.Size([2]), torch.Size([2]), True),
    (HOSTILE, HOSTILE, True),
    (HOSTILE, Hostile(), False),
    ((HOSTILE,), (Hostile(),), False),
    (HostileNumber(1), HostileNumber(1), False),
    (noted(1, "a"), noted(1, "b"), False),
    (math.nan, float("nan"), True),
    (0.5, float("0.5"), True),
    (10**20, int("1" + "0" * 20), True),
    ("text", "".join(["te", "xt"]), True),
    (slice(1, 2), slice(1, 2), True),
    (slice(0.0, 2), slice(-0.0, 2), False),
    (range(3), range(3), True),
    (range(3), range(4), False),
    (frozenset({1, "a"}), frozenset({"a", 1}), True),
    (frozenset({1}), frozenset({True}), False),
    (frozenset({0.0}), frozenset({-0.0}), False),
    (frozenset({TENSOR}), frozenset({OTHER}), False),
    (numpy.int64(1), numpy.int64(1), True),
    (numpy.int64(1), numpy.int32(1), False),
    (numpy.ones(2), numpy.ones(2), False),
    ([1], [1], False),
    (None, False, False),
    (torch.float32, torch.float32, True),
    (torch.device("cpu"), torch.device("cpu"), True),
]


@pytest.mark.parametrize(("now", "seen", "same"), PAIRS, ids=range(len(PAIRS)))
def test_I6_same_values(now, seen, same):
    assert is_same_value(now, seen) is same
    assert is_same_value(seen, now) is same


@pytest.mark.parametrize(
    ("table", "other", "same"),
    [
        ({TENSOR: 1}, {TENSOR: 2}, True),
        ({TENSOR: 1}, {OTHER: 1}, False),
        ({HOSTILE: 1}, {HOSTILE: 1}, True),
        ({1: 1}, {True: 1}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ({TENSOR}, {OTHER}, False),
        ([1], [2], True),
    ],
    ids=range(7),
)
def test_I6_contents_of_containers(table, other, same):
    assert has_content(other, table_content(table)) is same


def test_I6_a_container_that_raises_has_other_contents():
    assert not has_content(HOSTILE, 3)


@pytest.fixture(params=["numbers", "values"])
def check_of(request):
    """Both ways to compare dicts."""
    numbers = torch_api.dict_versions if torch_api.dict_versions_tell() else None
    return functools.partial(
        state_check.StateCheck, dict_versions=numbers if request.param == "numbers" else None
    )


def place(owner, key="k", **more):
    return StateRef(owner, key, "the path", **more)


CHANGES = {
    "a tuple of tensors": lambda: ((TENSOR, 1), (OTHER, 1)),
    "a namedtuple of tensors": lambda: (Pair(TENSOR, OTHER), Pair(OTHER, OTHER)),
    "a list of objects that raise": lambda: ([Hostile()], [Hostile()]),
    "an object that raises": lambda: (Hostile(), Hostile()),
    "a dict of tensors": lambda: ({TENSOR: (TENSOR,)}, {OTHER: (OTHER,)}),
    "an array": lambda: (numpy.ones(3), numpy.ones(3)),
}


@pytest.mark.parametrize("kind", ["dict", "list", "attribute"])
@pytest.mark.parametrize("what", CHANGES)
def test_I6_what_was_replaced_is_told_whatever_it_is(check_of, what, kind):
    seen, now = CHANGES[what]()
    owner, key = {"dict": ({}, "k"), "list": ([None], 0), "attribute": (type("Kind", (), {}), "k")}[kind]
    put = setattr if kind == "attribute" else operator.setitem
    put(owner, key, seen)
    check = check_of(facts=StateFacts(values=((place(owner, key, is_attribute=kind == "attribute"), seen),)))
    check.until_stable()
    assert check.is_unchanged()
    put(owner, key, now)
    assert not check.is_unchanged()
    change = check.find_change()
    assert change.kind == "module_state_changed" and "the path" in change.detail
    put(owner, key, seen)
    assert check.find_change() is None and check.is_unchanged()


def test_I6_an_equal_tuple_of_the_same_tensors_is_no_change(check_of):
    owner = {"k": (TENSOR, [1])}
    check = check_of(facts=StateFacts(values=((place(owner), owner["k"]),)))
    check.until_stable()
    owner["k"] = (TENSOR, owner["k"][1])
    assert check.find_change() is None and check.is_unchanged()


def test_I6_a_property_that_raises_is_a_change(check_of):
    class Kind:
        amount = 2.0

    owner = Kind()
    facts = StateFacts(
        values=((place(owner, "amount", is_attribute=True), 2.0),),
        answers=((hasattr, owner, "other", False, "the object"),),
    )
    check = check_of(facts=facts)
    check.until_stable()
    assert check.is_unchanged()
    Kind.other = Hostile.amount
    assert not check.is_unchanged() and "the object" in check.find_change().detail
    Kind.amount = Hostile.amount
    assert not check.is_unchanged() and "is nothing" in check.find_change().detail


def test_I10_none_that_is_deleted_is_a_change(check_of):
    owner = {"k": None, "other": 1}
    check = check_of(facts=StateFacts(values=((place(owner), None),)))
    check.until_stable()
    assert check.is_unchanged()
    del owner["k"]
    assert not check.is_unchanged() and "was None, is nothing" in check.find_change().detail


def test_I10_a_tensor_of_which_no_element_was_read(check_of):
    owner = {"k": torch.ones(3)}
    check = check_of(facts=StateFacts(tensors=((place(owner), kind_of(owner["k"])),)))
    check.until_stable()
    assert check.is_unchanged() and check.num_entries == 1
    owner["k"] = torch.zeros(3)
    assert check.is_unchanged()
    for other in (torch.ones(4), torch.ones(3).double(), torch.ones(6)[::2], None, "text"):
        owner["k"] = other
        assert not check.is_unchanged() and check.find_change().kind == "module_state_changed"


def test_I10_tensors_that_were_several_become_one(check_of):
    owner = {"a": torch.ones(3), "b": torch.ones(3)}
    check = check_of(looked_up=[place(owner, "a"), StateRef(owner, "b", "the other")])
    check.until_stable()
    assert check.is_unchanged()
    owner["b"] = owner["a"]
    assert not check.is_unchanged() and "the other is the tensor of the path" in check.find_change().detail
    owner["b"] = torch.zeros(3)
    assert check.find_change() is None and check.is_unchanged()
