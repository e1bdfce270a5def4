"""A trace in which one layer's graph serves the others is the trace of all of them, and holds as long."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import types

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from inspection import inspect
from torch import nn
from toy_models import CACHE_ROWS, HIDDEN, VOCAB, make_ids, mix

import piecewise
from piecewise.analysis.normalize import normalize
from piecewise.analysis.same_program import Program
from piecewise.analysis.token_dim import find_token_symbol
from piecewise.calls.binder import CallBinder
from piecewise.ir.effects import find_facts
from piecewise.trace.dynamo import front_end
from piecewise.trace.layers import layer_run
from piecewise.trace.trace import ExampleCall
from runners.errors import TraceError

NUM_LAYERS = 4
EXAMPLES = int(os.environ.get("LAYER_EXAMPLES", "15"))


class Layer(nn.Module):
    """norm · qkv · mix · output projection; `how` is called with the layer and its input."""

    def __init__(self, number, how):
        super().__init__()
        self.norm, self.qkv, self.o = (
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN),
        )  # fmt: skip
        self.cache = torch.zeros(CACHE_ROWS, HIDDEN)
        self.number, self.how, self.scale, self.notes = number, how, 1.0, {}

    def forward(self, x, *rest, **options):
        y = self.norm(x)
        if self.how is not None:
            y = self.how(self, y, *rest, **options)
        q, k, v = self.qkv(y).chunk(3, dim=-1)
        out = torch.empty_like(q)
        mix(q, k, v, out, self.cache)
        return x + self.o(out)


class Wrapped(Layer):
    """Returns what its siblings do in a tuple, as transformers once did."""

    def forward(self, x, *rest, **options):
        return super().forward(x, *rest, **options), None


class Doubles(Layer):
    """Returns another dtype than it is given."""

    def forward(self, x, *rest, **options):
        return super().forward(x, *rest, **options).double()


class Shared:
    """An object of the model that is no module."""

    def __init__(self):
        self.factor = 1.0


class Stack(nn.Module):
    """Embedding · layers, each called by `call(model, layer, x)` · projection."""

    def __init__(self, how=None, *, call=None, kind=Layer):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(kind(number, how) for number in range(NUM_LAYERS))
        self.projection = nn.Linear(HIDDEN, VOCAB)
        self.call, self.shared = call, Shared()
        for layer in self.layers:
            layer.shared = self.shared

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(self, layer, x)
        return self.projection(x)


def new_stack(*args, **kwargs):
    torch.manual_seed(3)
    return Stack(*args, **kwargs).eval()


def traced(model, num_tokens=6, **options):
    example = ExampleCall.from_call(CallBinder(model.forward), (make_ids(num_tokens),), {})
    return front_end.trace_with_dynamo(model, example, forward=model, **options)


@contextlib.contextmanager
def whole_traces(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(layer_run, "repeated_layers", lambda model: [])
        yield


def compared(model, monkeypatch, num_tokens=6):
    """The trace in layers, normalized; it must agree with that of all at once."""
    both = []
    for is_whole in (False, True):
        with whole_traces(monkeypatch) if is_whole else contextlib.nullcontext():
            found = traced(model, num_tokens)
        normalize(found.graph, shape_env=found.shape_env)
        facts = find_facts(found.graph.graph, enabled=None)
        both.append((found, facts, find_token_symbol(found, facts)))
    (parts, facts, token), (whole, whole_facts, whole_token) = both
    assert whole.layers is None
    earlier = Program(whole, whole_facts, symbol=whole_token.symbol, num_tokens=num_tokens)
    difference = earlier.difference(Program(parts, facts, symbol=token.symbol, num_tokens=num_tokens))
    assert difference is None, difference
    assert state_of(parts) == state_of(whole)
    assert guards_of(parts, token) == guards_of(whole, whole_token)
    # An object that layers share is one to a run over all of them, whatever leads to it.
    known, seen = facts_of(parts), facts_of(whole)
    assert known.keys() >= seen.keys(), {path for place, path in seen.items() if place not in known}
    more = {path for place, path in known.items() if place not in seen}
    # Nor is torch's own code, of which a run over all says once what a run over each part says again.
    assert all(path.endswith(".shared") or re.match(r"(the code of )?torch\.", path) for path in more), more
    return parts


def state_of(found):
    return {place.state.path for place in found.placeholders if place.state is not None}


def guards_of(found, token):
    """Counts up to 40 for which the trace holds."""
    guards = piecewise.torch_api.guard_expressions(found.shape_env)
    return [all(bool(guard.xreplace({token.symbol: n})) for guard in guards) for n in range(2, 40)]


def facts_of(found):
    """Each place that is compared, with its path: Dynamo reaches some of them by several."""
    facts, places = found.state_facts, {}
    for ref, _ in facts.values:
        owner = ref.path if isinstance(ref.owner, types.MappingProxyType) else id(ref.owner)
        places[owner, ref.key] = ref.path
    places |= {id(table): path for table, _, path in facts.tables}
    # How Dynamo finds what nn.Module itself has.
    return {place: path for place, path in places.items() if "__mro__" not in path}


def branches(layer, y):
    return y * 2 if y.shape[0] > 8 else y + 1


def by_scale(layer, y):
    return y * layer.scale


def by_number(layer, y):
    return y * (layer.number + 1)


def by_size(layer, y):
    return y.reshape(y.shape[0], 2, -1).flatten(1) * (y.shape[0] // y.shape[0])


def with_rows(layer, y, rows, *, factor):
    return y + rows * factor


def passes_more(model, layer, x):
    return layer(x, x * 2, factor=0.5)


def writes_rows(layer, y, rows):
    rows[:, :1].add_(1)
    return y + rows


def passes_its_own_rows(model, layer, x):
    return layer(x, x.view(x.shape) if layer.number % 2 == 0 else x.clone()) + x


def doubles_one(layer, y, a, b):
    return y * 2 if a is b else y + b


def writes_through_a_view(model, layer, x):
    x = layer(x)
    x[:, :1].add_(1)
    return x * 2


@pytest.mark.parametrize(
    ("how", "call", "kind", "num_traced"),
    [
        (None, None, Layer, 1),
        (branches, None, Layer, 1),
        (by_scale, None, Layer, 1),
        (by_size, None, Layer, 1),
        (by_number, None, Layer, NUM_LAYERS),
        (with_rows, passes_more, Layer, 1),
        (writes_rows, passes_its_own_rows, Layer, 1),
        (None, writes_through_a_view, Layer, 1),
        (None, lambda model, layer, x: layer(x) if layer.number % 2 else layer(x[:, :]).clone(), Layer, 1),
        (doubles_one, lambda model, layer, x: layer(x, x, x if layer.number else x.clone()), Layer, 2),
        (doubles_one, lambda model, layer, x: layer(x, x, x.add_(1) if layer.number else x), Layer, 1),
    ],
    ids=[
        "plain",
        "branch on rows",
        "constant",
        "sizes",
        "own constant",
        "arguments",
        "memory of arguments",
        "view of a result",
        "around",
        "one argument or two",
        "one argument through an op in place",
    ],
)
def test_it_is_the_trace_of_all_layers(how, call, kind, num_traced, monkeypatch):
    found = compared(new_stack(how, call=call, kind=kind), monkeypatch)
    assert (found.layers.num_calls, found.layers.num_traced) == (NUM_LAYERS, num_traced), found.layers


@pytest.mark.parametrize(
    ("change", "num_traced"),
    [
        (lambda layer: setattr(layer, "scale", 3.0), 2),
        (lambda layer: setattr(layer, "o", nn.Linear(HIDDEN, HIDDEN, bias=False)), 2),
        (lambda layer: setattr(layer, "norm", nn.RMSNorm(HIDDEN)), 2),
        (lambda layer: layer.o.register_forward_hook(lambda module, args, result: result * 2), 2),
        (lambda layer: layer.register_forward_hook(lambda module, args, result: result * 2), 1),
        (lambda layer: setattr(layer, "cache", torch.zeros(CACHE_ROWS + 1, HIDDEN)), 2),
        (lambda layer: setattr(layer, "how", lambda layer, y: y - 1), 2),
        (lambda layer: layer.o.requires_grad_(False), 2),
        (lambda layer: setattr(layer.o, "weight", nn.Parameter(layer.qkv.weight[:HIDDEN].detach())), 1),
    ],
    ids=["constant", "no bias", "class", "hook inside", "hook", "pool", "function", "flag", "shared memory"],
)
def test_a_layer_that_differs_is_traced_for_itself(change, num_traced, monkeypatch):
    model = new_stack(by_scale)
    change(model.layers[2])
    assert compared(model, monkeypatch).layers.num_traced == num_traced


def test_weights_tied_between_layers_and_within_one(monkeypatch):
    model = new_stack()
    model.layers[1].o.weight = model.layers[0].o.weight
    assert compared(model, monkeypatch).layers.num_traced == 1
    model.layers[2].o.bias = model.layers[2].norm.bias
    found = compared(model, monkeypatch)
    assert found.layers.num_traced == 2
    model.layers[3].o.bias = model.layers[3].norm.bias
    assert compared(model, monkeypatch).layers.num_traced == 2
    assert len(state_of(found)) == 1 + NUM_LAYERS * 7 - 2 + 2


def in_autocast(model, layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


def sets_factor(model, layer, x):
    model.shared.factor = float(layer.number)
    try:
        return layer(x)
    finally:
        model.shared.factor = 1.0


def by_factor(layer, y):
    return y * layer.shared.factor


def into_the_list(layer, y, seen):
    seen.append(y)
    return y


def passes_a_list(model, layer, x):
    seen = []
    x = layer(x, seen)
    return x + seen[0]


def kept_rows(layer, y):
    return y + y[torch.nonzero(y[:, 0] > 0)[:, 0]].sum()


@pytest.mark.parametrize(
    ("how", "call", "reason"),
    [
        (None, in_autocast, "may surround layers"),
        (by_factor, sets_factor, "which forward writes"),
        (into_the_list, passes_a_list, "propagate outside the compiled region"),
        (None, lambda model, layer, x: layer(x, [x]) + x, "a layer is given a immutable_list"),
        (kept_rows, None, "is of a kind that is not copied"),
        (None, lambda model, layer, x: layer(x).t().contiguous().t(), "the same"),
    ],
    ids=["autocast", "state that is put back", "list", "idle list", "sizes that data tell", "strides"],
)
def test_what_is_out_of_the_ordinary_is_traced_at_once(how, call, reason, monkeypatch):
    found = compared(new_stack(how, call=call), monkeypatch)
    if reason == "the same":  # other strides are another call, not another model
        assert not found.layers.reason
    else:
        assert reason in found.layers.reason and found.layers.num_traced == NUM_LAYERS


class ReturnsItsInput(Layer):
    def forward(self, x, *rest, **options):
        x.add_(super().forward(x, *rest, **options))
        return x


class InOrder(Layer):
    def forward(self, x, **options):
        for name, value in options.items():
            x = x * value if name == "a" else x + value
        return super().forward(x)


def zero_of(layer, y):
    return y * torch.copysign(torch.ones_like(y), torch.full_like(y, layer.scale))


def negative_zero(model):
    for layer in model.layers:
        layer.scale = -0.0 if layer.number == 2 else 0.0


def marks(model, layer, x):
    x.tag = 3.0
    return layer(x)


def by_extra(layer, y):
    return y * layer.__dict__.get("extra", 3.0)


def one_extra(model):
    model.layers[2].extra = 1.0


def tables(model):
    """A table for each layer; that of one is the model's, and another's is its second one, too."""
    model.table = torch.ones(HIDDEN)
    for layer in model.layers:
        layer.table, layer.second, layer.third = (torch.ones(HIDDEN) for _ in range(3))
    model.layers[2].table, model.layers[1].third = model.table, model.layers[1].second


def marked_table(model):
    model.register_buffer("table", torch.ones(HIDDEN))
    model.table.tag = 3.0


CALLS_SEEN_WHOLE = {
    "tuple": dict(kind=Wrapped, call=lambda model, layer, x: layer(x)[0] + x),
    "input returned": dict(
        kind=ReturnsItsInput, call=lambda model, layer, x: (lambda y: y * 2 if y is x else y)(layer(x))
    ),
    "order of keywords": dict(kind=InOrder, call=lambda model, layer, x: layer(x, b=1.0, a=2.0)),
    "negative zero": dict(how=zero_of, change=negative_zero),
    "zero as argument": dict(
        how=lambda layer, y, zero: y * torch.copysign(torch.ones_like(y), torch.full_like(y, zero)),
        call=lambda model, layer, x: layer(x, -0.0 if layer.number == 2 else 0.0),
    ),
    "attribute of an activation": dict(
        how=lambda layer, y, x: y * getattr(x, "tag", 1.0),
        call=lambda model, layer, x: (setattr(x, "tag", 3.0), layer(x, x))[1],
    ),
    "attribute of a buffer": dict(
        how=lambda layer, y, table: y * getattr(table, "tag", 1.0),
        call=lambda model, layer, x: layer(x, model.table), change=marked_table,
    ),
    "a tensor that a layer holds": dict(
        how=lambda layer, y, table: y * (2.0 if table is layer.table else 1.0),
        call=lambda model, layer, x: layer(x, model.table), change=tables,
    ),
    "a tensor that a layer holds, through an op in place": dict(
        how=lambda layer, y, table: y * (2.0 if table is layer.table else 1.0),
        call=lambda model, layer, x: layer(x, model.table.mul_(1)), change=tables,
    ),
    "two tensors of a layer that are one": dict(
        how=lambda layer, y: y * (2.0 if layer.second is layer.third else 1.0), change=tables,
    ),
    "names of attributes": dict(how=by_extra, change=one_extra),
    "a parameter as argument": dict(
        how=lambda layer, y, weight: y * (2.0 if isinstance(weight, nn.Parameter) else 1.0),
        call=lambda model, layer, x: layer(x, model.weight),
        change=lambda model: setattr(model, "weight", nn.Parameter(torch.ones(2), requires_grad=False)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CALLS_SEEN_WHOLE))
def test_what_a_layer_alone_would_not_show_gives_eagers_result(name):
    options = dict(CALLS_SEEN_WHOLE[name])
    change = options.pop("change", lambda model: None)
    model = new_stack(**options)
    change(model)
    graphed = piecewise.compile(model, buckets=(4, 8), progress=False)
    with torch.no_grad():
        assert graphed.capture(make_ids(6)).ok
        for num_tokens in (5, 8):
            torch.testing.assert_close(graphed(make_ids(num_tokens)), model(make_ids(num_tokens)))
    assert graphed.stats.replays == 2


def test_a_size_that_may_be_one_for_a_layer_is_a_condition():
    def short(model, layer, x):
        return torch.cat([x[:4], layer(x[4:])])

    model = new_stack(lambda layer, y: y * 2 if y.shape[0] == 1 else y, call=short)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    with torch.no_grad():
        graphed.capture(make_ids(6))
        for num_tokens in (5, 6, 7):
            torch.testing.assert_close(graphed(make_ids(num_tokens)), model(make_ids(num_tokens)))


def scaled_by(settings):
    def decorate(forward):
        def scaled(self, x):
            return forward(self, x * settings["scale"])

        return scaled

    return decorate


@pytest.mark.parametrize("what", ["default", "closure", "attribute"])
def test_what_the_forward_of_a_layer_holds_is_compared(what):
    settings = {"scale": 2.0}

    class Scaled(Layer):
        @scaled_by(settings)
        def forward(self, x, factor=2.0):
            return super().forward(x) * factor

    class Default(Layer):
        def forward(self, x, factor=2.0):
            return super().forward(x) * factor

    kind = {"default": Default, "closure": Scaled, "attribute": Layer}[what]
    model = new_stack(
        kind=kind, call=(lambda m, layer, x: layer(x) * layer.forward_scale) if what == "attribute" else None
    )
    for layer in model.layers:
        layer.forward_scale = 1.0
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    with torch.no_grad():
        assert graphed.capture(make_ids(6)).ok
        assert inspect(graphed).layers.num_traced == 1
        graphed(make_ids(5))
        if what == "default":
            Default.forward.__defaults__ = (3.0,)
        elif what == "closure":
            settings["scale"] = 3.0
        else:
            model.layers[1].forward_scale = 3.0
        torch.testing.assert_close(graphed(make_ids(5)), model(make_ids(5)))
    assert graphed.stats.reasons == {"module_state_changed": 1}


def test_layers_that_return_another_kind_of_tensor_are_traced_at_once(monkeypatch):
    found = compared(new_stack(call=lambda model, layer, x: layer(x).float(), kind=Doubles), monkeypatch)
    assert "another kind of tensor" in found.layers.reason


def test_state_that_is_written_and_not_read_by_layers_does_not_matter(monkeypatch):
    assert compared(new_stack(call=sets_factor), monkeypatch).layers.num_traced == 1


def test_a_graph_served_is_checked_like_any_other():
    model = new_stack(by_scale)
    graphed = piecewise.compile(model, buckets=(4, 8), progress=False)
    with torch.no_grad():
        assert graphed.capture(make_ids(6)).ok
        assert torch.equal(graphed(make_ids(5)), model(make_ids(5)))
        assert graphed.stats.replays == 1
        model.layers[3].scale = 5.0
        assert torch.equal(graphed(make_ids(5)), model(make_ids(5)))
        assert graphed.stats.reasons == {"module_state_changed": 1}
        model.layers[3].scale = 1.0
        model.layers[2].o.weight = nn.Parameter(model.layers[2].o.weight + 1)
        assert torch.equal(graphed(make_ids(5)), model(make_ids(5)))
        assert graphed.stats.reasons == {"module_state_changed": 1, "moved_address": 1}


def test_nothing_is_left_in_the_layers_whatever_happens():
    def broken(layer, y):
        torch._dynamo.graph_break()
        return y

    model = new_stack(broken)
    with pytest.raises(TraceError):
        traced(model)
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_forward_stores_in_a_layer_is_the_same_error():
    def notes(layer, y):
        layer.notes["rows"] = y
        return y

    with pytest.raises(TraceError, match="outside its return value|changes"):
        traced(new_stack(notes))


def test_another_thread_runs_the_model_while_it_is_traced(monkeypatch):
    model, found = new_stack(), {}
    with torch.no_grad():
        expected = model(make_ids(5))

    def call():
        with torch.no_grad():
            found["result"] = model(make_ids(5))

    run_dynamo = front_end.run_dynamo

    def meanwhile(*args, **kwargs):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return run_dynamo(*args, **kwargs)

    monkeypatch.setattr(front_end, "run_dynamo", meanwhile)
    assert traced(model).layers.num_traced == 1
    assert torch.equal(found["result"], expected)


CHANGES = {
    "none": lambda model, layer: None,
    "scale": lambda model, layer: setattr(layer, "scale", 3.0),
    "no bias": lambda model, layer: setattr(layer, "o", nn.Linear(HIDDEN, HIDDEN, bias=False)),
    "norm": lambda model, layer: setattr(layer, "norm", nn.RMSNorm(HIDDEN)),
    "hook": lambda model, layer: layer.register_forward_hook(lambda module, args, result: result + 1),
    "inner hook": lambda model, layer: layer.o.register_forward_hook(lambda module, args, result: result + 1),
    "flag": lambda model, layer: layer.qkv.requires_grad_(False),
    "tied": lambda model, layer: setattr(layer.o, "weight", model.layers[0].o.weight),
    "tied within": lambda model, layer: setattr(layer.norm, "weight", layer.norm.bias),
    "one pool": lambda model, layer: setattr(layer, "cache", model.layers[1].cache),
    "function": lambda model, layer: setattr(layer, "how", by_number),
    "branch": lambda model, layer: setattr(layer, "how", branches),
    "training": lambda model, layer: layer.train(),
}
CALLS = {
    "plain": None,
    "twice": lambda model, layer, x: layer(layer(x)),
    "every other twice": lambda model, layer, x: layer(layer(x)) if layer.number % 2 else layer(x) * 2,
    "factor": sets_factor,
    "view": lambda model, layer, x: layer(x.view(x.shape[0], 2, -1).flatten(1)),
    "shorter": lambda model, layer, x: layer(x[1:]) if layer.number == 1 else layer(x),
    "doubled": lambda model, layer, x: layer(torch.cat([x, x])) if layer.number == 2 else layer(x),
}


@hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    changes=st.lists(st.sampled_from(sorted(CHANGES)), min_size=NUM_LAYERS, max_size=NUM_LAYERS),
    call=st.sampled_from(sorted(CALLS)),
    how=st.sampled_from([None, branches, by_scale, by_factor, by_size]),
    num_tokens=st.sampled_from([5, 12]),
)
def test_any_mix_of_layers_is_the_trace_of_all(changes, call, how, num_tokens):
    model = new_stack(how, call=CALLS[call])
    for name, layer in zip(changes, model.layers, strict=True):
        CHANGES[name](model, layer)
    with pytest.MonkeyPatch.context() as patch:
        found = compared(model, patch, num_tokens)
    assert found.layers is not None


def test_two_threads_trace_one_model_at_the_same_time():
    model, found = new_stack(), {}

    def capture(name):
        graphed = piecewise.compile(model, buckets=(4, 8), progress=False)
        with torch.no_grad():
            graphed.capture(make_ids(6))
            found[name] = graphed(make_ids(5)), inspect(graphed).layers.num_traced

    threads = [threading.Thread(target=capture, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        expected = model(make_ids(5))
    assert all(torch.equal(result, expected) and traced == 1 for result, traced in found.values())
    assert sorted(found) == [0, 1]


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_transformers_models(family, monkeypatch):
    transformers = pytest.importorskip("transformers")
    import boundary_ops

    config_class = getattr(transformers, family).config_class
    config = config_class(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(transformers, family)(config).eval()
    cache = boundary_ops.PagedKVCache.for_model(model, num_tokens=128)
    boundary_ops.huggingface.attach(model, cache)
    graphed = piecewise.compile(model, buckets=(8, 16), progress=False)
    ids, positions = torch.arange(12)[None] % 96, torch.arange(12)[None]
    with torch.no_grad():
        report = graphed.capture(input_ids=ids, position_ids=positions, logits_to_keep=1)
        assert report.ok, str(report)
        assert "of 6 layers traced; the others are like them" in str(report)
        (signature,) = inspect(graphed).signatures
        layers = signature.traced.trace.layers
        # Gemma has layers with a window, and with rotations of their own, beside those without.
        assert (layers.num_calls, layers.reason) == (6, ""), layers
        assert layers.num_traced == (2 if family.startswith("Gemma3") else 1)
        # What is compared in each call has nothing of the op that stood for the layers.
        assert not [path for path in facts_of(signature.traced.trace).values() if "call_layer" in path]
        with boundary_ops.PrefillBatch.build(cache, ["a"], [11]) as batch:
            call = dict(input_ids=ids[:, :11], position_ids=batch.positions, logits_to_keep=1)
            assert graphed.verify(**call).ok


def test_only_a_run_over_all_layers_remembers_what_its_ops_gave(monkeypatch):
    seen, run_dynamo = [], front_end.run_dynamo

    def noted(*args, repeats, **kwargs):
        seen.append(repeats)
        return run_dynamo(*args, repeats=repeats, **kwargs)

    monkeypatch.setattr(front_end, "run_dynamo", noted)
    monkeypatch.setattr(layer_run, "run_dynamo", noted)
    assert traced(new_stack()).layers.num_traced == 1
    assert seen == [False, False]
    seen.clear()
    assert traced(new_stack(call=lambda model, layer, x: layer(x).float(), kind=Doubles)).layers.reason
    assert seen[-1] and not any(seen[:-1])
