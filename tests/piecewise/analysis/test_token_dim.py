"""[I10] The token count is a symbol that boundary ops carry, and an input's dim of exactly that size."""

from __future__ import annotations

import pytest
import torch
from paged_models import new_paged
from torch import nn
from toy_models import HIDDEN, mix

import piecewise
from piecewise.errors.analysis import NoAnchorInput, NoBoundaryOp, SeveralDims, WritesTwice


class Halves(nn.Module):
    """Its rows are as many as `y` has, of which the graph reads nothing else; `x` has twice as many."""

    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(HIDDEN, HIDDEN), torch.zeros(64, 2 * HIDDEN)

    def forward(self, x, y):
        rows = self.linear(x).view(y.shape[0], 2 * HIDDEN)
        out = torch.empty_like(rows)
        mix(rows, rows, rows, out, self.cache)
        return out


def test_I10_a_count_that_no_input_has_as_a_dim_is_refused():
    graphed = piecewise.compile(Halves().eval(), buckets=(8,), progress=False)
    with pytest.raises(NoAnchorInput, match="exactly the token count") as error:
        graphed.capture(torch.randn(10, HIDDEN), torch.randn(5, 3))
    assert "a dim of num_tokens" in str(error.value)


def test_I10_a_model_without_a_boundary_op_is_refused():
    graphed = piecewise.compile(nn.Linear(HIDDEN, HIDDEN).eval(), buckets=(8,), progress=False)
    with pytest.raises(NoBoundaryOp, match=r"boundary_ops\.define"):
        graphed.capture(torch.randn(5, HIDDEN))


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = torch.zeros(64, HIDDEN)

    def forward(self, x):
        rows = x.flatten(0, 1)
        out = torch.empty_like(rows)
        mix(rows, rows, rows, out, self.cache)
        return out


def test_I10_rows_of_two_counts_are_refused_and_both_are_named():
    graphed = piecewise.compile(Squares().eval(), buckets=(8,), progress=False)
    with pytest.raises(SeveralDims, match=r"packed to \[1, n\]") as error:
        graphed.capture(torch.randn(2, 3, HIDDEN))
    assert "s" in error.value.what and "x [" in str(error.value)


def test_two_attentions_of_a_call_on_the_same_pages_are_refused():
    model = new_paged(3)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    ids = torch.arange(5)
    with torch.no_grad():
        assert graphed.capture(ids, ids).ok
        model.layers = nn.ModuleList([*model.layers, model.layers[1]])
        again = piecewise.compile(model, buckets=(8,), progress=False)
        with pytest.raises(WritesTwice, match="'piecewise::attn_inplace' at 'layers.3'.*pages of its own"):
            again.capture(ids, ids)


def test_an_attached_model_that_loops_over_a_layer_is_refused():
    pytest.importorskip("transformers")
    from small_transformers import attached

    model, _ = attached("Llama")
    model.model.layers[2] = model.model.layers[1]
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    with (
        torch.no_grad(),
        pytest.raises(WritesTwice, match=r"model.layers.\d.self_attn.*\n.*\n.*do not attach"),
    ):
        graphed.capture(input_ids=torch.arange(5)[None], position_ids=torch.arange(5)[None])
