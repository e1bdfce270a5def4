"""The rewrites of a traced graph: what nested graphs, regions and in-place ops become."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from piecewise.analysis.normalize import normalize
from piecewise.errors.analysis import NestedTuple, ReshapesInPlace


def nested(takes_item):
    """A graph that calls a graph which returns two tensors, and takes the second, or returns both."""
    inner = fx.Graph()
    x = inner.placeholder("x")
    inner.output((inner.call_function(torch.relu, (x,)), inner.call_function(torch.neg, (x,))))
    outer = fx.Graph()
    given = outer.placeholder("given")
    called = outer.call_module("inner", (given,))
    if takes_item:
        called = outer.call_function(
            torch.ops.aten.alias.default, (outer.call_function(operator.getitem, (called, 1)),)
        )
    outer.output((called,))
    return fx.GraphModule(nn.ModuleDict({"inner": fx.GraphModule(nn.Module(), inner)}), outer)


def test_a_nested_graph_is_put_in_place_of_its_call():
    module = nested(takes_item=True)
    assert normalize(module) == {}
    assert not module.graph.find_nodes(op="call_module")
    x = torch.randn(3)
    assert torch.equal(module(x)[0], -x)


def test_a_nested_graph_whose_tuple_goes_on_is_refused():
    with pytest.raises(NestedTuple, match="inner"):
        normalize(nested(takes_item=False))


def test_an_op_that_reshapes_in_place_is_refused_with_its_twin():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_method("t_", (x,))
    graph.output((x,))
    with pytest.raises(ReshapesInPlace, match="'t_'") as error:
        normalize(fx.GraphModule(nn.Module(), graph))
    assert "'t'" in str(error.value)
