"""Calls bound to forward's parameters, and the generated match of their values."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecewise.calls.binder import (
    MISSING,
    CallBinder,
    FormBinder,
    LeafRule,
    WrittenMemory,
    describe_call,
    is_plain_leaf,
    same_count,
    write_matcher,
)
from piecewise.calls.structure import Namespace, flatten_structure


def plain(a, b, c=None):
    return a, b, c


def keyword_only(a, *, b, c=1.5):
    return a, b, c


def positional_only(a, b=2, c="x", /, d=None):
    return a, b, c, d


def everything(a, b=None, /, c=1, *args, d=2.5, **kwargs):
    return a, b, c, args, d, kwargs


def stars(*args, **kwargs):
    return args, kwargs


def none():
    return ()


def awkward(lambda_, print=None, _missing=3, self=None):
    return lambda_, print, _missing, self


def required_after_default(a=None, *, b):
    return a, b


FUNCTIONS = [
    plain, keyword_only, positional_only, everything, stars, none, awkward, required_after_default
]  # fmt: skip
NAMES = ["a", "b", "c", "d", "e", "lambda_", "print"]
calls = st.tuples(
    st.lists(st.integers(0, 9), max_size=5),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9), max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FUNCTIONS), calls)
def test_I10_binding_accepts_what_python_accepts_and_makes_the_same_call_again(function, call):
    args, kwargs = call
    binder = CallBinder(function)
    try:
        want = function(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            again(binder, function, binder.bind(*args, **kwargs))
        return
    got = again(binder, function, binder.bind(*args, **kwargs))
    assert got == want


def again(binder, function, bound):
    """The call that `call_source` writes for bound values."""
    namespace = Namespace()
    structure, leaves = flatten_structure(bound)
    source = binder.call_source(structure, [f"leaves[{index}]" for index in range(len(leaves))], namespace)
    return eval(f"lambda function, leaves: function({source})", namespace.globals)(function, leaves)


def test_I10_each_way_to_write_a_call_binds_alike():
    bind = CallBinder(plain).bind
    ways = [bind(1, 2, None), bind(1, 2), bind(1, b=2), bind(b=2, a=1), bind(c=None, a=1, b=2)]
    assert all(way == (1, 2, None) for way in ways)


def test_I10_an_int_default_stays_out():
    assert CallBinder(everything).bind(1)[2] is MISSING
    assert CallBinder(everything).bind(1)[4] == 2.5


def test_I10_further_keywords_keep_their_order():
    bind = CallBinder(everything).bind
    for order in itertools.permutations(["x", "y", "z"]):
        assert tuple(bind(1, **{name: name for name in order})[-1]) == order


@pytest.mark.parametrize("function", FUNCTIONS)
def test_I10_a_form_binder_keeps_the_call_as_it_was_made(function):
    binder = FormBinder(function)
    for args, kwargs in [((), {}), ((1, 2), {}), ((1,), {"z": 2, "b": 3}), ((), {"b": 3, "a": 1})]:
        bound_args, bound_kwargs = binder.bind(*args, **kwargs)
        assert bound_args == args and list(bound_kwargs.items()) == list(kwargs.items())
        again_args, again_kwargs = again(binder, stars, (bound_args, bound_kwargs))
        assert again_args == args and list(again_kwargs.items()) == list(kwargs.items())
        assert binder.absent((bound_args, bound_kwargs)) == []


def test_names_of_leaves_of_a_call_that_is_kept_are_the_users():
    binder = FormBinder(plain)
    tensors = [torch.zeros(1) for _ in range(6)]
    structure, _ = flatten_structure(binder.bind(*tensors[:4], z=[tensors[4]], b=tensors[5]))
    assert binder.leaf_paths(structure) == {0: "a", 1: "b", 2: "c", 3: "args[3]", 4: "z[0]", 5: "b"}


def test_names_of_leaves_are_the_users():
    binder = CallBinder(everything)
    x, y, z = (torch.zeros(1) for _ in range(3))
    structure, _ = flatten_structure(binder.bind(x, [y], 3, z, k={"deep": (x,)}))
    assert binder.leaf_paths(structure) == {
        0: "a", 1: "b[0]", 2: "c", 3: "args[0]", 4: "k['deep'][0]"
    }  # fmt: skip


def match_for(*values, token=(0, 0), **options):
    structure, leaves = flatten_structure(values)
    rules = {
        index: LeafRule(leaf, static={}, exact=leaf if isinstance(leaf, int) else None)
        for index, leaf in enumerate(leaves)
    }
    return write_matcher(structure, options.pop("rules", rules), anchor=token, **options)


X = torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("other", "matches"),
    [
        (torch.ones(7, 4), True),
        (torch.ones(0, 4), True),
        (torch.nn.Parameter(torch.ones(7, 4)), True),
        (torch.ones(7, 4, dtype=torch.float64), False),
        (torch.ones(7), False),
        (torch.ones(4, 7).t(), False),
        (torch.ones(7, 4, device="meta"), False),
        (torch.ones(7, 4).to_sparse(), False),
        (torch.ones(7, 4).as_subclass(type("Sub", (torch.Tensor,), {})), False),
        (7, False),
        (None, False),
    ],
    ids=lambda value: str(value)[:20],
)
def test_I10_a_tensor_leaf(other, matches):
    found = match_for(X)((other,))
    assert (found is not None) == matches
    if matches:
        assert found[0] == other.shape[0] and found[1][0] is other


def test_I10_static_dims():
    match = match_for(X, rules={0: LeafRule(X, static={1: 4}, exact=None)})
    assert match((torch.zeros(9, 4),)) is not None and match((torch.zeros(9, 5),)) is None


def test_I10_ints():
    rules = {
        0: LeafRule(X, static={}, exact=None),
        1: LeafRule(3, static={}, exact=3),
        2: LeafRule(4, static={}, exact=None),
    }
    match = match_for(X, 3, 4, rules=rules)
    assert match((X, 3, 99)) == (5, [X, 3, 99])
    assert match((X, 4, 4)) is None and match((X, True, 4)) is None and match((X, 3, 4.0)) is None


def test_I10_token_dims_that_disagree_are_told_from_another_signature():
    match = match_for(X, X, token_dims=[(1, 0, same_count)])
    assert match((torch.zeros(6, 4), torch.zeros(6, 4)))[0] == 6
    assert match((torch.zeros(6, 4), torch.zeros(7, 4)))[0] == -1
    twice = match_for(X, X, token_dims=[(1, 0, lambda rows: 2 * rows)])
    assert twice((torch.zeros(3, 4), torch.zeros(6, 4)))[0] == 3
    assert twice((torch.zeros(3, 4), torch.zeros(3, 4)))[0] == -1


def test_I10_inputs_that_must_not_share_memory():
    match = match_for(X, X, written=WrittenMemory(groups=((0,),), others=(1,)))
    base = torch.zeros(9, 4)
    assert match((torch.zeros(5, 4), torch.zeros(5, 4))) is not None
    assert match((base[:5], base[:5])) is None and match((base[:4], base[5:])) is None
    assert match((torch.zeros(0, 4), torch.zeros(0, 4))) is not None
    two = match_for(X, X, X, written=WrittenMemory(groups=((0, 2), (1,))))
    assert two((base[:5], torch.zeros(5, 4), base[4:])) is not None
    assert two((torch.zeros(5, 4), torch.zeros(5, 4), base[4:])) is None
    assert two((base[:5], base[:5], base[4:])) is None
    now = match_for(X, X, apart_from_now=[([1], lambda: frozenset({base.untyped_storage().data_ptr()}))])
    assert now((base[:5], torch.zeros(5, 4))) is not None and now((X, base[:5])) is None
    apart = match_for(X, apart_from=frozenset({base.untyped_storage().data_ptr(), 7}))
    assert apart((torch.zeros(5, 4),)) is not None and apart((base[:5],)) is None


def test_what_a_graph_can_read():
    assert is_plain_leaf(X) and is_plain_leaf(torch.nn.Parameter(X)) and is_plain_leaf("text")
    assert not is_plain_leaf(X.to_sparse())
    assert not is_plain_leaf(X.as_subclass(type("Sub", (torch.Tensor,), {})))


def test_a_description_tells_kinds_of_calls_apart_and_stays_short():
    text = describe_call((X, [1, 2, 3, 4, 5]), {"mask": None, "config": object(), "d": {"k": X}})
    again = "float32[5, 4] (tensor 1 again)"
    assert text == f"(float32[5, 4], [1, 2, 3, 4, ...], mask=None, config=object, d={{k: {again}}})"
