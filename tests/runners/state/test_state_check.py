"""[I4, I10]: the comparison of addresses and state, entry by entry, without a model."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator

import pytest
import torch
from torch import nn

from piecewise import torch_api
from runners.state import state_check
from runners.state.same_value import table_content
from runners.state.state_check import StateCheck, StateFacts, StateRef


@pytest.fixture(autouse=True, params=["numbers", "values"])
def each_way(request, monkeypatch):
    """Dicts compared by their numbers, and by their values as where the numbers tell nothing."""
    if request.param == "numbers" and torch_api.dict_versions_tell():
        check = functools.partial(state_check.StateCheck, dict_versions=torch_api.dict_versions)
        monkeypatch.setitem(globals(), "StateCheck", check)


@dataclasses.dataclass(slots=True)
class Slots:
    value: object


@dataclasses.dataclass(slots=True)
class OtherSlots:
    value: object


class Thing:
    pass


def place(owner, key="k", **more):
    return StateRef(owner, key, "the path", **more)


def assert_changed(check, kind, *words):
    assert not check.is_unchanged()
    change = check.find_change()
    assert change is not None and change.kind == kind
    for word in words:
        assert word in change.detail
    assert not check.is_unchanged()


def settle(check):
    """The first pass records what identity alone cannot tell."""
    assert check.find_change() is None
    assert check.is_unchanged()
    return check


OWNERS = {
    "dict": (lambda value: {"k": value}, "k", False),
    "list": (lambda value: [None, value], 1, False),
    "tuple": (lambda value: (value,), 0, False),
    "deque": (lambda value: collections.deque([value]), 0, False),
    "slot": (lambda value: Slots(value), "value", True),
}


@pytest.mark.parametrize("kind", OWNERS)
def test_a_place_gives_what_is_there_now_and_none_where_it_is_gone(kind):
    make, key, is_attribute = OWNERS[kind]
    owner = make("seen")
    ref = place(owner, key, is_attribute=is_attribute)
    assert ref.get() == "seen"
    if kind in ("dict", "list", "deque"):
        owner.clear()
        assert ref.get() is None


@pytest.mark.parametrize("kind", [kind for kind in OWNERS if kind != "tuple"])
def test_I10_a_value_in_each_kind_of_place(kind):
    make, key, is_attribute = OWNERS[kind]
    first, second = Thing(), Thing()
    owner = make(first)
    ref = place(owner, key, is_attribute=is_attribute)
    check = settle(StateCheck(facts=StateFacts(values=((ref, first),))))
    put = setattr if is_attribute else operator.setitem
    put(owner, key, second)
    assert_changed(check, "module_state_changed", "the path", "Thing")
    put(owner, key, first)
    assert check.is_unchanged()


def test_I10_the_value_that_was_seen_counts_and_not_the_one_at_construction():
    owner = {"k": 2.0}
    facts = StateFacts(values=((place(owner), 1.0),))
    assert_changed(StateCheck(facts=facts), "module_state_changed", "was 1.0, is 2.0")


@pytest.mark.parametrize(
    ("seen", "now", "same"),
    [
        (0.5, float("0.5"), True),
        (1000, int("1000"), True),
        ("text", "".join(["te", "xt"]), True),
        ((1, 2), tuple([1, 2]), True),
        (0.0, -0.0, False),
        (1, 1.0, False),
        (1, True, False),
        ((0.0,), (-0.0,), False),
        ([1], [1], False),
        (None, False, False),
    ],
    ids=repr,
)
def test_I10_equal_plain_values_are_one_and_the_next_check_is_fast(seen, now, same):
    owner = {"k": now}
    check = StateCheck(facts=StateFacts(values=((place(owner), seen),)))
    assert (check.find_change() is None) == same
    assert check.is_unchanged() == same


def test_I10_a_value_that_appears_where_there_was_none():
    owner = {}
    check = settle(StateCheck(facts=StateFacts(values=((place(owner), None),))))
    owner["k"] = 3
    assert_changed(check, "module_state_changed", "was nothing, is 3")


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ({"a": 1}, lambda table: table.update(b=2)),
        ({"a": 1, "b": 2}, lambda table: (table.pop("b"), table.update(c=2))),
        ({"a": 1, "b": 2}, lambda table: table.update(a=table.pop("a"))),
        ({1, 2}, lambda table: (table.remove(2), table.add(3))),
        ([1], lambda table: table.append(2)),
        (collections.deque([1]), lambda table: table.clear()),
        ({}, lambda table: table.update(a=1)),
        (set(), lambda table: table.add(1)),
        ([], lambda table: table.append(1)),
        (collections.OrderedDict(), lambda table: table.update(a=1)),
        (collections.OrderedDict(a=1, b=2), lambda table: table.move_to_end("a")),
        (collections.UserDict(), lambda table: table.update(a=1)),
    ],
    ids=[
        "added",
        "renamed",
        "reordered",
        "replaced",
        "appended",
        "cleared",
        "filled",
        "set filled",
        "list filled",
        "ordered filled",
        "ordered reordered",
        "mapping filled",
    ],
)
def test_I10_tables(table, change):
    table = copy.copy(table)
    facts = StateFacts(tables=((table, table_content(table), "the table"),))
    check = settle(StateCheck(facts=facts))
    change(table)
    assert_changed(check, "module_state_changed", "the table")


def test_I10_a_set_with_its_items_put_back_is_unchanged():
    table = {1, 2, 3}
    check = settle(StateCheck(facts=StateFacts(tables=((table, table_content(table), "the set"),))))
    table.remove(1)
    table.add(1)
    assert check.is_unchanged()


def test_I10_a_table_of_which_only_the_length_counts():
    table = {"a": 1}
    check = settle(StateCheck(facts=StateFacts(tables=((table, 1, "the table"),))))
    table["b"] = 2
    assert_changed(check, "module_state_changed", "were 1, are 2")


def test_I10_classes():
    module = nn.Linear(2, 2)
    check = settle(StateCheck(facts=StateFacts(types=((module, nn.Linear, "model.linear"),))))
    module.__class__ = type("Other", (nn.Linear,), {})
    assert_changed(check, "module_state_changed", "model.linear was a Linear, is a Other")


def test_I10_the_attributes_of_a_module_replaced_as_a_whole():
    module = nn.Linear(2, 2)
    check = settle(StateCheck(facts=StateFacts(types=((module, nn.Linear, "model.linear"),))))
    module.note = "unread"
    assert check.is_unchanged()
    module.__dict__ = dict(module.__dict__)
    assert_changed(check, "module_state_changed", "the attributes of model.linear were replaced")


def test_I10_a_class_without_attributes_of_its_own():
    thing = Slots(1)
    check = settle(StateCheck(facts=StateFacts(types=((thing, Slots, "the thing"),))))
    thing.__class__ = OtherSlots
    assert_changed(check, "module_state_changed", "the thing was a Slots, is a OtherSlots")


def test_I10_a_constant_container_that_never_held_what_was_seen():
    facts = StateFacts(values=((place((1.0,), 0), 2.0),))
    assert_changed(StateCheck(facts=facts), "module_state_changed", "was 2.0, is 1.0")
    facts = StateFacts(tables=(((1, 2), 3, "the tuple"),))
    assert_changed(StateCheck(facts=facts), "module_state_changed", "the tuple were 3, are 2")
    facts = StateFacts(answers=((operator.contains, "text", "x", False, "the text"),))
    assert_changed(StateCheck(facts=facts), "module_state_changed", "'x' was not in the text")


@pytest.mark.parametrize("kind", ["dict", "slot", "class", "mapping"])
def test_I10_none_becomes_a_value_and_a_value_goes(kind):
    owner = {
        "dict": {"value": None},
        "slot": Slots(None),
        "class": type("Kind", (), {"value": None}),
        "mapping": collections.UserDict(value=None),
    }[kind]
    is_attribute = kind in ("slot", "class")
    ref = place(owner, "value", is_attribute=is_attribute)
    put = setattr if is_attribute else operator.setitem
    remove = delattr if is_attribute else operator.delitem
    check = settle(StateCheck(facts=StateFacts(values=((ref, None),))))
    put(owner, "value", 3)
    assert_changed(check, "module_state_changed", "was None, is 3")
    check = settle(StateCheck(facts=StateFacts(values=((ref, 3),))))
    remove(owner, "value")
    assert_changed(check, "module_state_changed", "was 3, is nothing")


def test_I10_a_value_that_appears_in_a_place_of_any_kind():
    for owner, is_attribute in ((Thing(), True), (collections.UserDict(), False)):
        ref = place(owner, "value", is_attribute=is_attribute)
        check = settle(StateCheck(facts=StateFacts(values=((ref, None),))))
        (setattr if is_attribute else operator.setitem)(owner, "value", 3)
        assert_changed(check, "module_state_changed", "was nothing, is 3")


def test_I10_a_base_class_of_which_an_attribute_counts():
    parent = type("Parent", (), {"value": 1.0})
    child = type("Child", (parent,), {})
    ref = place(child, "value", is_attribute=True)
    check = settle(StateCheck(facts=StateFacts(values=((ref, child.value),))))
    parent.value = 2.0
    assert_changed(check, "module_state_changed", "was 1.0, is 2.0")
    parent.value = 1.0
    assert check.find_change() is None
    child.value = 3.0
    assert_changed(check, "module_state_changed", "was 1.0, is 3.0")


def test_I10_questions():
    thing, table = Thing(), {}
    facts = StateFacts(
        answers=(
            (hasattr, thing, "x", False, "the thing"),
            (operator.contains, table, "x", False, "the table"),
        )
    )
    check = settle(StateCheck(facts=facts))
    thing.x = None
    assert_changed(check, "module_state_changed", "'x' was not in the thing")
    del thing.x
    table["x"] = 1
    assert_changed(check, "module_state_changed", "'x' was not in the table")


def test_I10_a_check_that_was_settled_is_fast_from_its_first_call():
    owner = {"k": 1000, "t": torch.zeros(2)}
    facts = StateFacts(values=((place(owner), int("1000")),))
    check = StateCheck(tensors=[place(owner, "t")], facts=facts)
    assert not check.is_unchanged()
    check.until_stable()
    assert check.is_unchanged()
    owner["k"] = 3
    check.until_stable()
    assert_changed(check, "module_state_changed", "was 1000, is 3")


def test_I4_nothing_to_compare_is_unchanged():
    check = StateCheck()
    assert check.is_unchanged() and check.find_change() is None and check.num_entries == 0


def tensor_check():
    owner = {"k": torch.arange(6.0).view(2, 3)}
    return owner, settle(StateCheck(tensors=[place(owner)]))


def set_data(tensor, other):
    tensor.data = other


MOVES = {
    "bound anew": lambda owner: owner.update(k=torch.zeros(2, 3)),
    "deleted": lambda owner: owner.pop("k"),
    "replaced by none": lambda owner: owner.update(k=None),
    "data moved": lambda owner: set_data(owner["k"], torch.zeros(2, 3)),
    "transposed": lambda owner: set_data(owner["k"], owner["k"].view(3, 2).t()),
    "narrowed": lambda owner: set_data(owner["k"], owner["k"][:1]),
    "dtype": lambda owner: set_data(owner["k"], owner["k"].view(torch.int32)),
    "viewed in place": lambda owner: owner["k"].t_(),
    "grown": lambda owner: owner["k"].resize_(64, 64),
}


@pytest.mark.parametrize("move", MOVES)
def test_I4_a_tensor_that_moved_or_is_read_otherwise(move):
    owner, check = tensor_check()
    MOVES[move](owner)
    assert_changed(check, "moved_address", "the path")


def test_I4_a_tensor_updated_in_place_is_unchanged():
    owner, check = tensor_check()
    owner["k"].mul_(2)
    owner["k"].requires_grad_()
    assert check.find_change() is None


@pytest.mark.parametrize("kind", ["dict", "list", "slot"])
def test_I4_a_tensor_in_each_kind_of_place(kind):
    make, key, is_attribute = OWNERS[kind]
    owner = make(torch.zeros(2))
    check = settle(StateCheck(tensors=[place(owner, key, is_attribute=is_attribute)]))
    (setattr if is_attribute else operator.setitem)(owner, key, torch.zeros(2))
    assert_changed(check, "moved_address", "the path was bound to another tensor")


def test_I4_a_tensor_looked_up_may_move_and_must_stay_of_its_kind():
    owner = {"k": torch.zeros(4, 2)}
    check = settle(StateCheck(looked_up=[place(owner)]))
    owner["k"] = torch.ones(4, 2)
    assert check.is_unchanged()
    for other in (torch.zeros(5, 2), torch.zeros(4, 2, dtype=torch.float64), torch.zeros(2, 4).t(), None):
        owner["k"] = other
        assert_changed(check, "module_state_changed", "the path was float32[4, 2]")
    owner["k"] = torch.ones(4, 2)
    assert check.is_unchanged()


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_I4_the_check_is_fast_in_either_mode_after_its_first_pass(first):
    owner, check = tensor_check()
    second = torch.inference_mode if first is torch.no_grad else torch.no_grad
    for mode in (first, second):
        with mode():
            settle(check)
    for mode in (second, first):
        with mode():
            assert check.is_unchanged()
    owner["k"].data = torch.zeros(2, 3)
    for mode in (first, second):
        with mode():
            assert_changed(check, "moved_address", "storage of the path moved")


def test_I4_tensors_are_held_so_that_a_replay_never_reads_freed_memory():
    owner = {"k": torch.zeros(100)}
    storage = torch.multiprocessing.reductions.StorageWeakRef(owner["k"].untyped_storage())
    check = StateCheck(tensors=[place(owner)])
    del owner["k"]
    assert not storage.expired()
    del check
    assert storage.expired()


def test_num_entries_counts_all_that_is_compared():
    facts = StateFacts(
        values=((place({"k": 1}), 1),),
        tables=(([], 0, "t"),),
        types=(((), tuple, "x"),),
        answers=((hasattr, 1, "real", True, "y"),),
    )
    tensors = {"a": torch.zeros(1), "b": torch.zeros(1)}
    check = StateCheck(tensors=[place(tensors, "a")], looked_up=[place(tensors, "b")], facts=facts)
    assert check.num_entries == 6
    settle(check)
