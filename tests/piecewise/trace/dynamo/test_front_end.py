"""What cannot be traced is refused with its name, its source line and what to do, and changes nothing."""

from __future__ import annotations

import math
import types

import pytest
import torch
from state_models import HIDDEN, Model, Mood, attend, calls, graph, new_model, serve, tokens
from torch import nn

import piecewise
from piecewise.capture.model_calls import ModelCalls
from piecewise.errors.analysis import FixedTokenCount, NoBoundaryOp, SeveralDims
from piecewise.errors.trace import (
    InputNotPlain,
    MissingArguments,
    NoOps,
    NotOneGraph,
    OpaqueResult,
    StoresState,
    TensorWithoutPath,
)

COUNT = 0
LOG = []


class Space:
    def __init__(self):
        self.calls = 0


SPACE = Space()


def counts(model, x):
    model.calls += 1
    return x


def stores_a_result(model, x):
    model.last = x
    return x


def appends(model, x):
    model.log.append(1)
    return x


def appends_a_result(model, x):
    model.log.append(x)
    return x


def sets_an_item(model, x):
    model.table["rows"] = x.shape[0]
    return x


def changes_an_object(model, x):
    model.space.calls += 1
    return x


def assigns_a_buffer(model, x):
    model.scale = model.scale * 2
    return x * model.scale


def counts_in_a_global(model, x):
    global COUNT
    COUNT += 1
    return x


def appends_to_a_global(model, x):
    LOG.append(1)
    return x


def changes_a_global_object(model, x):
    SPACE.calls += 1
    return x


STORES = {
    counts: "calls",
    stores_a_result: "last",
    appends: "log",
    appends_a_result: "log",
    sets_an_item: "rows",
    changes_an_object: "calls",
    assigns_a_buffer: "scale",
    counts_in_a_global: "COUNT",
    appends_to_a_global: "LOG",
    changes_a_global_object: "calls",
}


def with_state(part):
    model = new_model(before=part)
    model.calls, model.log, model.table, model.space = 0, [], {}, Space()
    return model


def assert_four_lines(error, *words):
    text = str(error)
    for word in (*words, "\n  Rule: ", "\n  Fix:  "):
        assert word in text, f"{word!r} is not in: {text}"


@pytest.mark.parametrize("in_place", [False, True], ids=["compiled", "enabled"])
@pytest.mark.parametrize("part", STORES, ids=lambda part: part.__name__)
def test_I8_what_forward_stores_is_refused_and_put_back(part, in_place):
    model = with_state(part)
    if in_place:
        graphed = piecewise.enable(model, buckets=(8,), progress=False)
    else:
        graphed = graph(model, captured=False, buckets=(8,))
    scale, calls.count = model.scale, 0
    with pytest.raises(StoresState) as caught:
        graphed.capture(tokens(7))
    assert_four_lines(caught.value, STORES[part])
    assert (model.calls, model.log, model.table, model.space.calls) == (0, [], {}, 0)
    assert (COUNT, LOG, SPACE.calls) == (0, [], 0)
    assert model.scale is scale and "last" not in vars(model)
    assert calls.count == 0


def prints(model, x):
    print("rows", x.shape[0])
    return x


def branches_on_data(model, x):
    return x + 1 if x.sum() > 0 else x


def fixes_the_count(model, x):
    return x * int(x.shape[0]) if int(x.shape[0]) == 7 else x


def takes_the_logarithm(model, x):
    return x * math.log(x.shape[0])


def unbinds(model, x):
    return torch.stack(x.unbind(0))


BREAKS = {prints: "`print`", branches_on_data: "Data-dependent branching"}
FIXES = [fixes_the_count, takes_the_logarithm, unbinds]


@pytest.mark.parametrize("part", BREAKS, ids=lambda part: part.__name__)
def test_I10_a_graph_break_names_the_line(part):
    graphed = graph(new_model(before=part), captured=False)
    with pytest.raises(NotOneGraph) as caught:
        graphed.capture(tokens(7))
    line = part.__code__.co_firstlineno + 1
    words = BREAKS[part], "test_front_end.py", f"line {line}", f"in {part.__name__}"
    assert_four_lines(caught.value, *words)
    assert serve(graphed, tokens(5)) == "not_captured"


@pytest.mark.parametrize("part", FIXES, ids=lambda part: part.__name__)
def test_I10_a_token_count_that_forward_fixes_names_the_input_and_the_line(part):
    graphed = graph(new_model(before=part), captured=False)
    with pytest.raises(FixedTokenCount) as caught:
        graphed.capture(tokens(7))
    line = part.__code__.co_firstlineno + 1
    assert_four_lines(caught.value, "ids [7]", "test_front_end.py", f"line {line}", f"in {part.__name__}")


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_I10_an_example_of_too_few_tokens(num_tokens):
    graphed = graph(new_model(), captured=False)
    with pytest.raises(FixedTokenCount) as caught:
        graphed.capture(tokens(num_tokens))
    assert_four_lines(caught.value, f"ids [{num_tokens}]", "state_models::attend", "two or more tokens")


class NoOp(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.linear(x)


class OnInputs(nn.Module):
    """The op acts on inputs directly, so nothing says which dim carries tokens."""

    def __init__(self):
        super().__init__()
        self.cache = torch.zeros(64, HIDDEN)

    def forward(self, x):
        out = torch.empty_like(x)
        attend(x, x, x, out, self.cache)
        return out


class Flattens(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, ids):
        return self.inner(ids.flatten())


class Collects(nn.Module):
    """Returns an object with state of its own."""

    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, ids):
        found = Collection()
        found.rows = self.inner(ids)
        return found


class Collection:
    pass


class GivesNothing(nn.Module):
    def forward(self, ids):
        return None


class NoTensors(nn.Module):
    def forward(self, n):
        return n + 1


@pytest.mark.parametrize(
    ("kind", "example", "error", "words"),
    [
        (
            NoOp,
            (torch.zeros(7, HIDDEN),),
            NoBoundaryOp,
            ("no boundary op", "boundary_ops.define", "attach"),
        ),
        (
            OnInputs,
            (torch.zeros(7, HIDDEN),),
            SeveralDims,
            ("state_models::attend", "test_front_end.py", "x [", "token_args"),
        ),
        (Flattens, (tokens(6).view(2, 3),), SeveralDims, ("ids [", "packed to [1, n]")),
        (Collects, (tokens(7),), OpaqueResult, ("Collection", "pytree")),
        (
            Model,
            (tokens(7).to("meta"),),
            piecewise.TraceError,
            ("input 'ids'", "embedding.weight", "meta and cpu"),
        ),
        (Model, (tokens(7).to_sparse(),), InputNotPlain, ("input 'ids'", "sparse")),
        (NoTensors, (7,), piecewise.PiecewiseError, ()),
        (GivesNothing, (tokens(7),), NoOps, ("GivesNothing.forward",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_I10_what_cannot_be_graphed_is_refused(kind, example, error, words):
    torch.manual_seed(0)
    graphed = graph(kind().eval(), captured=False)
    calls.count = 0
    with pytest.raises(error) as caught:
        graphed.capture(*example)
    assert_four_lines(caught.value, *words)
    assert calls.count == 0 and graphed.report().plans == ()


def test_I10_a_dynamic_cache_in_the_result_names_use_cache():
    transformers = pytest.importorskip("transformers")

    class WithCache(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, ids):
            cache, rows = transformers.DynamicCache(), self.inner(ids)
            cache.update(rows[None, None], rows[None, None], 0)
            return rows, cache

    with pytest.raises(piecewise.TraceError) as caught:
        graph(WithCache().eval(), captured=False).capture(tokens(7))
    assert_four_lines(caught.value, "DynamicCache", "use_cache=False")


@pytest.mark.parametrize(
    ("tensors", "read", "error"),
    [
        (iter([torch.ones(HIDDEN)]), next, piecewise.TraceError),
        ({torch.ones(HIDDEN): 1}, lambda tensors: list(tensors.keys())[0], TensorWithoutPath),
    ],
    ids=["iterator", "keys"],
)
def test_I4_a_tensor_without_a_path_is_refused(tensors, read, error):
    model = new_model(before=lambda model, x: x * read(model.tensors))
    model.tensors = tensors
    graphed = graph(model, captured=False)
    with pytest.raises(error) as caught:
        graphed.capture(tokens(7))
    assert_four_lines(caught.value)


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: {"place": {Mood.CALM: tensor}, "find": lambda held: held[Mood.CALM]},
        lambda tensor: {"place": [[tensor]], "find": lambda held: held[0][0]},
        lambda tensor: {"place": {("a", 1): tensor}, "find": lambda held: held["a", 1]},
        lambda tensor: {"place": types.SimpleNamespace(t=tensor), "find": lambda held: held.t},
    ],
    ids=["enum key", "nested list", "tuple key", "object"],
)
def test_I4_a_tensor_anywhere_below_the_model_has_a_path(hold):
    held = hold(torch.full((HIDDEN,), 2.0))
    model = new_model(before=lambda model, x: x * held["find"](model.place))
    model.place = held["place"]
    graphed = graph(model, buckets=(8,))
    assert serve(graphed, tokens(5)) == "replay"
    held["find"](model.place).fill_(3.0)
    assert serve(graphed, tokens(5)) == "replay"
    model.place = hold(torch.full((HIDDEN,), 5.0))["place"]
    assert serve(graphed, tokens(5)) in ("moved_address", "module_state_changed")


def test_a_call_that_does_not_fit_forward_is_told_in_its_name():
    graphed = graph(new_model(), captured=False)
    with pytest.raises(TypeError, match=r"forward\(\)"):
        graphed.capture(tokens(7), 3)
    with pytest.raises(MissingArguments, match="without 'ids': expected forward's arguments"):
        graphed.capture()


def test_I6_a_lazy_call_that_cannot_be_traced_is_served_eagerly():
    graphed = graph(new_model(before=branches_on_data), captured=False, capture="lazy")
    assert [serve(graphed, tokens(5)) for _ in range(2)] == ["capture_failed", "capture_failed"]
    assert "cannot be traced: forward cannot be traced" in str(graphed.report())


def test_I6_a_first_lazy_call_of_one_token_does_not_spoil_the_rest():
    graphed = graph(new_model(), captured=False, capture="lazy")
    assert serve(graphed, tokens(1)) == "capture_failed"
    outcomes = [serve(graphed, tokens(5)) for _ in range(4)]
    assert outcomes == ["not_captured", "not_captured", "replay", "replay"]
    assert [serve(graphed, tokens(1)) for _ in range(3)] == ["not_captured", "not_captured", "replay"]


def test_I6_lazy_traces_that_fail_are_bounded_in_number(monkeypatch):
    graphed = graph(new_model(before=branches_on_data), captured=False, capture="lazy", max_signatures=2)
    traced = []
    original = ModelCalls.trace
    monkeypatch.setattr(ModelCalls, "trace", lambda *args: (traced.append(1), original(*args))[1])
    for size in range(2, 7):
        assert serve(graphed, tokens(size)) == "capture_failed"
    assert len(traced) == 2
    strict = graph(new_model(before=branches_on_data), captured=False, capture="lazy", strict=True)
    with torch.no_grad(), pytest.raises(piecewise.TraceError):
        strict(tokens(5))
