"""The fused kernels and packed linears on a GPU, as compiled programs and inside of real graphs."""

from __future__ import annotations

import pytest
import torch
from plain_decoder import Plain, matches, packs
from toy_models import make_ids

import piecewise
from piecewise.passes.fusions import add_rms_norm, add_rms_norm_quant, rms_norm, rotary, silu_and_mul
from piecewise.passes.pack_linears import pack_
from piecewise.settings.fusions import PASS_NAMES
from runners.state.state_check import StateRef

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ULP = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def rows(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, device="cuda").to(dtype)


def assert_close(found, expected):
    assert found.stride() == expected.stride()
    tolerance = ULP[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 2048, 5120, 16384])
@pytest.mark.parametrize(("offset", "round_first"), [(0.0, True), (0.0, False), (1.0, False)])
def test_norms(dtype, width, offset, round_first):
    x, residual = rows(33, 3 * width, dtype=dtype)[:, width : 2 * width], rows(33, width, dtype=dtype)
    options = (rows(width, dtype=dtype), 1e-6, offset, round_first)
    assert_close(rms_norm.op(x, *options), rms_norm.reference(x, *options))
    found, total = add_rms_norm.op(x, residual, *options)
    expected, wanted = add_rms_norm.reference(x, residual, *options)
    assert torch.equal(total, wanted)
    assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_units_and_rotations_of_slices(dtype):
    packed = rows(33, 2 * 8192, dtype=dtype)
    gate, up = packed.chunk(2, dim=1)
    assert_close(silu_and_mul.op(gate, up), silu_and_mul.reference(gate, up))
    packed = rows(1, 33, 48 * 128, dtype=dtype)
    q, k = (part.unflatten(2, (-1, 128)).transpose(1, 2) for part in packed.split((32 * 128, 16 * 128), 2))
    angles = rows(1, 1, 33, 128)
    arguments = [q, k], angles.cos().to(dtype), angles.sin().to(dtype)
    for found, expected in zip(rotary.op(*arguments), rotary.reference(*arguments), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 2048, 16384])
def test_norms_in_float8(dtype, width):
    x, residual, weight = rows(33, width, dtype=dtype), rows(33, width, dtype=dtype), rows(width, dtype=dtype)
    for scale in (torch.tensor([0.02], device="cuda"), None):
        options = (weight, 1e-6, 0.0, True, scale, 1e-10, 0.0)
        found, scales, total = add_rms_norm_quant.sum_op(x, residual, *options)
        expected, wanted, summed = add_rms_norm_quant.sum_reference(x, residual, *options)
        assert found.dtype is torch.float8_e4m3fn and torch.equal(total, summed)
        # One step of float8 where a value turned over.
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.126, atol=0.002)
        assert (found.float() != expected.float()).float().mean() < 0.02
        torch.testing.assert_close(scales, wanted, rtol=1e-2, atol=0)
        assert add_rms_norm_quant.op(x, *options)[0].dtype is torch.float8_e4m3fn


def test_fusing_adds_no_error_in_bfloat16():
    x, residual = (rows(512, 2048, dtype=torch.bfloat16) for _ in range(2))
    weight = rows(2048, dtype=torch.bfloat16)
    for round_first in (True, False):
        options = (weight, 1e-6, 0.0, round_first)
        exact = rms_norm.reference((x + residual).float(), weight.float(), 1e-6, 0.0, round_first)
        errors = [
            (op(x, residual, *options)[0].float() - exact).pow(2).mean().sqrt()
            for op in (add_rms_norm.op, add_rms_norm.reference)
        ]
        assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("fusions", [("auto",), PASS_NAMES], ids=["auto", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_with_fusions_pass_verify(lowering, fusions, dtype):
    model = Plain().cuda().to(dtype)
    for layer in model.layers:
        layer.cache = layer.cache.cuda().to(dtype)
    made = piecewise.compile(model, buckets=(8, 16), progress=False, fusions=fusions, lowering=lowering)
    report = made.capture(make_ids(5).cuda())
    assert report.ok and matches(report)["pack_linears"] == 4 and all(packs(model))
    with torch.no_grad():
        found = made.verify(make_ids(7).cuda())
        assert found.ok, str(found)
        model.layers[0].v.weight.mul_(-1)
        made(make_ids(7).cuda())
    assert made.stats.replays == 1


def test_packing_takes_the_memory_of_one_group_for_a_moment_and_none_for_good():
    groups = [[rows(1 << 20, 16) for _ in range(3)] for _ in range(2)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for group in groups:
        pack_([StateRef({"w": weight}, "w", "w") for weight in group])
    assert torch.cuda.max_memory_allocated() - before <= 3 * (1 << 20) * 16 * 4
    assert torch.cuda.memory_allocated() == before
