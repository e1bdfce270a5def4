"""Norms whose results become float8: formulations, and what must stay as it is."""

from __future__ import annotations

import pytest
import torch
from aten_segments import Rewritten
from norms import DTYPES, NORMS, WIDTH, llama, rows

FLOAT8, LARGEST = torch.float8_e4m3fn, 448.0


def by_scale(normed, scale):
    return (normed.float() / scale).clamp(-LARGEST, LARGEST).to(FLOAT8)


def per_row(normed, least):
    wide = normed.float()
    peak = wide.abs().amax(-1, keepdim=True)
    if least == "peak":
        scale = peak.clamp(min=1e-10) / LARGEST
    elif least == "step":
        scale = (peak / LARGEST).clamp(min=1e-12)
    elif least == "rounded":  # torchao: the scale is made in the norm's own dtype
        scale = (normed.abs().amax(-1, keepdim=True) / LARGEST).float()
    else:
        scale = peak / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


def assert_same_bits(rewritten, tensors):
    own, found = rewritten.outputs(tensors)
    for ours, theirs in zip(found, own, strict=True):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape and ours.stride() == theirs.stride()
        assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_a_given_scale(norm, dtype):
    tensors = [rows(WIDTH, dtype=dtype), torch.randn(WIDTH).to(dtype), torch.tensor([0.02])]
    rewritten = Rewritten(lambda x, w, scale: by_scale(norm(x, w), scale), tensors, "add_rms_norm_quant")
    assert rewritten.targets == ["piecewise::rms_norm_quant", "getitem"]
    assert rewritten.matches["add_rms_norm_quant"] == 1
    assert_same_bits(rewritten, tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("least", ["peak", "step", "none", "rounded"])
@pytest.mark.parametrize("with_sum", [True, False])
def test_a_scale_per_row_and_the_sum_are_results(least, dtype, with_sum):
    def function(x, delta, weight):
        total = x + delta if with_sum else x
        quantised, scale = per_row(llama(total, weight), least)
        return quantised, scale, total + 1

    tensors = [rows(WIDTH, dtype=dtype), rows(WIDTH, dtype=dtype), torch.randn(WIDTH).to(dtype)]
    rewritten = Rewritten(function, tensors, "add_rms_norm_quant")
    name = "piecewise::add_rms_norm_quant" if with_sum else "piecewise::rms_norm_quant"
    assert [each for each in rewritten.targets if each.startswith("piecewise")] == [name]
    assert "aten::_to_copy" not in rewritten.targets and rewritten.matches["add_rms_norm_quant"] == 1
    assert_same_bits(rewritten, tensors)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, scale: (by_scale(normed := llama(x, w), scale), normed),
        lambda x, w, scale: (llama(x, w).float() / scale).clamp(-240, 240).to(FLOAT8),
        lambda x, w, scale: (llama(x, w).float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e5m2),
        lambda x, w, scale: by_scale(llama(x, w), scale.expand(WIDTH) * w.float()),
        lambda x, w, scale: by_scale(llama(x, w), (llama(x, w) * 2).float().amax().view(1)),
    ],
    ids=["read again", "another range", "another format", "a scale per column", "a scale made of it"],
)
def test_what_is_no_such_rounding_stays(function):
    tensors = [rows(WIDTH, dtype=torch.bfloat16), torch.randn(WIDTH).bfloat16(), torch.tensor([0.02])]
    rewritten = Rewritten(function, tensors, "add_rms_norm_quant")
    assert rewritten.matches["add_rms_norm_quant"] == 0
    assert_same_bits(rewritten, tensors)
