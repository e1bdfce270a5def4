"""Nested structures: taken apart, built again and matched by generated code."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecewise.calls.structure import (
    MatchWriter,
    Namespace,
    build_source,
    flatten_structure,
    rebuild_dataclass,
)

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Checked:
    """Its constructor cannot be called with its fields."""

    total: Any = dataclasses.field(init=False)
    parts: dataclasses.InitVar[Any] = None

    def __post_init__(self, parts):
        self.total = sum(parts)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Order(enum.IntEnum):
    FIRST = 1


class Opaque:
    def __repr__(self) -> str:
        return "Opaque()"  # test names must not hold addresses


OPAQUE = Opaque()
TENSORS = [torch.zeros(size) for size in range(1, 6)]

leaves = st.one_of(
    st.sampled_from(TENSORS),
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([0.0, -0.0, 1.5, float("inf")]),
    st.sampled_from([Color.RED, Color.BLUE, torch.float32, torch.int64, OPAQUE, 1j]),
)
keys = st.one_of(st.sampled_from(["a", "b", "c d"]), st.integers(0, 2), st.sampled_from(list(Color)))
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner),
        st.builds(Frozen, inner),
        st.lists(st.tuples(st.sampled_from("ab"), inner), max_size=2).map(collections.OrderedDict),
        st.lists(inner, max_size=2).map(collections.deque),
    ),
    max_leaves=8,
)


def rebuild(structure, values):
    """The value that the generated expression makes."""
    namespace = Namespace()
    source = build_source(structure, [f"leaves[{index}]" for index in range(len(values))], namespace)
    return eval(f"lambda leaves: {source}", namespace.globals)(values)


def matcher(structure, check=lambda node, name: []):
    """`match(value)`: the leaves, or None."""
    namespace = Namespace()
    writer = MatchWriter(namespace, check)
    writer.write(structure, "value")
    body = "".join(f"    {line}\n" for line in writer.lines)
    found = ", ".join(writer.leaf_names[index] for index in sorted(writer.leaf_names))
    exec(f"def match(value):\n{body}    return [{found}]\n", namespace.globals)
    return namespace.globals["match"]


def same(left, right):
    """Equal in types, structure, plain values with the sign of zero, and identity of tensors and objects."""
    if isinstance(left, torch.Tensor) or isinstance(left, Opaque):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple, collections.deque)):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    return left == right and repr(left) == repr(right)


def leaf_indices(node):
    if node.kind in ("tensor", "int"):
        return [node.index]
    return [index for child in node.children for index in leaf_indices(child)]


@QUICK
@given(nested)
def test_what_is_taken_apart_is_built_again(value):
    structure, found = flatten_structure(value)
    assert same(rebuild(structure, found), value)
    assert leaf_indices(structure) == list(range(len(found)))


@QUICK
@given(nested)
def test_a_match_gives_the_leaves_in_order(value):
    structure, found = flatten_structure(value)
    got = matcher(structure)(value)
    assert got is not None and len(got) == len(found)
    assert all(left is right for left, right in zip(got, found, strict=True))


def without_leaves(value):
    """The value with each tensor and int replaced by one stand-in: what a match may not tell apart."""
    structure, found = flatten_structure(value)
    return rebuild(structure, [0 if type(leaf) is int else TENSORS[0] for leaf in found])


@QUICK
@given(nested, nested)
def test_a_match_is_exactly_equality_of_structure(value, other):
    structure, _ = flatten_structure(value)
    matched = matcher(structure, kinds_differ)(other) is not None
    assert matched == same(without_leaves(value), without_leaves(other))


def kinds_differ(node, name):
    kind = "int" if node.kind == "int" else "Tensor"
    return [f"type({name}).__name__ != {kind!r}"]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (True, 1),
        (1, True),
        (0.0, -0.0),
        (1.0, 1),
        (Color.RED, Color.BLUE),
        (Order.FIRST, 1),
        ("a", b"a"),
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
        ({"a": 1}, collections.OrderedDict(a=1)),
        (Pair(1, 2), (1, 2)),
        (Record(1), Frozen(1)),
        (None, False),
        (OPAQUE, Opaque()),
        (torch.float32, torch.float64),
        (collections.deque([1]), [1]),
    ],
    ids=repr,
)
def test_close_relatives_do_not_match(value, other):
    assert matcher(flatten_structure(value)[0], kinds_differ)(value) is not None
    assert matcher(flatten_structure(value)[0], kinds_differ)(other) is None


def test_equal_values_of_another_identity_match():
    match = matcher(flatten_structure({"s": "text", "f": 0.1, "d": torch.device("cpu")})[0])
    assert match({"s": "".join(["te", "xt"]), "f": float("0.1"), "d": torch.device("cpu")}) is not None


def test_a_tensor_met_twice_is_one_leaf_where_asked():
    tensor = torch.ones(2)
    structure, found = flatten_structure([tensor, tensor], share=True)
    assert len(found) == 1
    first, second = rebuild(structure, [tensor])
    assert first is second is tensor
    assert len(flatten_structure([tensor, tensor])[1]) == 2


def test_a_result_is_new_each_time_and_shares_nothing_with_the_last():
    structure, found = flatten_structure({"a": [1, {"b": 2}]})
    first, second = rebuild(structure, found), rebuild(structure, found)
    assert first == second and first["a"] is not second["a"] and first["a"][1] is not second["a"][1]


def test_a_dataclass_is_rebuilt_without_its_constructor():
    value = Checked(parts=[1, 2])
    structure, found = flatten_structure(value)
    assert rebuild(structure, found).total == 3
    assert rebuild_dataclass(Frozen, ["value"], [4]) == Frozen(4)


def test_further_leaves_by_request():
    structure, found = flatten_structure([1.5, 2.5], is_leaf=lambda value: value == 2.5)
    assert found == [2.5] and [child.kind for child in structure.children] == ["const", "int"]


def test_a_namespace_gives_one_name_to_one_object():
    namespace = Namespace()
    names = [namespace.name(OPAQUE), namespace.name(OPAQUE), namespace.name(Opaque())]
    assert names[0] == names[1] != names[2]
    assert namespace.globals[names[0]] is OPAQUE
