"""Tensor subclasses are seen through, or refused by name; changes of what is inside are noticed."""

from __future__ import annotations

import datetime

import pytest
import torch
from inspection import inspect
from subclass_models import (
    BUCKETS,
    Counted,
    Quantised,
    attach,
    captured,
    compare_steps,
    linears,
    llama,
    parts_of,
    set_parameter,
    step,
    toy_with,
)
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from toy_models import Toy, check_sizes, kinds, make_ids, mix

import piecewise
from piecewise.errors.trace import (
    DistributedTensor,
    NotOneGraph,
    OwnTorchFunction,
    ResultSubclass,
    SilentSubclass,
    StateNotStrided,
    SubclassOp,
)
from piecewise.torch_backend import piecewise_backend

PLACES = (
    "embedding.weight",
    "blocks.0.norm.weight",
    "blocks.0.qkv.weight",
    "blocks.1.o.bias",
    "projection.weight",
)


def two(weight):
    return TwoTensor(weight, weight + 0.1)


def assert_served(model, *, sizes=(1, 2, 4, 5, 8), counts=BUCKETS):
    """Each size replays, with eager's classes and values; `verify` agrees."""
    graphed = piecewise.compile(model, buckets=counts, progress=False)
    with torch.no_grad():
        assert graphed.capture(make_ids(3), torch.arange(3)).ok
        for n in sizes:
            arguments = make_ids(n), torch.arange(n)
            want, got = model(*arguments), graphed(*arguments)
            assert type(got) is type(want)
            for mine, theirs in zip(parts_of(got), parts_of(want), strict=True):
                torch.testing.assert_close(mine.as_subclass(torch.Tensor), theirs.as_subclass(torch.Tensor))
        assert graphed.stats.replays == len(sizes), graphed.stats
        report = graphed.verify(make_ids(5), torch.arange(5))
        assert report.ok and "graph" in str(report), report
    return graphed


@pytest.mark.parametrize("path", PLACES)
def test_activations_that_become_a_subclass(path):
    graphed = assert_served(toy_with(path, two))
    assert graphed.report().plans[0].coverage == 1.0


def test_verify_compares_all_that_is_inside_of_a_result():
    """A comparison of two TwoTensors is one of their first parts alone."""
    graphed = assert_served(toy_with("projection.weight", two), sizes=(5,))
    signature = inspect(graphed).signature
    build = signature.rebuild

    def wrong(leaves):
        result = build(leaves)
        return TwoTensor(result.a, result.b + 1)

    signature.rebuild = wrong
    with torch.no_grad():
        assert not graphed.verify(make_ids(5), torch.arange(5)).ok
    signature.rebuild = lambda leaves: build(leaves).a
    with torch.no_grad():
        assert "structure" in str(graphed.verify(make_ids(5), torch.arange(5)))


def test_a_two_tensor_weight_in_a_llama():
    model = llama()
    weight = model.model.layers[0].mlp.down_proj.weight.detach()
    set_parameter(model, "model.layers.0.mlp.down_proj.weight", two(weight.clone()))
    cache = attach(model)
    graphed = compare_steps(captured(model, cache), cache, tolerance=1e-5)
    assert isinstance(step(graphed, cache, (5,)).logits, TwoTensor)


@pytest.mark.parametrize("path", ["blocks.0.qkv.weight", "projection.weight"])
def test_a_wrapper_of_our_own(path):
    graphed = check_sizes(toy_with(path, Quantised.of), poison=True)
    assert graphed.report().plans[0].coverage == 1.0
    names = [name for plan in inspect(graphed).signatures for s in plan.plan.segments for name in s.op_names]
    assert "aten::_to_copy" in names


def test_a_wrapper_whose_torch_function_says_something_else():
    model = toy_with("blocks.0.qkv.weight", Counted.of)
    plain = toy_with("blocks.0.qkv.weight", Quantised.of)
    plain.load_state_dict(
        {k: v for k, v in model.state_dict().items() if "qkv.weight" not in k}, strict=False
    )
    with torch.no_grad():
        assert not torch.allclose(model(make_ids(5)), plain(make_ids(5)), atol=1e-3)
    assert_served(model)


class PlainKin(torch.Tensor):
    pass


class FunctionKin(torch.Tensor):
    """Changes what a linear is, on the Python side alone."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made * 2 if func is nn.functional.linear else made


class ParameterKin(nn.Parameter):
    pass


class BufferKin(nn.Buffer):
    pass


class Doubling(nn.Parameter):
    """Doubles what a linear is, in plain tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            return made * 2 if func is nn.functional.linear else made


def given_class(path, kin):
    model = Toy().eval()
    owner, _, key = path.rpartition(".")
    table = model.get_submodule(owner)._parameters
    table[key] = table[key].detach().as_subclass(kin)
    return model


@pytest.mark.parametrize("path", ["blocks.0.qkv.weight", "projection.weight"])
def test_a_subclass_without_code_is_the_class_of_the_result(path):
    graphed = assert_served(given_class(path, PlainKin))
    with torch.no_grad():
        assert type(graphed(make_ids(4), torch.arange(4))) is PlainKin


def test_a_torch_function_of_ones_own_is_refused_by_name():
    model = given_class("blocks.0.qkv.weight", FunctionKin)
    with torch.no_grad(), pytest.raises(OwnTorchFunction) as error:
        piecewise.compile(model, buckets=[8], progress=False).capture(make_ids(4))
    assert "qkv.weight is a test_subclasses.FunctionKin" in str(error.value)
    assert "derive FunctionKin from torch.nn.Parameter" in str(error.value)


def some_rows_twice(model, x):
    """A linear on rows that data choose: it runs between graphs, on the model's own tensor."""
    return x + nn.functional.linear(x[x[:, 0] > -9.0], model.square).sum(0)


def test_the_torch_function_of_a_kin_of_parameters_is_called_once():
    model = Toy(head=some_rows_twice).eval()
    model.square = Doubling(torch.randn(16, 16))
    model.blocks[0].qkv._parameters["weight"] = Doubling(model.blocks[0].qkv.weight.detach())
    graphed = assert_served(model)
    assert "e" in kinds(graphed)


class Overwritten(nn.Module):
    """A boundary op writes a part of what a quantised linear has made, and all of that is read later."""

    def __init__(self):
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(50, 16), nn.Linear(16, 64)
        self.cache = torch.zeros(64, 16)
        set_parameter(self, "qkv.weight", Quantised.of(self.qkv.weight.detach()))

    def forward(self, ids, positions):
        made = self.qkv(self.embedding(ids))
        q, k, v, out = made.chunk(4, dim=-1)
        mix(q, k, v, out, self.cache)
        return made * 2


def test_memory_behind_a_subclass_is_known_to_be_shared():
    model = Overwritten().eval()
    graphed = assert_served(model)
    plan = inspect(graphed).plan
    _, boundary, last = plan.segments
    assert [plan.values[index].memory in boundary.writes for index in last.inputs] == [True]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_kin_of_parameters_and_buffers(lowering):
    model = Toy(head=lambda model, x: x * model.factor).eval()
    model.blocks[0].qkv._parameters["weight"] = ParameterKin(model.blocks[0].qkv.weight.detach())
    model.register_buffer("factor", BufferKin(torch.tensor(1.5)))
    assert_served(model)


class Silent(torch.Tensor):
    """A wrapper that does not say what is inside."""

    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].inner))
        opened = [each.inner if isinstance(each, cls) else each for each in args]
        return func(*opened, **(kwargs or {}))


def test_a_class_that_does_not_say_what_is_inside_is_refused_by_name():
    model = toy_with("blocks.0.qkv.weight", Silent)
    with torch.no_grad():
        model(make_ids(4))
        with pytest.raises(SilentSubclass) as error:
            piecewise.compile(model, buckets=[8], progress=False).capture(make_ids(4))
    text = str(error.value)
    assert "model.blocks.0.qkv.weight is a test_subclasses.Silent" in text
    assert "Fix:  give Silent __tensor_flatten__ and __tensor_unflatten__" in text


class Rebinding(Quantised):
    """Binds another tensor inside of itself in an op."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        for each in args:
            if isinstance(each, cls) and func is not torch.ops.aten.detach.default:
                each.scales = each.scales.clone()
        return super().__torch_dispatch__(func, types, args, kwargs)


class Holding(Quantised):
    """Reads a tensor that it does not name."""

    def dense(self):
        return super().dense() * FACTOR


FACTOR = torch.tensor(2.0)


@pytest.mark.parametrize(
    "cls, error, says",
    [(Rebinding, SubclassOp, "binds other tensors inside"), (Holding, NotOneGraph, "Holding")],
)
def test_what_a_class_does_beside_its_tensors_is_refused_by_name(cls, error, says):
    model = toy_with("blocks.0.qkv.weight", cls.of)
    with torch.no_grad(), pytest.raises(error) as caught:
        piecewise.compile(model, buckets=[8], progress=False).capture(make_ids(4))
    text = str(caught.value)
    assert says in text and f"a {cls.__name__}" in text and "blocks.0.qkv" in text and "Fix:" in text


class Flat(Quantised):
    """Keeps its values in one dim."""

    def __new__(cls, values, scales, options):
        shape = scales.shape[0], values.numel() // scales.shape[0]
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype)

    @classmethod
    def of(cls, weight):
        made = Quantised.of(weight)
        return cls(made.values.flatten(), made.scales, made.options)


def test_a_result_without_a_tensor_of_its_shape_inside_is_refused():
    model = Toy(head=lambda model, x: (x, model.flat.clone()), project=False).eval()
    model.flat = Flat.of(torch.randn(16, 16))
    with torch.no_grad(), pytest.raises(ResultSubclass) as error:
        piecewise.compile(model, buckets=[8], progress=False).capture(make_ids(4))
    assert "returns a test_subclasses.Flat" in str(error.value) and "Fix:" in str(error.value)


def test_nested_state_is_refused_by_its_layout():
    model = Toy(head=lambda model, x: x * model.nested.sum()).eval()
    model.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with torch.no_grad(), pytest.raises(StateNotStrided) as error:
        piecewise.compile(model, buckets=[8], progress=False).capture(make_ids(4))
    assert "jagged" in str(error.value) and "Fix:" in str(error.value)


def test_a_dtensor_is_refused_by_name():
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=9))
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = Toy().eval()
        for path, weight in list(model.named_parameters()):
            set_parameter(model, path, distribute_tensor(weight.detach(), mesh, [Replicate()]))
        with torch.no_grad(), pytest.raises(DistributedTensor) as error:
            piecewise.compile(model, buckets=[8], progress=False).capture(make_ids(4))
    finally:
        destroy_process_group()
    assert "is a torch.distributed.tensor.DTensor" in str(error.value) and "Fix:" in str(error.value)


def test_the_backend_of_torch_compile():
    model = toy_with("blocks.0.qkv.weight", Quantised.of)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=piecewise_backend, options={"buckets": [8]}, dynamic=True)
    with torch.no_grad(), piecewise.capture_window():
        for n in (5, 6):
            assert torch.allclose(compiled(make_ids(n)), model(make_ids(n)), atol=1e-5)
        weight = model.blocks[0].qkv.weight
        assert piecewise.handle(compiled).stats.replays == 2
        weight.scales = weight.scales * 2
        assert torch.allclose(compiled(make_ids(5)), model(make_ids(5)), atol=1e-5)
    torch._dynamo.reset()


def test_layers_of_subclasses_serve_each_other():
    model = llama(layers=3)
    for path, module in linears(model):
        set_parameter(model, f"{path}.weight", Quantised.of(module.weight.detach()))
    cache = attach(model)
    layers = inspect(captured(model, cache)).layers
    assert layers is not None and "1" in str(layers)
    model.model.layers[1].mlp.up_proj.weight.options["factors"][0] = 2.0
    compare_steps(captured(model, cache), cache, tolerance=1e-5)


def test_tensors_that_their_class_wants_at_equal_offsets_are_not_packed():
    model = Toy().eval()
    model.projection = nn.Linear(16, 16, bias=False)
    set_parameter(model, "projection.weight", two(model.projection.weight.detach().clone()))
    graphed = piecewise.compile(model, buckets=(8,), fusions=("pack_linears",), progress=False)
    arguments = make_ids(5), torch.arange(5)
    with torch.no_grad():
        report = graphed.capture(*arguments)
        want, got = model(*arguments), graphed(*arguments)
    assert report.ok and graphed.stats.replays == 1, report
    assert "takes no tensors which lie there" in str(report)
    for mine, theirs in zip(parts_of(got), parts_of(want), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert graphed.verify(*arguments).ok


@pytest.mark.parametrize("fusions", [("auto",), ("pack_linears",)], ids=str)
def test_quantised_weights_are_packed(fusions):
    model = llama()
    for path, module in linears(model):
        set_parameter(model, f"{path}.weight", Quantised.of(module.weight.detach()))
    cache = attach(model)
    graphed = compare_steps(captured(model, cache, fusions=fusions), cache, tolerance=1e-5)
    found = dict(graphed.report().captures[0].fusions.matches)
    assert found["pack_linears"] == 4
    q, k = (getattr(model.model.layers[0].self_attn, name).weight for name in ("q_proj", "k_proj"))
    for name in ("values", "scales"):
        left, right = getattr(q, name), getattr(k, name)
        assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    with torch.no_grad():
        q.copy_(Quantised.of(torch.randn(q.shape)))
    compare_steps(graphed, cache, tolerance=1e-5, sizes=(8,))


def test_linears_of_other_recipes_are_not_packed_together():
    model = llama()
    for path, module in linears(model):
        factor = 2.0 if "k_proj" in path else 1.0
        set_parameter(model, f"{path}.weight", Quantised.of(module.weight.detach(), factor))
    cache = attach(model)
    compare_steps(captured(model, cache, fusions=("pack_linears",)), cache, tolerance=1e-5)
    q, k, v = (getattr(model.model.layers[0].self_attn, f"{name}_proj").weight.values for name in "qkv")
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()


def test_captured_boundary_ops_and_autocast():
    model = llama()
    set_parameter(model, "lm_head.weight", Quantised.of(model.lm_head.weight.detach()))
    cache = attach(model)
    limits = dict(boundary="captured", max_num_seqs=2, max_seq_len=40)
    compare_steps(captured(model, cache, fusions=("auto",), **limits), cache, tolerance=1e-5, sizes=(5, 8))


@pytest.mark.parametrize("ambient", [True, False])
def test_autocast_is_resolved_below_a_subclass(ambient):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.toy = toy_with("blocks.0.qkv.weight", Quantised.of)

        def forward(self, ids, positions):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not ambient):
                return self.toy(ids, positions)

    model = Cast().eval() if not ambient else toy_with("blocks.0.qkv.weight", Quantised.of)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient), torch.no_grad():
        graphed = piecewise.compile(model, buckets=(8,), progress=False)
        graphed.capture(make_ids(3), torch.arange(3))
        for n in (5, 8):
            got, want = graphed(make_ids(n), torch.arange(n)), model(make_ids(n), torch.arange(n))
            assert got.dtype is want.dtype
            assert torch.allclose(got.float(), want.float(), atol=2e-2)
        assert graphed.stats.replays == 2
