"""[I4]: what moves is noticed before anything persistent is written; what is updated in place just works."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from state_models import HIDDEN, Model, calls, graph, new_model, serve, tokens
from torch import nn


@pytest.fixture
def model():
    return new_model()


def rebind(model):
    model.projection.weight = nn.Parameter(model.projection.weight.detach() * 2)


def rebind_through_the_table(model):
    model.projection._parameters["weight"] = nn.Parameter(model.projection.weight.detach() * 2)


def swap(model):
    torch.utils.swap_tensors(model.projection.weight, nn.Parameter(model.projection.weight.detach() * 2))


def set_data(model):
    model.projection.weight.data = model.projection.weight.detach() * 2


def set_data_to_a_transpose(model):
    weight = model.block.o.weight
    weight.data = weight.data.t()  # the same address, read in another order


def set_data_to_a_reinterpretation(model):
    model.scale.data = model.scale.data.flip(0).mul(2)


def load_by_assignment(model):
    state = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def change_dtype(model):
    model.to(torch.float64)
    model.block.cache = model.block.cache.double()


def assign_buffer(model):
    model.scale = model.scale * 3


def replace_module(model):
    model.projection = nn.Linear(HIDDEN, model.projection.out_features)


def delete_bias(model):
    model.projection.bias = None


def replace_parameters_as_a_whole(model):
    weights = model.projection._parameters
    model.projection._parameters = {name: nn.Parameter(w.detach() * 2) for name, w in weights.items()}


def replace_attributes_as_a_whole(model):
    names = dict(model.projection.__dict__)
    names["_parameters"] = {
        name: nn.Parameter(weight.detach() * 2) for name, weight in model.projection._parameters.items()
    }
    model.projection.__dict__ = names


MOVES = [
    rebind,
    rebind_through_the_table,
    swap,
    set_data,
    set_data_to_a_transpose,
    set_data_to_a_reinterpretation,
    load_by_assignment,
    change_dtype,
    assign_buffer,
    delete_bias,
]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_I4_a_moved_weight_is_noticed_and_refresh_captures_again(model, move):
    graphed = graph(model)
    assert serve(graphed, tokens(5)) == "replay"
    with torch.no_grad():
        move(model)
    assert serve(graphed, tokens(5)) == "moved_address"
    assert serve(graphed, tokens(12)) == "moved_address", "the other buckets read it too"
    assert graphed.stats.captured == ()
    assert graphed.refresh().captured == (4, 8, 16)
    assert serve(graphed, tokens(5)) == "replay"
    assert graphed.stats.captured == (4, 8, 16)


@pytest.mark.parametrize(
    "move", [rebind, set_data, assign_buffer, change_dtype], ids=lambda move: move.__name__
)
def test_I4_capture_after_a_move_traces_again(model, move):
    graphed = graph(model)
    with torch.no_grad():
        move(model)
    assert graphed.capture(tokens(6)).captured == (4, 8, 16)
    assert serve(graphed, tokens(5)) == "replay"
    assert len(graphed.report().plans) == 1


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (replace_parameters_as_a_whole, "model.projection._parameters was"),
        (replace_attributes_as_a_whole, "the attributes of model.projection were replaced as a whole"),
    ],
    ids=["parameters", "attributes"],
)
def test_I4_a_dict_of_weights_replaced_as_a_whole_is_noticed(model, replace, words):
    graphed = graph(model)
    assert serve(graphed, tokens(5)) == "replay"
    replace(model)
    assert words in graphed.check_addresses()
    assert serve(graphed, tokens(5)) == "module_state_changed"
    assert graphed.refresh().captured == (4, 8, 16)
    assert serve(graphed, tokens(5)) == "replay"


def test_I4_a_model_that_notes_something_on_each_call_replays(model):
    graphed = graph(model)
    for _ in range(40):
        model.block.note = object()
        with torch.no_grad():
            graphed(tokens(5))
    assert graphed.stats.replays == 40
    rebind(model)
    model.block.note = object()
    assert serve(graphed, tokens(5)) == "moved_address"


def test_I4_a_move_names_what_moved(model):
    graphed = graph(model)
    rebind(model)
    assert graphed.check_addresses() == "model.projection.weight was bound to another tensor"
    serve(graphed, tokens(5))
    assert "model.projection.weight was bound to another tensor" in str(graphed.report())
    graphed.refresh()
    assert graphed.check_addresses() is None


def double_in_place(model):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.copy_(tensor * 2)


def load_in_place(model):
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize("update", [double_in_place, load_in_place], ids=lambda update: update.__name__)
def test_I4_updates_in_place_replay_at_once_with_the_new_values(model, update):
    graphed = graph(model)
    with torch.no_grad():
        before = graphed(tokens(5))
        update(model)
        assert not torch.equal(graphed(tokens(5)), before)
    assert serve(graphed, tokens(5)) == "replay"


def test_I4_an_optimizer_step_is_an_update_in_place(model):
    graphed = graph(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(tokens(5)).sum().backward()
    optimizer.step()
    assert serve(graphed, tokens(5)) == "replay"


def test_I4_a_kv_pool_is_looked_up_at_each_call(model):
    graphed = graph(model)
    first = model.block.cache
    for _ in range(2):
        model.block.cache = torch.full_like(model.block.cache, 7.0)
        assert serve(graphed, tokens(5)) == "replay"
    assert not first.any(), "the pool of the capture is not written any more"
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None, "nothing holds a pool that was replaced"


def test_I4_a_kv_pool_of_another_size_or_dtype_is_noticed(model):
    graphed = graph(model)
    model.block.cache = torch.zeros(32, HIDDEN)
    assert serve(graphed, tokens(5)) == "module_state_changed", "the trace may hold its size as a constant"
    model.block.cache = torch.zeros(64, HIDDEN, dtype=torch.float64)
    assert serve(graphed, tokens(5)) == "module_state_changed"
    model.block.cache = torch.zeros(64, HIDDEN)
    assert serve(graphed, tokens(5)) == "replay"


def test_I4_a_kv_pool_that_is_gone_is_eagers_error(model):
    graphed = graph(model)
    del model.block.cache
    with torch.no_grad(), pytest.raises(AttributeError, match="cache"):
        graphed(tokens(5))
    assert graphed.stats.reasons["module_state_changed"] == 1


class Pools(nn.Module):
    """Pools in a list that is shared by all layers, as a serving engine binds them."""

    def __init__(self):
        super().__init__()
        self.inner = Model()
        self.pools = [torch.zeros(64, HIDDEN)]

    def forward(self, ids):
        x = self.inner.embedding(ids)
        out = torch.empty_like(x)
        torch.ops.state_models.attend(x, x, x, out, self.pools[0])
        return self.inner.projection(out)


def test_I4_a_pool_in_a_list_is_looked_up_and_a_list_replaced_is_noticed():
    torch.manual_seed(0)
    model = Pools().eval()
    graphed = graph(model)
    with torch.no_grad():
        model.pools[0] = torch.zeros(64, HIDDEN)
        graphed(tokens(5))
        assert model.pools[0].any()
        model.pools = [torch.zeros(64, HIDDEN)]
        graphed(tokens(5))
        assert model.pools[0].any(), "written by the eager call"
    assert graphed.stats.reasons == {"module_state_changed": 1}
    graphed.refresh()
    assert serve(graphed, tokens(5)) == "replay"


@pytest.mark.parametrize("move", [rebind, assign_buffer, set_data], ids=lambda move: move.__name__)
def test_I4_nothing_persistent_is_written_before_a_move_is_noticed(model, move):
    graphed = graph(model)
    with torch.no_grad():
        move(model)
        calls.count = 0
        model.block.cache.fill_(3.0)
        seen = []

        def forward(ids):
            seen.append((calls.count, model.block.cache.clone()))
            return model(ids)

        graphed._forward = forward
        graphed(tokens(5))
    ((count, cache),) = seen
    assert count == 0 and bool((cache == 3.0).all()), "the eager call finds the state as it was"


class Counting(nn.Module):
    """The first graph segment writes a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = Model()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, ids):
        self.steps.add_(1)
        return self.inner(ids) + self.steps


def test_I4_a_segment_that_writes_state_runs_after_the_check():
    torch.manual_seed(0)
    model = Counting().eval()
    graphed = graph(model)
    assert model.steps.item() == 0
    with torch.no_grad():
        graphed(tokens(5))
        assert model.steps.item() == 1 and graphed.stats.replays == 1
        rebind(model.inner)
        graphed(tokens(5))
        assert model.steps.item() == 2, "counted once, by the eager call"
    assert graphed.stats.reasons == {"moved_address": 1}


def test_I4_an_attribute_derived_from_a_weight_is_a_tensor_of_the_model():
    def before(model, x):
        return x @ model.turned

    model = new_model(before=before)
    model.turned = model.block.o.weight.detach().t().contiguous()
    graphed = graph(model)
    assert serve(graphed, tokens(5)) == "replay"
    model.turned.mul_(2)
    assert serve(graphed, tokens(5)) == "replay"
    model.turned = model.turned * 2
    assert serve(graphed, tokens(5)) == "moved_address"


def storages(model):
    """Weak references to the storages: a graph may hold memory through another tensor object."""
    return [torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in model.parameters()]


@pytest.mark.parametrize("then", ["call", "refresh", "capture"])
def test_I4_old_weights_are_not_held_after_a_move(model, then):
    graphed = graph(model)
    with torch.no_grad():
        graphed(tokens(5))
        old = storages(model)
        load_by_assignment(model)
        if then == "call":
            graphed(tokens(5))
        elif then == "refresh":
            graphed.refresh()
        else:
            graphed.capture(tokens(5))
    gc.collect()
    assert all(storage.expired() for storage in old)


def test_I4_two_pools_never_exist_at_once(model):
    graphed = graph(model)
    pools = [graphed._graphs.pool]
    live = []
    make = graphed._graphs.engine.new_pool

    def new_pool(device):
        live.append([pool.allocated_bytes for pool in pools])
        pools.append(make(device))
        return pools[-1]

    graphed._graphs.engine.new_pool = new_pool
    graphed.refresh()
    rebind(model)
    serve(graphed, tokens(5))
    graphed.refresh()
    assert live == [[0], [0, 0]], "each pool was empty before the next was made"
    assert pools[-1].allocated_bytes > 0
