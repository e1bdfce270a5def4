"""Weights of torchao and bitsandbytes, as their libraries quantise them, in graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from subclass_models import (
    TORCHAO,
    attach,
    captured,
    compare_steps,
    float8_rows,
    linears,
    llama,
    need_torchao,
    step,
)

import piecewise


@pytest.mark.parametrize("fusions", [(), ("auto",)], ids=["eager ops", "fused"])
@pytest.mark.parametrize("kind", TORCHAO)
def test_torchao(kind, fusions):
    need_torchao()
    if kind == "float8 rows" and torch.__version__ < "2.13":
        pytest.skip("torch scales rows of a float8 product on the CPU from 2.13 on")
    model = llama(dtype=torch.bfloat16)
    (float8_rows if kind == "float8 rows" else TORCHAO[kind])(model)
    cache = attach(model)
    graphed = compare_steps(
        captured(model, cache, fusions=fusions), cache, tolerance=3e-2, sizes=(1, 5, 8, 17)
    )
    if fusions:
        found = dict(graphed.report().captures[0].fusions.matches)
        assert found["pack_linears"] == 4 and found["rms_norm"] + found["add_rms_norm"] >= 5
        assert found["add_rms_norm_quant"] == (5 if kind == "float8 rows" else 0)


def test_torchao_compiled():
    need_torchao()
    model = llama(dtype=torch.bfloat16, layers=1)
    TORCHAO["int8 weights"](model)
    cache = attach(model)
    graphed = captured(model, cache, lowering="inductor")
    assert not any(lowered.kept_eager for lowered in graphed.report().captures[0].lowerings)
    compare_steps(graphed, cache, tolerance=3e-2, sizes=(5, 8))


def bitsandbytes_llama(bits, *, threshold=0.0):
    bnb = pytest.importorskip("bitsandbytes")
    model = llama(hidden=64, inner=128)
    for path, module in linears(model):
        sizes = module.in_features, module.out_features
        weight = module.weight.detach().clone()
        if bits == 4:
            new = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
            new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        else:
            new = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=threshold)
            new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        owner, _, key = path.rpartition(".")
        setattr(model.get_submodule(owner), key, new.to("cpu"))
    return model.eval()


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits):
    model = bitsandbytes_llama(bits)
    cache = attach(model)
    step(model, cache, (5,))  # lays 8-bit weights out
    coverage = 1.0 if bits == 8 else 0.5
    compare_steps(captured(model, cache), cache, tolerance=1e-4, sizes=(5, 8), coverage=coverage)


@pytest.mark.parametrize("threshold, is_called", [(6.0, True), (0.0, False)])
def test_bitsandbytes_8_bit_with_state_in_python_is_refused_with_what_to_do(threshold, is_called):
    model = bitsandbytes_llama(8, threshold=threshold)
    cache = attach(model)
    if is_called:
        step(model, cache, (5,))
    with pytest.raises(piecewise.TraceError, match="llm_int8_threshold=0.0.*call the model once before"):
        captured(copy.copy(model), cache)
