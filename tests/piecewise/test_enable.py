"""`enable` and `disable` in place; a `GraphedModule` looks like its model; copies and pickles."""

from __future__ import annotations

import copy
from inspect import signature as signature_of

import pytest
import torch
from inspection import inspect
from state_models import BUCKETS, assert_equal, graph, new_model, serve, tokens
from torch import nn
from toy_models import COPIES

import piecewise
from piecewise.errors.api import AlreadyEnabled, NoModule, NotEnabled
from piecewise.errors.capture import SeveralDevices, UnknownBoundaryOp

SETTINGS = {"buckets": BUCKETS, "progress": False}


def test_enable_swaps_forward_and_disable_restores_it_exactly():
    model = new_model()
    names, state = (
        dict(vars(model)),
        {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()},
    )
    graphed = piecewise.enable(model, **SETTINGS)
    assert graphed.capture(tokens(7)).ok
    with torch.no_grad():
        want = graphed._forward(tokens(5))
        torch.testing.assert_close(model(tokens(5)), want)
    assert graphed.stats.replays == 1, "whoever holds the model replays graphs"
    assert piecewise.disable(model) is model
    assert vars(model) == names and list(vars(model)) == list(names)
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == state
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(5)), want)
    assert graphed.stats.replays == 1 and inspect(graphed).pool is None


def test_enable_keeps_forwards_signature_and_state_dict():
    model = new_model()
    signature, keys = signature_of(model.forward), list(model.state_dict())
    piecewise.enable(model, **SETTINGS)
    assert signature_of(model.forward) == signature
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == [name for name, _ in new_model().named_modules()]


def test_enable_twice_and_disable_of_nothing_are_errors():
    model = new_model()
    piecewise.enable(model, **SETTINGS)
    with pytest.raises(AlreadyEnabled, match=r"(?s)enabled already.*Rule:.*Fix:.*disable"):
        piecewise.enable(model, **SETTINGS)
    piecewise.disable(model)
    with pytest.raises(NotEnabled, match=r"(?s)not enabled.*Rule:.*Fix:"):
        piecewise.disable(model)
    piecewise.enable(model, **SETTINGS)
    piecewise.disable(model)


def test_enable_over_a_forward_of_the_instance_restores_that_one():
    model = new_model()
    original = model.forward
    model.forward = lambda ids: original(ids) * 2
    mine = model.forward
    graphed = piecewise.enable(model, **SETTINGS)
    graphed.capture(tokens(7))
    assert serve(graphed, tokens(5)) == "replay"
    piecewise.disable(model)
    assert model.forward is mine


def test_enable_leaves_hooks_of_the_root_to_its_call():
    model = new_model()
    model.register_forward_hook(lambda module, args, out: out + 1)
    with torch.no_grad():
        want = model(tokens(5))
        graphed = piecewise.enable(model, **SETTINGS)
        graphed.capture(tokens(7))
        torch.testing.assert_close(model(tokens(5)), want)
        model.register_forward_hook(lambda module, args, out: out * 2)
        torch.testing.assert_close(model(tokens(5)), want * 2)
    assert graphed.stats.replays == 2, "what surrounds forward is not in the trace"


def test_enable_works_inside_a_larger_model():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = new_model()

        def forward(self, ids):
            return self.inner(ids).softmax(-1)

    outer = Outer().eval()
    with torch.no_grad():
        want = outer(tokens(5))
        graphed = piecewise.enable(outer.inner, **SETTINGS)
        graphed.capture(tokens(7))
        torch.testing.assert_close(outer(tokens(5)), want)
    assert graphed.stats.replays == 1


def test_attributes_are_the_models_to_read_and_to_set():
    model = new_model(before=lambda model, x: x * model.factor)
    model.factor = 2.0
    graphed = graph(model)
    assert graphed.factor == 2.0 and graphed.projection is model.projection and graphed.model is model
    graphed.factor = 3.0
    assert model.factor == 3.0
    assert serve(graphed, tokens(5)) == "module_state_changed"
    graphed.extra = 1
    assert model.extra == 1
    del graphed.extra
    assert not hasattr(model, "extra") and not hasattr(graphed, "extra")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = graphed.no_such_name
    assert {"capture", "projection", "factor"} <= set(dir(graphed))
    assert list(graphed.state_dict()) == list(model.state_dict())
    assert [id(p) for p in graphed.parameters()] == [id(p) for p in model.parameters()]


def test_repr_says_what_is_captured():
    graphed = graph(new_model(), captured=False)
    assert repr(graphed) == "GraphedModule(Model, captured=[])"
    graphed.capture(tokens(7))
    assert repr(graphed) == "GraphedModule(Model, captured=[4, 8, 16])"


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_the_model_and_the_settings_and_no_graphs(how):
    graphed = graph(new_model(), max_padding_ratio=4.0)
    serve(graphed, tokens(5))
    copied = COPIES[how](graphed)
    assert copied.model is not graphed.model and copied.piecewise_config == graphed.piecewise_config
    assert copied.stats.captured == () and copied.stats.replays == 0
    with torch.no_grad():
        assert_equal(copied(tokens(5)), graphed(tokens(5)))
    assert copied.capture(tokens(7)).ok
    copied.projection.weight.data.mul_(2)
    assert serve(copied, tokens(5)) == "replay"
    assert serve(graphed, tokens(5)) == "replay", "the original reads its own weights"


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_enabled_model_is_enabled_by_itself(how):
    model = new_model()
    graphed = piecewise.enable(model, **SETTINGS)
    graphed.capture(tokens(7))
    copied = COPIES[how](model)
    with torch.no_grad():
        before = graphed.stats.snapshot()
        want = graphed._forward(tokens(5))
        torch.testing.assert_close(copied(tokens(5)), want)
        assert graphed.stats.replays == before.replays, "not through the original's graphs"
        copied.projection.weight.mul_(0)
        copied.projection.bias.mul_(0)
        assert not copied(tokens(5)).any()
        torch.testing.assert_close(model(tokens(5)), want)
    twin = copied.forward.graphed
    assert twin is not graphed and twin.model is copied
    assert twin.capture(tokens(7)).ok
    piecewise.disable(copied)
    with torch.no_grad():
        assert not copied(tokens(5)).any()
        torch.testing.assert_close(model(tokens(5)), want)


def test_a_shallow_copy_shares_the_model():
    graphed = graph(new_model())
    copied = copy.copy(graphed)
    assert copied.model is graphed.model and copied.stats is not graphed.stats


def test_a_graphed_module_is_not_graphed_again():
    graphed = piecewise.compile(new_model(), **SETTINGS)
    for again in (piecewise.compile, piecewise.enable, piecewise.explain):
        with pytest.raises(
            NoModule, match="expected a model without graphs, got a GraphedModule.*(?s:.)*use it as it is"
        ):
            again(graphed)
    assert piecewise.compile(graphed.model, buckets=[4]).piecewise_config.buckets == (4,)


def test_a_function_is_no_model():
    with pytest.raises(NoModule, match=r"(?s)argument 'model'.*Module.*Fix:"):
        piecewise.compile(lambda x: x)


def test_an_op_that_is_not_registered_is_refused_with_those_that_are():
    with pytest.raises(UnknownBoundaryOp, match=r"(?s)'state::atend'.*registered op \(.*Fix:"):
        piecewise.compile(new_model(), boundary_ops=["state::atend"])


def test_inputs_on_another_device_than_the_model_are_refused():
    graphed = piecewise.compile(new_model(), buckets=(8,), progress=False)
    with pytest.raises(SeveralDevices, match=r"(?s)input.*parameter.*meta and cpu.*Fix:"):
        graphed.capture(torch.empty(5, dtype=torch.long, device="meta"))
