"""[I4]: what moves is noticed before anything persistent is written; what is updated in place just works."""

from __future__ import annotations

import gc
import json
import math
import weakref

import pytest
import torch
from inspection import inspect
from state_models import (
    CACHE_ROWS,
    HIDDEN,
    VOCAB,
    Model,
    attend,
    before_each_attend,
    calls,
    graph,
    new_model,
    serve,
    tokens,
)
from torch import nn

import piecewise
from piecewise.errors.capture import ModelDiffers
from piecewise.errors.trace import StoresState


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


def set_data_to_its_negative(model):
    """The same memory, negated where it is read."""
    model.projection.weight.data = torch._neg_view(model.projection.weight.data)


MOVES = [
    rebind,
    set_data_to_its_negative,
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
    assert words in graphed.check_addresses().seen_by_calls[0]
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
    report = graphed.check_addresses()
    assert report.seen_by_calls == ("model.projection.weight was bound to another tensor",)
    serve(graphed, tokens(5))
    assert "model.projection.weight was bound to another tensor" in str(graphed.report())
    graphed.refresh()
    assert graphed.check_addresses().ok


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


def test_I4_two_pools_never_exist_at_once(model, monkeypatch):
    graphed = graph(model)
    pools = [inspect(graphed).pool]
    live = []
    make = inspect(graphed).engine.new_pool

    def new_pool(device):
        live.append([pool.allocated_bytes for pool in pools])
        pools.append(make(device))
        return pools[-1]

    monkeypatch.setattr(inspect(graphed).engine, "new_pool", new_pool)
    graphed.refresh()
    rebind(model)
    serve(graphed, tokens(5))
    graphed.refresh()
    assert live == [[0], [0, 0]], "each pool was empty before the next was made"
    assert pools[-1].allocated_bytes > 0


def halved(x):
    return x / 2


FACTOR = [2.0]


@torch._dynamo.assume_constant_result
def assumed():
    return FACTOR[0]


class Answers:
    """Its attribute is read by code that Dynamo is told not to look into."""

    def __init__(self):
        self.factor = 2.0

    @torch._dynamo.assume_constant_result
    def answer(self):
        return self.factor


ANSWERS = Answers()
# Only a new trace sees these: Dynamo was told that they never change.
UNSEEN = {
    "function": (lambda m, x: x * assumed(), lambda patch: patch.setitem(globals(), "FACTOR", [3.0]), "mul"),
    "method": (lambda m, x: x + ANSWERS.answer(), lambda patch: patch.setattr(ANSWERS, "factor", 3.0), "add"),
}


def test_I10_torch_and_python_patched_are_noticed(monkeypatch):
    model = new_model(before=lambda m, x: nn.functional.silu(x) * math.pi)
    graphed = graph(model, buckets=(8,))
    for owner, name, value in ((nn.functional, "silu", halved), (math, "pi", 3.0)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            (told,) = graphed.check_addresses().seen_by_calls
            assert name in told
            assert serve(graphed, tokens(5)) == "module_state_changed"
        assert serve(graphed, tokens(5)) == "replay"


@pytest.mark.parametrize("what", UNSEEN)
def test_I10_a_change_that_no_call_finds_is_found_by_check_addresses(what, monkeypatch):
    before, change, op = UNSEEN[what]
    model = new_model(before=before)
    graphed = graph(model, buckets=(8,))
    report = graphed.check_addresses()
    assert report.ok and report.num_places > 10 and "nothing differs" in str(report)
    report.require()
    change(monkeypatch)
    report = graphed.check_addresses()
    assert not report.ok and not report.seen_by_calls
    (told,) = report.unseen_by_calls
    assert op in told and "test_addresses.py" in told
    with pytest.raises(ModelDiffers, match=r"(?s)found by no call: .*Rule:.*Fix:.*refresh"):
        report.require()
    assert report.asdict()["ok"] is False and told in json.loads(report.to_json())["unseen_by_calls"]
    graphed.refresh()
    assert graphed.check_addresses().ok and serve(graphed, tokens(5)) == "replay"


def test_I8_check_addresses_changes_and_counts_nothing(model):
    graphed = graph(model)
    pool, calls.count = inspect(graphed).pool, 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert graphed.check_addresses().ok
    assert calls.count == 0 and inspect(graphed).pool is pool and graphed.stats.captured == (4, 8, 16)
    assert graphed.stats.replays == graphed.stats.eager_calls == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert serve(graphed, tokens(5)) == "replay"


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_I4_check_addresses_tells_what_the_next_call_would_find(model, move):
    graphed = graph(model)
    with torch.no_grad():
        move(model)
    report = graphed.check_addresses()
    assert len(report.seen_by_calls) == 1 and not report.unseen_by_calls
    assert serve(graphed, tokens(5)) == "moved_address"


def test_a_model_that_cannot_be_traced_any_more_is_told(model, monkeypatch):
    model.before = lambda model, x: x * assumed() if assumed() == 2.0 else x * x.sum().tolist()
    graphed = graph(model, buckets=(8,))
    monkeypatch.setitem(globals(), "FACTOR", [3.0])
    (told,) = graphed.check_addresses().unseen_by_calls
    assert "cannot be traced any more" in told


@pytest.mark.parametrize("when", ["suspended", "inside a call"])
def test_check_addresses_at_a_wrong_time_is_an_error(model, when):
    graphed = graph(model)
    if when == "suspended":
        graphed.suspend()
        with pytest.raises(piecewise.StateError, match=r"check_addresses\(\) while suspended"):
            graphed.check_addresses()
        return
    errors = []

    def inside():
        try:
            graphed.check_addresses()
        except piecewise.StateError as error:
            errors.append(str(error))

    with torch.no_grad(), before_each_attend(inside):
        graphed(tokens(5))
    assert len(errors) == 1 and "check_addresses() inside a call" in errors[0]


def free_the_storage(model):
    model.projection.weight.untyped_storage().resize_(0)


def test_I4_storage_freed_under_a_weight_is_noticed_before_a_replay_reads_it(model):
    graphed = graph(model)
    values, storage = model.projection.weight.detach().clone(), model.projection.weight.untyped_storage()
    size = storage.nbytes()
    free_the_storage(model)
    assert graphed.check_addresses().seen_by_calls
    storage.resize_(size)
    model.projection.weight.data.copy_(values)
    assert serve(graphed, tokens(5)) in ("replay", "moved_address")


class Adapter(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.down, self.up = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)
        self.scale = scale

    def forward(self, x):
        return self.up(self.down(x)) * self.scale


@pytest.mark.parametrize("how", ["module", "weights", "in place"])
def test_I4_an_adapter_swapped_by_assignment(how):
    model = new_model(before=lambda model, x: x + model.adapter(x))
    model.adapter = Adapter(2.0).eval()
    graphed = graph(model)
    other = Adapter(2.0).eval()
    if how == "module":
        model.adapter = other
    elif how == "weights":
        model.adapter.down.weight, model.adapter.up.weight = other.down.weight, other.up.weight
    else:
        with torch.no_grad():
            model.adapter.down.weight.copy_(other.down.weight)
            model.adapter.up.weight.copy_(other.up.weight)
    wanted = {"module": ("module_state_changed", "moved_address"), "weights": ("moved_address",)}
    assert serve(graphed, tokens(5)) in wanted.get(how, ("replay",))
    graphed.refresh()
    assert serve(graphed, tokens(5)) == "replay"


def test_I4_a_buffer_reassigned_in_forward_is_refused_with_what_to_write_instead():
    def before(model, x):
        model.scale = model.scale * 2
        return x * model.scale

    graphed = graph(new_model(before=before), captured=False)
    with pytest.raises(StoresState, match=r"(?s)changes scale.*Rule:.*Fix:.*in place"):
        graphed.capture(tokens(7))
    assert graphed.model.scale.eq(1).all()


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_I9_refresh_after_a_move_never_holds_two_pools(model, move, monkeypatch):
    graphed = graph(model)
    old = inspect(graphed).pool
    with torch.no_grad():
        move(model)
    make, held = inspect(graphed).engine.new_pool, []

    def new_pool(device):
        held.append(old.allocated_bytes)
        return make(device)

    monkeypatch.setattr(inspect(graphed).engine, "new_pool", new_pool)
    graphed.refresh()
    assert held == [0] and inspect(graphed).pool is not old


@pytest.mark.parametrize("change", ["weight", "training"])
def test_I4_a_change_is_found_before_random_numbers_are_drawn(change):
    """Drawn by the replay that is given up, they would be missing in the eager call."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.cache = torch.zeros(CACHE_ROWS, HIDDEN)

        def forward(self, ids):
            x = self.embedding(ids) * (2 if self.training else 1)
            x = self.linear(x + torch.rand(x.shape[0], 1))
            attend(x, x, x, out := torch.empty_like(x), self.cache)
            return out

    model = Noisy().eval()
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    ids = torch.arange(5)
    with torch.no_grad():
        graphed.capture(ids)
        if change == "weight":
            model.linear.weight = nn.Parameter(model.linear.weight + 1)
        else:
            model.train()
        torch.manual_seed(3)
        want, state = model(ids), torch.get_rng_state()
        torch.manual_seed(3)
        assert torch.equal(graphed(ids), want)
    assert torch.equal(torch.get_rng_state(), state) and graphed.stats.eager_calls == 1
