"""[I3] The table of `families.py` holds: coverage, reasons, every bucket captured, and eager's results."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from toy_models import compare

import boundary_ops
import piecewise
from boundary_ops import PagedKVCache, PrefillBatch

pytest.importorskip("transformers")

from families import FAMILIES  # noqa: E402

TRACED = [family for family in FAMILIES if not family.error]
UNTRACED = [family for family in FAMILIES if family.error]
# A model in float32 whose weights have a deviation of 0.2: values of up to some tens, after hundreds of ops.
TOLERANCE = 2e-4


def _eager_ops(plan):
    return {reason.op: reason.code for segment in plan.segments for reason in segment.reasons}


@pytest.mark.parametrize("family", TRACED, ids=lambda family: family.name)
def test_I3_a_family_is_in_graphs_as_far_as_the_table_says(family):
    model = family.build()
    cache = PagedKVCache.for_model(model, num_tokens=128, block_size=4) if family.is_attached else None
    if cache is not None:
        boundary_ops.huggingface.attach(model, cache)
    # The ratio leaves calls of one token out, so that the model is traced once and not twice.
    graphed = piecewise.compile(model, buckets=family.buckets, max_padding_ratio=4.0, progress=False)
    with torch.no_grad():
        report = graphed.capture(**family.call(family.example))
    assert report.captured == family.buckets, report
    plan = graphed.report().plans[0]
    assert _eager_ops(plan) == family.eager, plan
    # The op more that old releases have in each layer is less than a hundredth of all.
    least = family.least - ("clamp_" in family.eager)
    assert round(100 * plan.coverage, 1) >= least, plan
    assert family.below or family.least >= family.sampled
    names = map(str, itertools.count())
    for count in family.counts:
        replays = graphed.stats.replays
        step = (
            contextlib.nullcontext() if cache is None else PrefillBatch.build(cache, [next(names)], [count])
        )
        with torch.no_grad(), step:
            compare(
                graphed, model, (), keywords=family.call(count, seed=5), exact=False, where=f"{count} tokens",
                tolerance=TOLERANCE,
            )  # fmt: skip
        assert graphed.stats.replays == replays + 1, (count, graphed.stats)


@pytest.mark.parametrize("family", UNTRACED, ids=lambda family: family.name)
def test_I10_a_family_that_cannot_be_traced_is_an_error_that_says_why(family):
    graphed = piecewise.compile(family.build(), buckets=family.buckets, progress=False)
    with torch.no_grad(), pytest.raises(piecewise.TraceError) as error:
        graphed.capture(**family.call(family.example))
    assert str(error.value).startswith(family.error)


def test_the_table_has_each_configuration_once():
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) == 39
