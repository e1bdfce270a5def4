"""Inductor is given the graph that fusions made of a segment, unless that would be another one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from aten_segments import ROWS, segment_of
from inspection import inspect
from lowered_models import captured, check
from toy_models import Toy, make_ids

import piecewise
from piecewise.ir.aten import trace_aten
from piecewise.lowering import lowering
from piecewise.lowering.layout import SegmentLayout
from piecewise.lowering.lowering import AtenSegment


def graph_of(function, tensors):
    segment, values = segment_of(function, tensors)
    made = tuple(range(len(function(*(tensor.clone() for tensor in tensors)))))
    layout = SegmentLayout(values, (), made, ())
    return trace_aten(segment, values, num_rows=ROWS), layout


def test_a_functional_graph_is_taken_with_all_inputs_and_the_results_that_are_made():
    def function(x, unread, y):
        total = x * x.shape[0] + y
        return x[:, 1:], total.sum(-1), total.split(2, -1)[0]

    tensors = [torch.randn(ROWS, 4), torch.randn(3), torch.randn(ROWS, 4)]
    graph, layout = graph_of(function, tensors)
    made = AtenSegment.of_graph(graph, dataclasses.replace(layout, made=(2, 1)))
    assert made is not None and len(made.arguments) == 4 and made.rows is made.arguments[0]
    assert not [node for node in made.module.graph.nodes if "slice" in node.name]  # a view of an input
    first, second = made.module(ROWS, *tensors)
    _, summed, part = function(*tensors)
    assert torch.equal(first, part) and torch.equal(second, summed)


def _counts(x, y):
    y.add_(1)
    return (x + y,)


def _fills(x, y):
    made = torch.empty_like(x)
    made.copy_(x)
    return (made + y,)


@pytest.mark.parametrize("function", [_counts, _fills])
def test_a_graph_that_writes_is_traced_again(function):
    graph, layout = graph_of(function, [torch.randn(ROWS, 4), torch.randn(ROWS, 4)])
    assert AtenSegment.of_graph(graph, layout) is None


@pytest.fixture
def traces(monkeypatch):
    """(rows, whether for any count) of each trace for Inductor."""
    found, trace = [], AtenSegment.of

    def noted(segment, layout, *, rows, is_dynamic):
        found.append((rows, is_dynamic))
        return trace(segment, layout, rows=rows, is_dynamic=is_dynamic)

    monkeypatch.setattr(lowering.AtenSegment, "of", noted)
    return found


def test_fused_segments_are_traced_once(traces):
    check(Toy(num_blocks=2).eval(), fusions=("auto",))
    assert not traces
    check(Toy(num_blocks=2).eval())
    assert traces == [(16, True)] * 3


def test_single_sizes_have_traces_of_their_own(traces):
    check(Toy(num_blocks=1).eval(), fusions=("auto",), compile_sizes=(16,), strides=False)
    assert traces == [(16, False)] * 2


def test_a_graph_made_for_another_count_is_not_taken(traces):
    graphed, _ = captured(Toy(num_blocks=1).eval(), fusions=("auto",))
    signature = inspect(graphed).signature
    made = lowering.Lowering(graphed.piecewise_config)
    made.lower(signature.plan, (4, 8), signature.traced.graphs)
    assert traces == [(8, True)] * 2


def test_what_is_compiled_does_not_depend_on_the_example():
    keys = []
    for tokens in (5, 9):
        graphed = piecewise.compile(
            Toy(num_blocks=1).eval(), buckets=(4, 16), lowering="inductor", fusions=("auto",), progress=False
        )
        graphed.capture(make_ids(tokens), torch.arange(tokens))
        keys.append(set(inspect(graphed).lowering._compiled))
        graphs = inspect(graphed).traced.graphs.values()
        assert [graph.num_rows for graph in graphs] == [16] * 2
    assert keys[0] == keys[1]


class Tallied(Toy):
    """Counts its calls in a buffer, in the first segment."""

    def __init__(self):
        super().__init__(num_blocks=1)
        self.register_buffer("tally", torch.zeros(1))

    def forward(self, ids, positions=None):
        self.tally.add_(1)
        return super().forward(ids, positions) + self.tally


def test_a_fused_segment_that_writes_state_writes_it_once_per_call(traces):
    graphed, _ = check(Tallied().eval(), fusions=("auto",))
    assert len(traces) == 1
    with torch.no_grad():
        before = graphed.model.tally.clone()
        graphed(make_ids(3), torch.arange(3))
    assert torch.equal(graphed.model.tally, before + 1)
