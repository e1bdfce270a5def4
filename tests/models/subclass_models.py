"""Tensor subclasses and models that hold them, and one step of an attached model, compared with eager."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map
from toy_models import Toy

import boundary_ops
import piecewise
from boundary_ops import PagedKVCache, PrefillBatch

aten = torch.ops.aten
BUCKETS = (8, 16, 32)
SIZES = (1, 2, 5, 8, 9, 17, 32)


class Quantised(torch.Tensor):
    """int8 values, a scale per row and a factor in a list: a wrapper that says what is inside of it."""

    def __new__(cls, values, scales, options):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=scales.dtype, device=values.device
        )

    def __init__(self, values, scales, options):
        self.values, self.scales, self.options = values, scales, options

    @classmethod
    def of(cls, weight, factor=1.0):
        scales = weight.abs().amax(-1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales, {"factors": [factor]})

    def __repr__(self):
        return f"Quantised({self.values.shape})"

    def __tensor_flatten__(self):
        return ["values", "scales"], {"options": self.options}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["values"], inner["scales"], context["options"])

    def dense(self):
        return self.values.to(self.scales.dtype) * self.scales * self.options["factors"][0]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default, aten.clone.default, aten.t.default):
            return cls(func(args[0].values), func(args[0].scales), args[0].options)
        if func is aten.copy_.default:
            args[0].values.copy_(args[1].values)
            args[0].scales.copy_(args[1].scales)
            return args[0]
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class Counted(Quantised):
    """Of which `__torch_function__`, too, changes what a linear is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            return made * 3 if func is nn.functional.linear else made


def parts_of(value):
    return [value.a, value.b] if isinstance(value, TwoTensor) else [value]


def set_parameter(model, path, tensor):
    owner, _, key = path.rpartition(".")
    setattr(model.get_submodule(owner), key, nn.Parameter(tensor, requires_grad=False))


def toy_with(path, make):
    model = Toy().eval()
    set_parameter(model, path, make(model.get_parameter(path).detach().clone()))
    return model


def llama(*, hidden=32, inner=64, dtype=torch.float32, device="cpu", layers=2):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def linears(model):
    return [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]


def attach(model):
    cache = PagedKVCache.for_model(model, num_tokens=384, block_size=4)
    boundary_ops.huggingface.attach(model, cache)
    return cache


def step(run, cache, lengths, *, seed=1):
    """One packed prefill from empty pages; what it writes is given back."""
    device = cache.k[0].device
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 64, (1, sum(lengths)), generator=generator).to(device)
    names = [f"request {number}" for number in range(len(lengths))]
    batch = PrefillBatch.build(cache, names, list(lengths))
    try:
        with batch, torch.no_grad():
            return run(input_ids=ids, position_ids=batch.positions)
    finally:
        for name in names:
            cache.free(name)


def captured(model, cache, **config):
    """The graphed model; no bucket is missing."""
    graphed = piecewise.compile(model, buckets=BUCKETS, progress=False, **config)
    ids = torch.arange(1, 7, device=model.device)[None]
    with torch.no_grad():
        report = graphed.capture(input_ids=ids, position_ids=ids - 1)
    assert report.ok, report
    return graphed


def compare_steps(graphed, cache, *, tolerance=None, exact=None, sizes=SIZES, coverage=1.0):
    """Each size, graphed and eager, and `verify` at one; all calls replay.

    Args:
        tolerance: of the largest distance, as a share of eager's largest value.
        exact: a model and its cache, of what was quantised: graphed may be a tenth further from it than
            eager is.
    """
    assert all(plan.coverage >= coverage for plan in graphed.report().plans)
    errors = torch.zeros(2, dtype=torch.float64)
    for size in sizes:
        lengths = (size,) if size < 4 else (size - 3, 3)
        replays = graphed.stats.replays
        got = step(graphed, cache, lengths).logits
        assert graphed.stats.replays == replays + 1, (size, graphed.stats.reasons)
        with piecewise.eager_only():
            want = step(graphed, cache, lengths).logits
        assert type(got) is type(want)
        for mine, theirs in zip(parts_of(got), parts_of(want), strict=True):
            assert theirs.isfinite().all() and theirs.abs().max() > 0.1
            if exact is not None:
                aim = step(*exact, lengths).logits.double()
                errors += torch.stack([(each.double() - aim).square().sum().cpu() for each in (mine, theirs)])
                continue
            distance = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
            assert distance <= tolerance, (size, float(distance))
    assert exact is None or 0 < errors[0] <= 1.1**2 * errors[1], errors.sqrt()
    report = step(graphed.verify, cache, (6,))
    assert report.ok and "graph" in str(report), report
    return graphed


# torchao


def float8_rows(model):
    """As `quantize_` does it on a GPU; on the CPU, where torch has the kernel from 2.13 on, it refuses to."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.float8 import float8_tensor

    mm = Float8MMConfig(use_fast_accum=True)
    activations = float8_tensor.QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, PerRow(), mm_config=mm)
    for path, module in linears(model):
        made = float8_tensor.Float8Tensor.from_hp(
            module.weight.detach(), granularity=PerRow(), mm_config=mm, act_quant_kwargs=activations
        )
        set_parameter(model, f"{path}.weight", made)


def by_config(name, *arguments):
    def quantise(model):
        import torchao.quantization as quantization

        config = getattr(quantization, name)
        given = {"granularity": quantization.PerRow()} if "rows" in arguments else {}
        quantization.quantize_(model, config(**given))

    return quantise


TORCHAO = {
    "int8 weights": by_config("Int8WeightOnlyConfig"),
    "int8 activations and weights": by_config("Int8DynamicActivationInt8WeightConfig"),
    "float8 weights": by_config("Float8WeightOnlyConfig"),
    "float8 rows": by_config("Float8DynamicActivationFloat8WeightConfig", "rows"),
}


def need_torchao():
    with contextlib.suppress(Exception):
        import torchao  # noqa: F401

        return
    pytest.skip("torchao is not installed")
