"""The fused ops: formulations that each pass knows, rounding, and transformers models with their counts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from aten_segments import ROWS, Rewritten
from norms import DTYPES, NORMS, WIDTH, plain, rows
from torch.nn import functional as F

from piecewise.passes import fusion_pass
from piecewise.passes.fusions import add_rms_norm, rms_norm, rotary, silu_and_mul
from piecewise.settings.fusions import PASS_NAMES

INTERPRETED = Path(__file__).resolve().parents[3] / "tests" / "models" / "interpreted_fused_kernels.py"
FUSED = PASS_NAMES[2:]


# --- the programs, interpreted


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Test function of interpreted_fused_kernels.py -> what failed in it; all run in one process, once."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    options = ["-q", "-p", "no:xdist", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, str(INTERPRETED)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failures = found.setdefault(case.attrib["name"].partition("[")[0], [])
        failures += [f"{case.attrib['name']}: {each.text}" for each in case if each.tag != "properties"]
    return found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", INTERPRETED.read_text(), re.MULTILINE))
def test_program(outcomes, name):
    assert outcomes[name] == []


def test_a_kernel_runs_on_devices_whose_engine_has_triton_where_it_can_be_imported(monkeypatch):
    def chosen(kernel, *, has_triton):
        engine = SimpleNamespace(has_triton=has_triton)
        monkeypatch.setattr(fusion_pass, "native_engine", lambda device: engine)
        return fusion_pass._on_device(kernel, torch.cos, ([torch.zeros(1)], 2.0))

    assert chosen("torch:sin", has_triton=True) is torch.sin
    for kernel, has_triton in (("torch:sin", False), ("no_such_module:sin", True), (None, True)):
        assert chosen(kernel, has_triton=has_triton) is torch.cos


# --- formulations


def assert_same(rewritten, tensors):
    """Same bits where every op rounds, else equal to rounding: the reference runs the same kernels."""
    own, found = rewritten.outputs(tensors)
    for ours, theirs in zip(found, own, strict=True):
        assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_each_formulation_of_a_norm_becomes_one_op(norm, dtype):
    tensors = [rows(WIDTH, dtype=dtype), torch.randn(WIDTH).to(dtype)]
    rewritten = Rewritten(norm, tensors, "rms_norm")
    assert rewritten.targets == ["piecewise::rms_norm"] and rewritten.matches["rms_norm"] == 1
    assert_same(rewritten, tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_a_sum_returns_both(norm, dtype):
    def layer(x, delta, weight):
        total = x + delta
        return total * 2, norm(total, weight), total

    tensors = [rows(WIDTH, dtype=dtype), rows(WIDTH, dtype=dtype), torch.randn(WIDTH).to(dtype)]
    rewritten = Rewritten(layer, tensors, "add_rms_norm")
    assert (rewritten.matches["rms_norm"], rewritten.matches["add_rms_norm"]) == (1, 1)
    assert rewritten.targets.count("piecewise::add_rms_norm") == 1 and "aten::add" not in rewritten.targets
    assert_same(rewritten, tensors)


def over_first(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * weight


def narrow(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def shared_statistics(x, weight):
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed * weight, normed


def narrow_factor(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight)).to(x.dtype)


def other_power(x, weight):
    return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6) * weight


def written_between(x, weight):
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.add_(1)
    return x * root * weight


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (over_first, torch.float32),
        (narrow, torch.bfloat16),
        (shared_statistics, torch.float32),
        (other_power, torch.float32),
        (written_between, torch.float32),
        (plain, torch.float64),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_no_such_norm_stays(norm, dtype):
    tensors = [rows(WIDTH, dtype=dtype), torch.randn(WIDTH).to(dtype)]
    rewritten = Rewritten(norm, tensors, "add_rms_norm")
    assert rewritten.matches["rms_norm"] == 0
    own, found = rewritten.outputs(tensors)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, own, strict=True))


def test_a_factor_that_is_rounded_first_is_left_to_round():
    tensors = [rows(WIDTH, dtype=torch.bfloat16), torch.randn(WIDTH).to(torch.bfloat16)]
    rewritten = Rewritten(narrow_factor, tensors, "rms_norm")
    assert rewritten.targets == ["aten::add", "piecewise::rms_norm"]
    assert_same(rewritten, tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_units_on_slices_of_a_packed_linear_take_no_copy(dtype):
    def mlps(x, gate, up, other_gate, other_up):
        one = F.silu(F.linear(x, gate)) * F.linear(x, up)
        return one, F.linear(x, other_up) * F.silu(F.linear(x, other_gate))

    from test_passes import weights

    tensors = [rows(WIDTH, dtype=dtype), *weights(32, 32, 32, 32, dtype=dtype)]
    alone = Rewritten(mlps, tensors, "silu_and_mul")
    assert alone.matches["silu_and_mul"] == 2
    assert_same(alone, tensors)
    tensors = tensors[:3]

    def once(x, gate, up):
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    packed = Rewritten(once, tensors, "pack_linears", "silu_and_mul")
    assert packed.targets == [
        "aten::as_strided", "aten::t", "aten::mm", "aten::slice", "aten::slice", "piecewise::silu_and_mul"
    ]  # fmt: skip
    assert_same(packed, tensors)


def test_a_silu_that_is_read_again_or_broadcast_stays():
    def read_again(x, y):
        active = F.silu(x)
        return active * y, active

    tensors = [rows(WIDTH), rows(WIDTH)]
    assert Rewritten(read_again, tensors, "silu_and_mul").matches["silu_and_mul"] == 0
    tensors = [rows(WIDTH), torch.randn(WIDTH)]
    assert Rewritten(lambda x, y: F.silu(x) * y, tensors, "silu_and_mul").matches["silu_and_mul"] == 0


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def transformers_rotary(q, k, cos, sin):
    q, k = (each.view(1, -1, each.shape[-1] // 8, 8).transpose(1, 2) for each in (q, k))
    cos, sin = cos[None].unsqueeze(1), sin[None].unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def plain_rotary(q, k, cos, sin):
    q, k = (each.view(-1, each.shape[-1] // 8, 8) for each in (q, k))
    cos, sin = cos[:, None], sin[:, None]
    return rotate_half(q) * sin + cos * q, rotate_half(k) * sin + cos * k


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [transformers_rotary, plain_rotary])
def test_q_and_k_are_rotated_by_one_op(rotary, dtype):
    tensors = [rows(32, dtype=dtype), rows(16, dtype=dtype), rows(8, dtype=dtype), rows(8, dtype=dtype)]
    rewritten = Rewritten(rotary, tensors, "rotary")
    assert rewritten.matches["rotary"] == 2 and rewritten.targets.count("piecewise::rotate") == 1
    assert not {"aten::neg", "aten::cat", "aten::mul"} & set(rewritten.targets)
    assert_same(rewritten, tensors)


def test_rotations_that_cannot_be_joined_stay_single():
    def one(q, k, cos, sin):
        return transformers_rotary(q, k, cos, sin)[0]

    def chained(q, k, cos, sin):
        first, _ = plain_rotary(q, k, cos, sin)
        again = first.sum(1, keepdim=True)
        return rotate_half(again) * sin[:, None] + cos[:, None] * again

    tensors = [rows(32), rows(16), rows(8), rows(8)]
    for function, count in ((one, 1), (chained, 2)):
        rewritten = Rewritten(function, tensors, "rotary")
        assert rewritten.matches["rotary"] == rewritten.targets.count("piecewise::rotate") == count
        assert_same(rewritten, tensors)


@pytest.mark.parametrize(
    "turn",
    [
        lambda x: torch.cat((x[..., 4:], -x[..., :4]), dim=-1),
        lambda x: torch.cat((-x[..., 4:], x[..., 4:]), dim=-1),
        lambda x: torch.cat((-x[..., 2:], x[..., :2]), dim=-1),
        lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1),
    ],
)
def test_other_turns_stay(turn):
    tensors = [rows(8), rows(8), rows(8)]
    rewritten = Rewritten(lambda x, cos, sin: x * cos + turn(x) * sin, tensors, "rotary")
    assert rewritten.matches["rotary"] == 0
    assert_same(rewritten, tensors)


# --- rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_fusing_adds_no_error(norm, dtype):
    """The bound that is asked for is 5 % above the unfused error against float32."""
    x, delta, weight = (torch.randn(*sizes).to(dtype) for sizes in ((64, WIDTH), (64, WIDTH), (WIDTH,)))

    def layer(x, delta, weight):
        total = x + delta
        return norm(total, weight), F.silu(total) * delta

    exact = layer(x.float(), delta.float(), weight.float())
    tensors = [x[:ROWS], delta[:ROWS], weight]
    rewritten = Rewritten(layer, tensors, *FUSED)
    assert rewritten.matches["add_rms_norm"] == rewritten.matches["silu_and_mul"] == 1
    own, found = layer(x, delta, weight), rewritten.function(64, x, delta, weight)
    for ours, theirs, right in zip(found, own, exact, strict=True):
        fused, unfused = ((each.float() - right).pow(2).mean().sqrt() for each in (ours, theirs))
        assert fused <= 1.05 * unfused


def test_the_reference_gives_what_its_fake_promises():
    heads = torch.randn(1, 5, 3, 8).transpose(1, 2)
    sliced = torch.randn(5, 3, 24)[..., 8:16]
    for x in (heads, sliced, torch.randn(5, 8)):
        like = torch.empty_like(x).stride()
        weight = torch.ones(8)
        results = [rms_norm.reference(x, weight, 1e-6, 0.0, True), silu_and_mul.reference(x, x)]
        results += [*add_rms_norm.reference(x, x, weight, 1e-6, 1.0, False)]
        results += rotary.reference([x], weight, weight)
        assert all(result.stride() == like for result in results)
