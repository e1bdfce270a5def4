"""Layers that are alike share a line, those that differ stay apart, and a plan fits on a screen."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from small_transformers import VOCAB, attached
from torch import nn

import boundary_ops
import piecewise
from piecewise.errors.analysis import NoBoundaryOp
from piecewise.ir.plan import FusionReport

_SCREEN = 24

mix = boundary_ops.define(
    "folding_test::mix(Tensor x, Tensor(a!) out, int layer=0, float scale=1.0) -> ()",
    lambda x, out, layer=0, scale=1.0: out.copy_(x.cumsum(0) * scale),
    token_args={"x": 0, "out": 0},
)
SIZE = 8


class Layer(nn.Module):
    """Linear, boundary op, linear; `after` is what it does to its result."""

    def __init__(self, *constants, after=lambda x: x, widths=()):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.more = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in widths)
        self.constants, self.after = constants, after

    def forward(self, x):
        x = self.first(x)
        out = torch.empty_like(x)
        mix(x, out, *self.constants)
        for each in self.more:
            out = out + each(x)
        return self.after(x + self.second(out))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plan_of(model):
    with torch.no_grad():
        return piecewise.explain(model.eval(), torch.randn(5, SIZE))


def rows_of(plan, **options):
    """The columns of each line of the table."""
    heading, *lines = plan.to_text(**options).splitlines()
    starts = [match.start() for match in re.finditer(r"(?:^|(?<=  ))\S", heading)]
    found = []
    for line in lines:
        if line.startswith(f"{plan.count('graph')} graph"):
            break
        ends = [*starts[1:], None]
        found.append(tuple(line[start:end].strip() for start, end in zip(starts, ends, strict=True)))
    return found


def test_thirty_equal_layers_are_four_lines():
    plan = plan_of(Model(Layer() for _ in range(30)))
    assert rows_of(plan) == [
        ("", "1", "graph", "3", "embed .. layers.0"),
        ("0 to 29", "30", "boundary", "1", "layers.N: folding_test::mix"),
        ("0 to 28", "29", "graph", "4", "layers.N.second .. layers.N+1"),
        ("29", "1", "graph", "3", "layers.29.second .. head"),
    ]
    assert str(plan) == plan.to_text() and len(str(plan).splitlines()) <= _SCREEN
    assert "61 segments in 4 lines; --full or to_text(full=True) lists each" in str(plan)


def test_each_segment_is_in_the_full_text_and_in_json_and_markdown():
    plan = plan_of(Model(Layer() for _ in range(30)))
    full = rows_of(plan, full=True)
    assert [row[0] for row in full] == [str(index) for index in range(61)]
    assert "layers.17: folding_test::mix" in full[35][-1] and "lists each" not in plan.to_text(full=True)
    assert len(plan.asdict()["segments"]) == 61
    assert plan.to_markdown().count("| boundary |") == 30


def test_lines_count_every_segment_and_op_once():
    layers = [Layer(after=(lambda x: x - x.mean(0)) if index == 7 else lambda x: x) for index in range(12)]
    plan = plan_of(Model(layers))
    rows = rows_of(plan)
    assert sum(int(row[1]) for row in rows) == len(plan.segments)
    assert sum(int(row[1]) * int(row[3]) for row in rows) == sum(each.num_ops for each in plan.segments)
    # The one layer with an op outside of graphs, and its reason.
    (eager,) = [row for row in rows if row[2] == "eager"]
    assert eager[:2] == ("7", "1") and "layers.7: mean: its result is made of all token rows" in eager[-1]
    assert re.search(r"at test_folding.py:\d+$", eager[-1])
    assert ("0 to 6, 8 to 10", "10") in [row[:2] for row in rows]


def test_layers_with_other_constants_stay_apart_and_say_which():
    plan = plan_of(Model(Layer(0, 2.0) if index % 6 == 5 else Layer(0, 0.5) for index in range(30)))
    boundaries = [row for row in rows_of(plan) if row[2] == "boundary"]
    assert [row[:2] for row in boundaries] == [
        ("0 to 4, 6 to 10, 12 to 16, 18 to 22, 24 to 28", "25"),
        ("5, 11, 17, 23, 29", "5"),
    ]
    assert "scale=0.5" in boundaries[0][-1] and "scale=2" in boundaries[1][-1]
    assert all("layers.N" in row[-1] for row in boundaries)


def test_a_constant_that_counts_the_layers_does_not_keep_them_apart():
    (boundary,) = [
        row for row in rows_of(plan_of(Model(Layer(i) for i in range(30)))) if row[2] == "boundary"
    ]
    assert boundary[:2] == ("0 to 29", "30") and "other constants in each" in boundary[-1]


def test_many_ranges_of_layers_are_shortened():
    plan = plan_of(Model(Layer(0, 2.0) if index % 2 else Layer(0, 0.5) for index in range(20)))
    assert {"0, 2, 4, …, 18", "1, 3, 5, …, 19"} <= {row[0] for row in rows_of(plan)}


def test_first_layers_of_another_form_stay_apart():
    plan = plan_of(Model(Layer(widths=(0, 1) if index < 3 else ()) for index in range(20)))
    graphs = [row for row in rows_of(plan) if row[2] == "graph"]
    assert [row[0] for row in graphs] == ["", "0 to 2", "3 to 18", "19"]


class Stages(nn.Module):
    def __init__(self, depths):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Layer() for _ in range(depth)) for depth in depths)

    def forward(self, x):
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return x


def test_layers_inside_of_stages_are_folded_where_they_fill_the_screen():
    few, many = plan_of(Stages((1, 2))), plan_of(Stages((2, 2, 18, 2)))
    assert "stages.N.0: folding_test::mix" in str(few) and "*" not in str(few)
    assert ("0 to 3", "24", "boundary", "1", "stages.N.*: folding_test::mix") in rows_of(many)
    assert len(str(many).splitlines()) <= _SCREEN


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        for _ in range(9):
            x = self.layer(x)
        return x


def test_one_layer_that_runs_again_and_again_is_one_line():
    rows = rows_of(plan_of(Repeated()))
    assert ("", "9", "boundary", "1", "layer: folding_test::mix") in rows and len(rows) == 4


class Flat(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        mix(x, out)
        return out * 2


def test_a_model_without_parts_has_the_op_alone_in_its_line():
    plan = plan_of(Flat())
    assert rows_of(plan)[1] == ("", "1", "boundary", "1", "folding_test::mix")
    assert rows_of(plan, full=True)[1] == ("1", "boundary", "1", "folding_test::mix")


def explained(name, **changes):
    model, _ = attached(name, **changes)
    with torch.no_grad():
        ids = torch.randint(3, VOCAB, (1, 7))
        return piecewise.explain(model, input_ids=ids, position_ids=torch.arange(7)[None])


def test_gemmas_global_layers_stay_apart_from_those_with_a_window():
    rows = rows_of(explained("Gemma3"))
    boundaries = {row[0]: row[-1] for row in rows if row[2] == "boundary"}
    assert set(boundaries) == {"0, 2", "1"}
    assert "window=4" in boundaries["0, 2"] and "window" not in boundaries["1"]


def test_a_mixture_of_experts_names_what_stays_outside_of_graphs_once():
    plan = explained("Mixtral")
    rows = rows_of(plan)
    outside = [row for row in rows if row[2] == "eager"]
    assert all(row[0] == "0 to 2" for row in outside) and len(outside) < plan.count("eager") / 2
    assert all(re.search(r": .+ at \w+\.py:\d+$", row[-1]) for row in outside)
    assert len(str(plan).splitlines()) <= _SCREEN and "eager: ops that run" in str(plan)


def test_a_kind_of_segment_is_explained_where_there_is_one():
    text = str(plan_of(Model([Layer()])))
    assert "boundary: an op that runs between graphs" in text and "eager: ops" not in text


def test_the_report_folds_too_and_says_all_on_request():
    graphed = piecewise.compile(Model(Layer() for _ in range(30)).eval(), buckets=[8], progress=False)
    with torch.no_grad():
        graphed.capture(torch.randn(5, SIZE))
        graphed(torch.randn(6, SIZE))
    report = graphed.report()
    assert str(report) == report.to_text() and len(str(report).splitlines()) <= _SCREEN
    assert "without a GPU; captured" in str(report)
    assert "0 to 29" in str(report) and "layers.17: folding_test::mix" not in str(report)
    assert "layers.17: folding_test::mix" in report.to_text(full=True)


def test_what_each_layer_adds_to_the_notes_is_cut_too():
    plan = plan_of(Model(Layer() for _ in range(30)))
    notes = tuple(f"segment {index} keeps its own ops: no" for index in range(30))
    noted = dataclasses.replace(plan, fusions=FusionReport((("silu", 0),), notes))
    assert "and 25 more lines" in str(noted) and len(str(noted).splitlines()) <= _SCREEN
    assert all(note in noted.to_text(full=True) for note in notes)


class SelfAttention(nn.Module):
    """What a model of one's own does before it knows of boundary ops."""

    def forward(self, x):
        q = k = v = x.view(1, -1, 2, SIZE // 2).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(x.shape)


def test_a_model_without_a_boundary_op_is_refused_with_what_to_do():
    with pytest.raises(NoBoundaryOp, match="boundary_ops.define") as caught:
        plan_of(Model(SelfAttention() for _ in range(3)))
    assert "Rule:" in str(caught.value) and "Fix:" in str(caught.value)
