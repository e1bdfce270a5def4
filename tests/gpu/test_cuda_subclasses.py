"""Tensor subclasses on real CUDA graphs: torchao's quantised weights, and the ops that they come to."""

from __future__ import annotations

import copy

import pytest
import torch
from subclass_models import (
    TORCHAO,
    Quantised,
    attach,
    captured,
    compare_steps,
    linears,
    llama,
    need_torchao,
    set_parameter,
)
from torch.testing._internal.two_tensor import TwoTensor

from piecewise.passes.fusions import add_rms_norm_quant
from piecewise.passes.int8_matmul import int8_matmul

pytestmark = pytest.mark.gpu

SETTINGS = {
    "eager ops": {},
    "fused": dict(fusions=("auto",)),
    "compiled": dict(fusions=("auto",), lowering="inductor"),
    "captured": dict(fusions=("auto",), boundary="captured", max_num_seqs=2, max_seq_len=64),
}


def on_cuda():
    return llama(hidden=256, inner=512, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", TORCHAO)
def test_torchao(kind, settings):
    need_torchao()
    model = on_cuda()
    exact = copy.deepcopy(model).float()
    TORCHAO[kind](model)
    cache = attach(model)
    graphed = captured(model, cache, **SETTINGS[settings])
    if settings == "compiled":
        assert not any(lowered.kept_eager for lowered in graphed.report().captures[0].lowerings)
    # An activation near the middle between two integers, or two float8 numbers, may go either way.
    compare_steps(graphed, cache, exact=(exact, attach(exact)))
    if settings in ("fused", "captured"):
        found = dict(graphed.report().captures[0].fusions.matches)
        assert found["pack_linears"] == 4 and found["rms_norm"] + found["add_rms_norm"] >= 5
        assert found["add_rms_norm_quant"] == (5 if kind == "float8 rows" else 0)


@pytest.mark.parametrize(
    "make", [Quantised.of, lambda weight: TwoTensor(weight, weight + 0.1)], ids=["own", "two"]
)
def test_subclasses_of_others(make):
    model = on_cuda()
    for path, module in linears(model):
        if "down_proj" in path:
            set_parameter(model, f"{path}.weight", make(module.weight.detach().clone()))
    cache = attach(model)
    compare_steps(captured(model, cache), cache, tolerance=3e-2)


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 100])
def test_int8_products_of_any_row_count(rows):
    a, b = (
        torch.randint(-127, 128, sizes, dtype=torch.int8, device="cuda") for sizes in ((rows, 64), (32, 64))
    )
    expected = (a.cpu().long() @ b.cpu().long().t()).int()
    assert torch.equal(int8_matmul(a, b.t()).cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = int8_matmul(a, b.t())
    graph.replay()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float8_rows_by_scales_of_the_norms_dtype(dtype):
    x = torch.randn(33, 2048, device="cuda").to(dtype)
    x[5] = 0  # its scale is zero, and its row is NaN, as torchao's own
    options = (torch.randn(2048, device="cuda").to(dtype), 1e-6, 0.0, True, None, 0.0, 0.0, True)
    found, scales = add_rms_norm_quant.op(x, *options)
    expected, wanted = add_rms_norm_quant.reference(x, *options)
    assert torch.equal(scales, scales.to(dtype).float())
    torch.testing.assert_close(scales, wanted, rtol=1e-2, atol=0)
    assert found[5].isnan().all() and expected[5].isnan().all()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.126, atol=0.002, equal_nan=True)
    assert (found.float() != expected.float())[x[:, 0] != 0].float().mean() < 0.02
