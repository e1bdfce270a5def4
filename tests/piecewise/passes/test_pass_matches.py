"""A pattern matches what it says and nothing that looks like it; a pass that fails costs its rewrite."""

from __future__ import annotations

import pytest
import torch
from aten_segments import ROWS, Rewritten
from toy_models import HIDDEN, Toy, check_sizes

from piecewise.passes import fuse as fusions

WIDTH = 8
CLOSE = dict(rtol=1e-5, atol=1e-5)


def _norm(x, weight, *, dims=(-1,), eps=1e-6, **options):
    mean = x.pow(2).mean(dims, keepdim=True)
    return x * torch.rsqrt(torch.add(mean, eps, **options)) * weight


def _rotated(x, cos, sin, **options):
    left, right = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return torch.add(x * cos, torch.cat([-right, left], -1) * sin, **options)


def _halves_scaled(x, y, weight):
    total = torch.add(x, y, alpha=0.5)
    return total, _norm(total, weight)


def _mean_scaled(x, y, weight):
    return (_norm(x, weight, alpha=3) + y,)


def _weight_scaled(x, y, weight):
    return (_norm(x, torch.add(weight, 1.0, alpha=2)) + y,)


def _difference(x, y, weight):
    return (_rotated(x, y, x, alpha=-1) + weight,)


def _mean_of_another_type(x, y, weight):
    mean = x.pow(2).mean(-1, keepdim=True, dtype=torch.float64)
    return ((x * torch.rsqrt(mean + 1e-6) * weight).float() + y,)


@pytest.mark.parametrize(
    "function, missing",
    [
        (_halves_scaled, "add_rms_norm"),
        (_mean_scaled, "rms_norm"),
        (_weight_scaled, "rms_norm"),
        (_difference, "rotary"),
        (_mean_of_another_type, "rms_norm"),
    ],
)
def test_a_keyword_that_no_pattern_names_keeps_the_op(function, missing):
    tensors = [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(WIDTH)]
    rewritten = Rewritten(function, tensors, "rms_norm", "add_rms_norm", "rotary")
    own, found = rewritten.outputs(tensors)
    for left, right in zip(own, found, strict=True):
        torch.testing.assert_close(right, left, **CLOSE)
    if function is not _weight_scaled:  # whose sum is made outside of the norm
        assert not rewritten.matches[missing]


def test_a_norm_over_another_dim_that_is_as_long_stays():
    # Over dim 2, of size 2, with a weight of that size: the last dim is no other size.
    def function(x, weight):
        return (_norm(x, weight, dims=(2,)),)

    tensors = [torch.randn(ROWS, 4, 2, 2), torch.randn(2)]
    rewritten = Rewritten(function, tensors, "rms_norm")
    own, found = rewritten.outputs(tensors)
    torch.testing.assert_close(found[0], own[0], **CLOSE)
    assert not rewritten.matches["rms_norm"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_value_rounded_to_float8_and_back_stays_rounded(dtype):
    graphed = check_sizes(Toy(lambda model, x: x.to(dtype).float() + x).eval(), fusions=("auto",))
    assert not [note for note in graphed.report().captures[0].fusions.notes if "failed" in note]


def test_a_pass_that_fails_costs_the_rewrite_alone(monkeypatch):
    def failing(*_):
        raise RuntimeError("a fault of a pass")

    monkeypatch.setattr(fusions, "run_passes", failing)
    graphed = check_sizes(Toy(lambda model, x: x + torch.ones(HIDDEN)).eval(), fusions=("auto",))
    notes = graphed.report().captures[0].fusions.notes
    assert notes and all("keeps its own ops: a pass failed" in note for note in notes)
