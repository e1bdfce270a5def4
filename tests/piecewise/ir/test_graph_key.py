"""Keys of nodes, segments and code: equal for equal programs, and never for others."""

from __future__ import annotations

import operator

import pytest
import torch
from inspection import inspect
from torch import fx
from toy_models import Toy, make_ids

import piecewise
from piecewise.ir.graph_key import argument_key, code_key, graph_key, node_key


def plan_of(model, **settings):
    graphed = piecewise.compile(model.eval(), buckets=(8,), progress=False, **settings)
    graphed.capture(make_ids(5), torch.arange(5))
    return inspect(graphed).plan


def test_keys_of_segments_have_no_addresses_and_layers_share_one():
    plan = plan_of(Toy(num_blocks=4))
    keys = [graph_key(plan, segment) for segment in plan.graph_segments()]
    assert len(set(keys[1:-1])) == 1 and len({keys[0], keys[1], keys[-1]}) == 3
    for key, segment in zip(keys, plan.graph_segments(), strict=True):
        assert "0x" not in repr(key) and "[n, 16]" in repr(key) and segment.lowering_key in key
    again = plan_of(Toy(num_blocks=4))
    assert [graph_key(again, segment) for segment in again.graph_segments()] == keys


def test_a_key_of_inputs_says_where_they_come_from_and_nothing_of_results():
    plan = plan_of(Toy(num_blocks=2))
    for segment in plan.graph_segments():
        _, inputs, origins, free = graph_key(plan, segment, what="inputs")
        assert len(inputs) == len(origins) == len(segment.inputs) and free == ()


def node(target, *arguments):
    """A call of `target` on constants and on fakes, which are given as tensors on the meta device."""
    graph = fx.Graph()
    made = {}

    def argument(value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = graph.placeholder("x")
            made[id(value)].meta["example_value"] = value
        return made[id(value)]

    return graph.call_function(target, fx.node.map_aggregate(arguments, argument))


X, Y, HALF = torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta"), torch.float16


@pytest.mark.parametrize(
    ("left", "right", "is_same"),
    [
        (node(torch.add, X, Y), node(torch.add, Y, X), True),
        (node(torch.add, X, X), node(torch.add, X, Y), False),
        (node(torch.add, X, X.view(2, 3)), node(torch.add, X, Y), False),
        (node(torch.add, X, Y), node(torch.add, X, Y.to(HALF)), False),
        (node(torch.add, X, Y), node(torch.add, X, Y.T.contiguous().T), False),
        (node(torch.add, X, Y), node(torch.sub, X, Y), False),
        (node(torch.add, X, 1), node(torch.add, X, 1.0), False),
        (node(torch.add, X, 1), node(torch.add, X, True), False),
        (node(torch.add, X, 0.0), node(torch.add, X, -0.0), False),
        (node(operator.getitem, X, [0, 1]), node(operator.getitem, X, (0, 1)), False),
        (node(operator.getitem, X, slice(0, 1)), node(operator.getitem, X, slice(0, 2)), False),
        (node(operator.getitem, X, slice(0, 1)), node(operator.getitem, X, slice(0, 1)), True),
    ],
)
def test_nodes_have_one_key_where_they_do_the_same(left, right, is_same):
    assert (node_key(left) == node_key(right)) is is_same


def test_arguments_are_written_as_the_caller_says():
    call = node(torch.add, X, 2)
    key = argument_key(
        (call.args, {"b": [1.5, None], "a": torch.float32}), node=lambda each: each.name, number=str
    )
    text = repr(torch.float32)
    assert key == ("tuple", ("tuple", "x", "2"), (("a", text), ("b", ("list", "1.5", "None"))))


def test_code_of_others_functions_has_a_key_of_its_own_each_time():
    own, others = {"add": torch.add}, {"add": plan_of}
    assert code_key("graph", "source", own, {}, ()) == code_key("graph", "source", own, {}, ())
    assert code_key("graph", "source", others, {}, ()) != code_key("graph", "source", others, {}, ())
    # Two objects of one name in a cut are not known to do the same.
    known = code_key("graph", "source", own, {}, ())
    assert code_key("graph", "source", own, {}, [known]) != known
