"""A `GraphedModule` stands in for its model wherever a module may stand, and the model stays what it was."""

from __future__ import annotations

import io

import pytest
import small_transformers
import torch
from state_models import BUCKETS, assert_equal, new_model, tokens
from torch import nn
from toy_models import COPIES

import piecewise
from boundary_ops import PrefillBatch
from boundary_ops.huggingface import attach, detach

NAMES = list(new_model().state_dict())


@pytest.fixture
def graphed():
    made = piecewise.compile(new_model(), buckets=BUCKETS, progress=False)
    assert made.capture(tokens(7)).ok
    return made


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids):
        return self.inner(ids)


CONTAINERS = {
    "0": nn.Sequential,
    "inner": Around,
    "one": lambda inner: nn.ModuleDict({"one": inner}),
    "1": lambda inner: nn.ModuleList([nn.ReLU(), inner]),
}


def held_by(container, name):
    return container._modules[name]


def test_its_class_for_isinstance_is_the_models(graphed):
    assert isinstance(graphed, nn.Module) and isinstance(graphed, type(graphed.model))
    assert isinstance(graphed, piecewise.GraphedModule) and type(graphed) is piecewise.GraphedModule
    assert graphed.__class__ is type(graphed.model) and not isinstance(graphed, nn.Linear)
    assert not issubclass(piecewise.GraphedModule, nn.Module)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_holds_it_and_has_the_models_names(name, graphed):
    container = CONTAINERS[name](graphed)
    assert held_by(container, name) is graphed
    own = {"scale"} if name == "inner" else set()
    assert set(container.state_dict()) - own == {f"{name}.{key}" for key in NAMES}
    assert {id(each) for each in container.parameters()} >= {id(each) for each in graphed.model.parameters()}
    inside = [path for path, _ in container.named_modules() if path.startswith(f"{name}.")]
    assert inside == [f"{name}.{path}" for path, _ in graphed.model.named_modules() if path]
    assert "GraphedModule(Model, captured=" in repr(container)


@pytest.mark.parametrize("name", ["0", "inner"])
def test_a_call_of_the_container_replays(name, graphed):
    container = CONTAINERS[name](graphed)
    with torch.no_grad():
        assert_equal(container(tokens(5)), graphed.model(tokens(5)))
    assert graphed.stats.replays == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda each: each.to("cpu"),
        lambda each: each.cpu(),
        lambda each: each.float(),
        lambda each: each.eval(),
        lambda each: each.train(),
        lambda each: each.requires_grad_(False),
        lambda each: each.apply(lambda part: None),
        lambda each: each.type(torch.float32),
    ],
)
def test_what_returns_the_module_returns_the_graphed_one(change, graphed):
    assert change(graphed) is graphed
    container = nn.Sequential(graphed)
    assert change(container) is container and container[0] is graphed


def test_changes_of_the_container_reach_the_model(graphed):
    container = nn.Sequential(graphed)
    container.train()
    assert (
        graphed.model.training and graphed.training and all(each.training for each in graphed.model.modules())
    )
    container.eval().requires_grad_(False)
    assert not graphed.model.training and not any(each.requires_grad for each in graphed.model.parameters())
    seen = []
    container.apply(lambda part: seen.append(part))
    assert graphed.model in seen and graphed not in seen
    before = graphed.model.state_dict()
    container.load_state_dict({f"0.{name}": torch.full_like(value, 0.1) for name, value in before.items()})
    assert all((value == 0.1).all() for value in graphed.model.state_dict().values())
    with torch.no_grad():
        assert_equal(container(tokens(5)), graphed.model(tokens(5)))
    assert graphed.stats.replays == 1, "the weights were written in place"
    container.double()
    with torch.no_grad():
        assert_equal(container(tokens(5)), graphed.model(tokens(5)))
    assert graphed.stats.replays == 1 and graphed.stats.eager_calls == 1


def test_a_hook_is_the_models_and_runs(graphed):
    container, calls = nn.Sequential(graphed), []
    hook = container[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        container(tokens(5))
        assert calls == [1] and graphed.stats.eager_calls == 1
        hook.remove()
        container(tokens(5))
    assert calls == [1] and graphed.stats.replays == 1


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_the_container_has_a_model_of_its_own_and_no_graphs(copied, graphed):
    container = copied(nn.Sequential(graphed))
    again = container[0]
    assert type(again) is piecewise.GraphedModule and again.model is not graphed.model
    assert again.stats.captured == () and again.piecewise_config == graphed.piecewise_config
    assert again.capture(tokens(7)).ok
    with torch.no_grad():
        assert_equal(container(tokens(5)), graphed.model(tokens(5)))
    assert again.stats.replays == 1 and graphed.stats.replays == 0


def test_weights_are_saved_and_loaded_under_the_models_names(graphed):
    stream = io.BytesIO()
    torch.save(graphed.state_dict(), stream)
    stream.seek(0)
    other = new_model()
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert_equal(other.state_dict(), graphed.model.state_dict())


def test_a_model_that_holds_it_can_be_graphed_and_compiled(graphed):
    for outer in (Around(graphed), nn.Sequential(graphed)):
        with torch.no_grad():
            want = graphed.model(tokens(5))
            whole = piecewise.compile(outer, buckets=BUCKETS, progress=False)
            assert whole.capture(tokens(7)).ok
            assert_equal(whole(tokens(5)), want)
            assert whole.stats.replays == 1
            assert_equal(torch.compile(outer, backend="eager")(tokens(5)), want)
    assert graphed.stats.replays == 0, "the outer one's graphs have it inside"


def test_torch_compile_of_it_takes_the_model(graphed):
    with torch.no_grad():
        assert_equal(torch.compile(graphed, backend="eager")(tokens(5)), graphed.model(tokens(5)))
    assert graphed.stats.replays == graphed.stats.eager_calls == 0, "as the guide says"


def test_a_cache_is_attached_through_it():
    model = small_transformers.build("Llama")
    cache = small_transformers.make_cache(model)
    graphed = piecewise.compile(model, buckets=[16], progress=False)
    assert attach(graphed, cache) is graphed
    assert graphed.capture(torch.randint(3, 90, (1, 7)), position_ids=torch.arange(7)[None]).ok
    prompts = small_transformers.prompts_of([5])
    got = small_transformers.call(graphed, PrefillBatch.build(cache, ["a"], [5]), prompts)
    want = small_transformers.call(model, PrefillBatch.build(cache, ["b"], [5]), prompts)
    torch.testing.assert_close(got.logits, want.logits)
    assert graphed.stats.replays == 1 and detach(graphed) is graphed


@torch.no_grad()
def test_hooks_that_transformers_installs_at_a_first_call_are_named_with_the_way_out():
    model, cache = small_transformers.attached()
    graphed = piecewise.compile(model, buckets=[16], progress=False)

    def call(name):
        with PrefillBatch.build(cache, [name], [7]) as batch:
            ids = batch.pack([torch.arange(7)])
            return graphed(ids, position_ids=batch.positions, output_hidden_states=True)

    example = {"position_ids": torch.arange(7)[None], "output_hidden_states": True}
    with pytest.raises(piecewise.TraceError, match="call the model once like this, then capture"):
        graphed.capture(torch.arange(7)[None], **example)
    want = call("first").hidden_states
    assert graphed.capture(torch.arange(7)[None], **example).ok
    for got, each in zip(call("second").hidden_states, want, strict=True):
        assert_equal(got, each)
    assert graphed.stats.replays == 1
