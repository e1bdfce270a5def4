"""A call of a kind that was not captured is told from the captured one by the argument that differs."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import small_transformers as small
import torch
from torch import nn

import boundary_ops
import piecewise
from boundary_ops import PrefillBatch
from runners.stats import FallbackWarning


def _sums(x, out):
    out.copy_(x.cumsum(0))


sums = boundary_ops.define(
    "new_kinds::sums(Tensor x, Tensor(a!) out) -> ()", _sums, token_args={"x": 0, "out": 0}
)


@dataclasses.dataclass
class Step:
    scale: float
    shift: torch.Tensor


class Model(nn.Module):
    def forward(self, x, weight=None, *, scale=1.0, table=None, parts=(), step=None, **options):
        x = x * scale
        for each in (weight, *(table or {}).values(), *parts):
            x = x if each is None else x + each
        if step is not None:
            x = x * step.scale + step.shift
        out = torch.empty_like(x)
        sums(x, out)
        return out * 2


X, ROW = torch.ones(5, 4), torch.ones(4)
# What differs from the call below → the words for it.
CAPTURED = dict(weight=ROW, table={"a": ROW[:]}, parts=[ROW[:], None], step=Step(2.0, ROW[:]))
CASES = {
    "x is float64[n, 4], was float32[n, 4] at capture (pass x.to(torch.float32))": {"x": X.double()},
    "x is float32[n, 1], was float32[n, 4] at capture": {"x": torch.ones(5, 1)},
    "weight is float32[1, n], was float32[4] at capture": {"weight": ROW[None]},
    "x is float32[n, 4], not contiguous, was float32[n, 4] at capture": {"x": torch.ones(4, 5).t()},
    "weight is left out, was float32[4] at capture": {"weight": None},
    "weight is 3.0, was float32[4] at capture": {"weight": 3.0},
    "scale is 2.0, was 1.0 at capture": {"scale": 2.0},
    "table['b'] is float32[n], was left out at capture (leave it out)": {"table": {"a": ROW, "b": ROW[:]}},
    "table['a'] is left out, was float32[4] at capture": {"table": {}},
    "parts[0] is float64[4], was float32[4] at capture": {"parts": [ROW.double(), None]},
    "parts[1] is float32[n], was left out at capture (leave it out)": {"parts": [ROW[:], ROW.clone()]},
    "step.scale is 3.0, was 2.0 at capture": {"step": Step(3.0, ROW)},
    "debug is True, was left out at capture (leave it out)": {"debug": True},
}


def told(graphed, *args, **kwargs):
    with torch.no_grad(), pytest.warns(FallbackWarning) as found:
        graphed(*args, **kwargs)
    assert graphed.stats.replays == 0
    (text,) = [str(each.message) for each in found]
    assert "(unseen_signature)" in text and "call capture() with an example of this kind" in text
    return text


def captured(model, **kwargs):
    graphed = piecewise.compile(model, buckets=[8], progress=False)
    graphed.capture(**kwargs)
    return graphed


@pytest.mark.parametrize("words", CASES)
def test_the_argument_that_differs_is_named(words):
    graphed = captured(Model(), x=X, **CAPTURED)
    assert words in told(graphed, **{"x": X, **CAPTURED, **CASES[words]})
    assert words in str(graphed.report())


def test_the_nearest_kind_is_the_one_that_is_named():
    graphed = captured(Model(), x=X, **CAPTURED)
    graphed.capture(X.double())
    text = told(graphed, X.double(), scale=2.0)
    assert "scale is 2.0, was 1.0 at capture." in text and "weight" not in text


def test_a_model_whose_hooks_see_the_form_names_arguments_too():
    model = Model()
    model.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    graphed = captured(model, x=X, weight=ROW)
    assert "weight is float64[4], was float32[4]" in told(graphed, x=X, weight=ROW.double())


def test_an_int_that_may_change_is_no_difference():
    class Counting(Model):
        def forward(self, x, count=0, debug=False):
            return super().forward(x + count)

    graphed = captured(Counting(), x=X, count=3)
    text = told(graphed, X, count=4, debug=True)
    assert "debug is True, was False at capture" in text and "count" not in text


def test_tensors_that_are_one_or_two_are_named():
    graphed = captured(Model(), x=X, table={"a": ROW, "b": ROW}, weight=ROW.clone())
    parts = {"a": ROW, "b": ROW.clone()}
    assert "table['b'] is float32[4], was float32[4], as table['a'] at capture" in told(
        graphed, X, ROW.clone(), table=parts
    )
    graphed = captured(Model(), x=X, table={"a": ROW, "b": ROW.clone()})
    assert "table['b'] is float32[4], as table['a'], was float32[4] at capture" in told(
        graphed, X, table=dict.fromkeys("ab", ROW)
    )


MISTAKES = {
    "attention_mask is int64[1, n], was left out at capture (leave it out)": {
        "attention_mask": torch.ones(1, 5, dtype=torch.int64)
    },
    "use_cache is True, was left out at capture (leave it out)": {"use_cache": True},
    "input_ids is int32[1, n], was int64[1, n] at capture (pass input_ids.to(torch.int64))": {
        "input_ids": torch.arange(5, dtype=torch.int32)[None]
    },
}


def test_the_usual_mistakes_with_a_transformers_model_are_named():
    model, cache = small.attached()
    ids = torch.arange(5)[None]
    graphed = captured(model, input_ids=ids, position_ids=ids.clone())
    for words, other in MISTAKES.items():
        with PrefillBatch.build(cache, [words], [5]) as batch:
            assert words in told(graphed, **{"input_ids": ids, "position_ids": batch.positions, **other})
    with warnings.catch_warnings(), PrefillBatch.build(cache, ["right"], [5]) as batch, torch.no_grad():
        warnings.simplefilter("error")
        graphed(input_ids=ids, position_ids=batch.positions)
    assert graphed.stats.replays == 1
