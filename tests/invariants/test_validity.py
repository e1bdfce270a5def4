"""[I10]: a trace is used only for calls that it is valid for; all else runs eagerly with one reason."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import types

import pytest
import state_models
import torch
from state_models import BUCKETS, HIDDEN, Model, Mood, graph, new_model, serve, serve_as_is, tokens
from torch import nn
from torch.autograd import forward_ad

import piecewise
from piecewise.errors.capture import TooManySignatures
from piecewise.errors.trace import CompileIsOff, InputRequiresGrad, MissingArguments


def test_I10_positional_and_keyword_calls_are_one():
    graphed = graph(new_model())
    assert serve(graphed, tokens(5)) == "replay"
    assert serve(graphed, ids=tokens(5)) == "replay"


class Arguments(nn.Module):
    """Takes each kind of argument, and uses each where it is given."""

    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, ids, bias=None, *more, mood=Mood.CALM, factor=1.5, mode="add", flag=False, **extra):
        x = self.inner.embedding(ids)
        if bias is not None:
            x = x + bias
        for term in more:
            x = x * term
        x = x * mood.value * factor
        x = -x if flag else x
        for name in sorted(extra):
            x = x + extra[name] if mode == "add" else x - extra[name]
        return self.inner.projection(self.inner.block(x))


def rows(num_tokens, value=1.0):
    return torch.full((num_tokens, HIDDEN), value)


@pytest.fixture(scope="module")
def arguments():
    torch.manual_seed(0)
    return graph(Arguments().eval())


@pytest.mark.parametrize(
    ("kwargs", "outcome"),
    [
        ({}, "replay"),
        ({"mood": Mood.CALM}, "replay"),
        ({"bias": None, "factor": 1.5, "flag": False, "mode": "add"}, "replay"),
        ({"bias": rows(5)}, "unseen_signature"),
        ({"mood": Mood.LOUD}, "unseen_signature"),
        ({"factor": 2.5}, "unseen_signature"),
        ({"factor": 2}, "unseen_signature"),
        ({"factor": float("inf")}, "unseen_signature"),
        ({"mode": "subtract"}, "unseen_signature"),
        ({"flag": True}, "unseen_signature"),
        ({"b": rows(5)}, "unseen_signature"),
    ],
    ids=str,
)
def test_I10_values_that_are_not_tensors_are_part_of_the_signature(arguments, kwargs, outcome):
    assert serve(arguments, tokens(5), **kwargs) == outcome


def test_I10_zero_and_minus_zero_are_two_values():
    graphed = graph(
        new_model(after=lambda model, x, factor: x + 1.0 / torch.full_like(x, factor)),
        captured=False,
    )
    graphed.capture(tokens(7), factor=0.0)
    assert serve(graphed, tokens(5), factor=0.0) == "replay"
    assert serve(graphed, tokens(5), factor=-0.0) == "unseen_signature"


def test_I10_parameters_come_in_any_order_further_keywords_in_theirs_and_all_of_them_count():
    torch.manual_seed(0)
    graphed = graph(Arguments().eval(), captured=False)
    graphed.capture(tokens(7), a=rows(7), b=rows(7, 2.0), mode="subtract")
    assert serve(graphed, mode="subtract", a=rows(5), b=rows(5, 2.0), ids=tokens(5)) == "replay"
    assert serve(graphed, tokens(5), b=rows(5, 2.0), mode="subtract", a=rows(5)) == "unseen_signature"
    assert serve(graphed, tokens(5), a=rows(5), mode="subtract") == "unseen_signature"
    assert serve(graphed, tokens(5), a=rows(5), c=rows(5), mode="subtract") == "unseen_signature"


def test_I10_star_arguments_count_too():
    torch.manual_seed(0)
    graphed = graph(Arguments().eval(), captured=False)
    graphed.capture(tokens(7), rows(7), rows(7, 2.0), rows(7, 3.0))
    assert serve(graphed, tokens(5), rows(5), rows(5, 2.0), rows(5, 3.0)) == "replay"
    assert serve(graphed, tokens(5), rows(5), rows(5, 2.0)) == "unseen_signature"


def test_I10_an_optional_input_that_is_absent_has_a_plan_of_its_own():
    torch.manual_seed(0)
    graphed = graph(Arguments().eval())
    graphed.capture(tokens(7), rows(7))
    assert serve(graphed, tokens(5), rows(5, 100.0)) == "replay"
    assert serve(graphed, tokens(5)) == "replay", "and never sees the last call's value"
    assert len(graphed.report().plans) == 2


def test_I10_a_wrong_call_is_the_models_error():
    graphed = graph(new_model())
    with torch.no_grad(), pytest.raises(TypeError, match="unexpected keyword|got multiple|missing"):
        graphed()


@pytest.mark.parametrize(
    ("ids", "outcome"),
    [
        (tokens(5).int(), "unseen_signature"),
        (tokens(5)[:0], "zero_tokens"),
        (tokens(10)[::2], "unseen_signature"),
        (tokens(5).to_sparse(), "unsupported_input"),
        (nn.Parameter(tokens(5), requires_grad=False), "replay"),
    ],
    ids=["dtype", "empty", "strided", "sparse", "parameter"],
)
def test_I10_an_input_of_another_kind(ids, outcome):
    graphed = graph(new_model())
    if outcome == "unsupported_input":
        with torch.no_grad(), pytest.raises(Exception):  # noqa: B017 - whatever eager says
            graphed(ids)
        assert graphed.stats.reasons == {outcome: 1}
    else:
        assert serve(graphed, ids) == outcome


@pytest.mark.parametrize("ids", [tokens(5).to("meta"), tokens(5)[None]], ids=["device", "rank"])
def test_I10_an_input_that_the_model_may_refuse_is_left_to_it(ids):
    graphed = graph(new_model())
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        graphed(ids)
    assert graphed.stats.reasons == {"unseen_signature": 1}


class Marked(torch.Tensor):
    """A subclass with no behaviour of its own."""


def test_I10_a_tensor_subclass_runs_eagerly():
    graphed = graph(new_model())
    assert serve(graphed, tokens(5).as_subclass(Marked)) == "unsupported_input"


class Embedded(nn.Module):
    """Takes rows, and a table of which only a constant part is read."""

    def __init__(self):
        super().__init__()
        self.block = state_models.Block()
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, table=None):
        if table is not None:
            x = x * table.shape[0] + table[:1]
        return self.block(self.mix(x))


def test_I10_static_dims_and_strides_of_an_input():
    torch.manual_seed(0)
    graphed = graph(Embedded().eval(), rows(7))
    x = torch.randn(5, HIDDEN)
    assert serve(graphed, x) == "replay"
    assert serve(graphed, torch.randn(HIDDEN, 5).t()) == "unseen_signature"
    with torch.no_grad(), pytest.raises(RuntimeError, match="mat1|shapes"):
        graphed(torch.randn(5, HIDDEN + 1))
    assert graphed.stats.reasons["unseen_signature"] == 2


@pytest.mark.parametrize("num_rows", [1, 3])
def test_I10_the_size_of_another_input_is_never_frozen(num_rows):
    torch.manual_seed(0)
    graphed = graph(Embedded().eval(), rows(7), torch.randn(num_rows, HIDDEN))
    for size in (1, 2, 3, 6):
        assert serve(graphed, torch.randn(5, HIDDEN), torch.randn(size, HIDDEN)) in (
            "replay",
            "unseen_signature",
            "shape_guard",
        )
    assert serve(graphed, torch.randn(5, HIDDEN), torch.randn(num_rows, HIDDEN)) == "replay"


class ReadsASize(nn.Module):
    """Uses the size of a tensor that no op reads."""

    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, ids, table):
        return self.inner(ids) * table.shape[0] + table.shape[1]


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (1, 3), (3, 4)])
def test_I10_the_size_of_a_tensor_that_no_op_reads(sizes):
    torch.manual_seed(0)
    graphed = graph(ReadsASize().eval(), tokens(7), torch.zeros(sizes))
    assert serve(graphed, tokens(5), torch.zeros(sizes)) == "replay"
    for other in ((1, 1), (3, 1), (1, 3), (2, 2), (5, 4)):
        serve(graphed, tokens(5), torch.zeros(other))


class TwoInputs(nn.Module):
    """Reads both inputs, and writes the first one where `write` is set."""

    def __init__(self, write):
        super().__init__()
        self.block, self.write = state_models.Block(), write

    def forward(self, x, y):
        x = x + 0.0 if not self.write else x.mul_(2)
        return self.block(x + y.sin())


@pytest.mark.parametrize("write", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("at_capture", ["apart", "same", "overlapping"])
def test_I10_aliased_inputs(write, at_capture):
    torch.manual_seed(0)

    def pair(kind, num_tokens):
        base = torch.randn(num_tokens + 1, HIDDEN)
        if kind == "same":
            x = base[:-1]
            return x, x
        return (base[:-1], base[1:]) if kind == "overlapping" else (base[:-1], base[1:].clone())

    graphed = graph(TwoInputs(write).eval(), captured=False)
    assert graphed.capture(*pair(at_capture, 7)).ok
    for kind in ("apart", "same", "overlapping"):
        got_pair = pair(kind, 5)
        want_pair = copy_pair(got_pair)
        with torch.no_grad():
            before = graphed.stats.snapshot()
            got, want = graphed(*got_pair), graphed.model(*want_pair)
        state_models.assert_equal(got, want)
        state_models.assert_equal(got_pair, want_pair)
        outcome = state_models.what_was_counted(graphed, before)
        assert outcome in ("replay", "unseen_signature")
        if kind == at_capture:
            assert outcome == "replay"


@pytest.mark.parametrize(
    "after",
    [
        lambda model, x, a, b, c: x * (2 if a is b else 3) + (c if b is c else 0),
        lambda model, x, a, b, c: x + a * 2 + b * c if a is not None else x,
    ],
    ids=["forward asks", "forward does not ask"],
)
def test_I10_whether_two_inputs_are_one_object_is_part_of_the_signature(after):
    model = new_model(after=after)
    graphed = graph(model, captured=False, buckets=(8,), max_signatures=5)
    one, two, three = (torch.full((HIDDEN,), float(value)) for value in (1, 2, 3))
    patterns = [(one, two, three), (one, one, two), (one, two, two), (one, two, one), (one, one, one)]
    for pattern in patterns:
        with torch.no_grad():
            arguments = dict(zip("abc", pattern, strict=True))
            state_models.assert_equal(graphed(tokens(5), **arguments), model(tokens(5), **arguments))
            assert graphed.stats.replays == 0, "captured for other patterns only"
        graphed.capture(tokens(7), **arguments)
        with torch.no_grad():
            state_models.assert_equal(graphed(tokens(5), **arguments), model(tokens(5), **arguments))
        assert graphed.stats.replays == 1
        graphed.stats.reset()


def test_I10_values_of_a_tensor_passed_twice_and_of_two_may_change():
    model = new_model(after=lambda model, x, a, b: x + a * 2 + b)
    graphed = graph(model, captured=False)
    one, two = torch.ones(HIDDEN), torch.full((HIDDEN,), 2.0)
    graphed.capture(tokens(7), a=one, b=one)
    assert serve(graphed, tokens(5), a=two, b=two) == "replay"
    assert serve(graphed, tokens(5), a=one, b=two) == "unseen_signature"
    graphed.capture(tokens(7), a=one, b=two)
    assert serve(graphed, tokens(5), a=two, b=one) == "replay"
    assert serve(graphed, tokens(5), a=one, b=one) == "replay"


@pytest.mark.parametrize(
    "asks",
    [
        lambda a, b: a is b,
        lambda a, b: not (a is not b),
        lambda a, b: (lambda: a is b)(),
        lambda a, b: (a, None)[0] is {"b": b}["b"],
    ],
)
def test_I10_forward_may_ask_in_any_way_whether_two_inputs_are_one(asks):
    model = new_model(after=lambda model, x, a, b: x * 2 if asks(a, b) else x + b)
    graphed = graph(model, captured=False, buckets=(8,))
    one, two = torch.ones(HIDDEN), torch.full((HIDDEN,), 2.0)
    for a, b in ((one, one), (one, two)):
        graphed.capture(tokens(7), a=a, b=b)
    for a, b in ((two, two), (two, one)):  # `serve` clones, which makes two of one
        with torch.no_grad():
            state_models.assert_equal(graphed(tokens(5), a=a, b=b), model(tokens(5), a=a, b=b))
    assert graphed.stats.replays == 2


def test_I10_many_inputs_are_told_apart():
    model = new_model(after=lambda model, x, rows: x + sum(rows[1:], rows[0]))
    graphed = graph(model, captured=False, buckets=(8,))
    rows = [torch.full((HIDDEN,), float(number)) for number in range(12)]
    graphed.capture(tokens(7), rows=rows)
    assert serve(graphed, tokens(5), rows=rows[::-1]) == "replay"
    assert serve(graphed, tokens(5), rows=[*rows[:-1], rows[0]]) == "unseen_signature"


def test_I10_torchs_own_code_may_ask_whether_inputs_are_one():
    attention = nn.MultiheadAttention(HIDDEN, 2).eval()
    model = new_model(after=lambda model, x, q, k: x + model.attention(q, k, k)[0].sum(0))
    model.attention = attention
    graphed = graph(model, captured=False, buckets=(8,))
    one, two = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
    graphed.capture(tokens(7), q=one, k=two)
    for q, k in ((one, two), (one, one)):
        with torch.no_grad():
            state_models.assert_equal(graphed(tokens(5), q=q, k=k), model(tokens(5), q=q, k=k))
    assert graphed.stats.reasons == {"unseen_signature": 1} and graphed.stats.replays == 1


def test_I10_a_token_input_passed_twice_is_one_input_at_every_size():
    model = new_model(after=lambda model, x, a, b: x * 2 if a is b else x + a + b)
    graphed = graph(model, captured=False)
    rows7 = torch.ones(7, HIDDEN)
    assert graphed.capture(tokens(7), a=rows7, b=rows7).ok
    for size in (1, 5, 8, 12):
        a = torch.ones(size, HIDDEN)
        with torch.no_grad():
            state_models.assert_equal(graphed(tokens(size), a=a, b=a), model(tokens(size), a=a, b=a))
    assert graphed.stats.replays == 4


def copy_pair(pair):
    """Copies of two tensors that share memory as the originals do."""
    x, y = pair
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return x.clone(), y.clone()
    storage = x.untyped_storage().clone()
    copies = [torch.empty(0).set_(storage, t.storage_offset(), t.shape, t.stride()) for t in pair]
    return (copies[0], copies[0]) if x is y else tuple(copies)


def test_I10_an_input_that_shares_memory_with_state_which_graphs_write():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = state_models.Block()
            self.register_buffer("seen", torch.zeros(HIDDEN))

        def forward(self, x, shift):
            self.seen.add_(1)
            return self.block(x + shift)

    torch.manual_seed(0)
    model = Writes().eval()
    graphed = graph(model, rows(7), torch.ones(HIDDEN))
    with torch.no_grad():
        assert graphed(rows(5), torch.ones(HIDDEN)) is not None
        model.seen.zero_()
        want = model(rows(5), model.seen)
        model.seen.zero_()
        state_models.assert_equal(graphed(rows(5), model.seen), want)


@dataclasses.dataclass
class Config:
    factor: float = 2.0
    inner: object = None


@dataclasses.dataclass(slots=True)
class Slots:
    factor: float = 2.0


FACTOR = 2.0
TABLE = {"factor": 2.0}


def double(x):
    return x * 2.0


def triple(x):
    return x * 3.0


def scaled_by(factor):
    def function(x):
        return x * factor

    return function


class Kind:
    factor = 2.0


@contextlib.contextmanager
def global_value(name, value):
    module = globals()
    old = module[name]
    module[name] = value
    try:
        yield
    finally:
        module[name] = old


def set_attribute(path, value):
    def change(model):
        *owners, name = path.split(".")
        for owner in owners:
            model = getattr(model, owner)
        setattr(model, name, value)

    return change


# What forward reads: (name, setup of the model, how x is scaled, a change of what was read)
READS = {
    "plain attribute": (
        lambda m: setattr(m, "factor", 2.0),
        lambda m, x: x * m.factor,
        set_attribute("factor", 3.0),
    ),
    "none becomes a value": (
        lambda m: setattr(m, "factor", None),
        lambda m, x: x if m.factor is None else x * m.factor,
        set_attribute("factor", 3.0),
    ),
    "config field": (
        lambda m: setattr(m, "config", Config()),
        lambda m, x: x * m.config.factor,
        set_attribute("config.factor", 3.0),
    ),
    "config replaced": (
        lambda m: setattr(m, "config", Config()),
        lambda m, x: x * m.config.factor,
        lambda m: setattr(m, "config", Config(3.0)),
    ),
    "config deep inside": (
        lambda m: setattr(m, "config", Config(inner=Config())),
        lambda m, x: x * m.config.inner.factor,
        lambda m: setattr(m.config, "inner", Config(3.0)),
    ),
    "slot": (
        lambda m: setattr(m, "slots", Slots()),
        lambda m, x: x * m.slots.factor,
        set_attribute("slots.factor", 3.0),
    ),
    "list item": (
        lambda m: setattr(m, "factors", [1.0, 2.0]),
        lambda m, x: x * m.factors[1],
        lambda m: m.factors.__setitem__(1, 3.0),
    ),
    "list appended": (
        lambda m: setattr(m, "factors", [2.0]),
        lambda m, x: [x := x * factor for factor in m.factors][-1],
        lambda m: m.factors.append(3.0),
    ),
    "deque item": (
        lambda m: setattr(m, "factors", collections.deque([2.0])),
        lambda m, x: x * m.factors[0],
        lambda m: m.factors.__setitem__(0, 3.0),
    ),
    "dict item": (
        lambda m: setattr(m, "factors", {"a": 2.0}),
        lambda m, x: x * m.factors["a"],
        lambda m: m.factors.update(a=3.0),
    ),
    "dict grown": (
        lambda m: setattr(m, "factors", {"a": 2.0}),
        lambda m, x: [x := x * factor for factor in m.factors.values()][-1],
        lambda m: m.factors.update(b=3.0),
    ),
    "member of a dict": (
        lambda m: setattr(m, "factors", {}),
        lambda m, x: x * 3 if "loud" in m.factors else x,
        lambda m: m.factors.update(loud=1),
    ),
    "member of a set": (
        lambda m: setattr(m, "moods", {"calm"}),
        lambda m, x: x * 3 if "loud" in m.moods else x,
        lambda m: m.moods.add("loud"),
    ),
    "attribute added": (
        lambda m: None,
        lambda m, x: x * m.factor if hasattr(m, "factor") else x,
        set_attribute("factor", 3.0),
    ),
    "default of getattr": (
        lambda m: None,
        lambda m, x: x * getattr(m, "factor", 2.0),
        set_attribute("factor", 3.0),
    ),
    "namespace": (
        lambda m: setattr(m, "space", types.SimpleNamespace(factor=2.0)),
        lambda m, x: x * m.space.factor,
        set_attribute("space.factor", 3.0),
    ),
    "enum": (
        lambda m: setattr(m, "mood", Mood.CALM),
        lambda m, x: x * m.mood.value,
        set_attribute("mood", Mood.LOUD),
    ),
    "function": (
        lambda m: setattr(m, "function", double),
        lambda m, x: m.function(x),
        set_attribute("function", triple),
    ),
    "closure cell": (
        lambda m: setattr(m, "function", scaled_by(2.0)),
        lambda m, x: m.function(x),
        lambda m: setattr(m.function.__closure__[0], "cell_contents", 3.0),
    ),
    "training flag": (
        lambda m: None,
        lambda m, x: x * 2 if m.training else x,
        lambda m: m.train(),
    ),
    "training flag of a child": (
        lambda m: None,
        lambda m, x: x * 2 if m.projection.training else x,
        lambda m: m.projection.train(),
    ),
    "submodule replaced": (
        lambda m: None,
        lambda m, x: x,
        lambda m: setattr(m, "projection", nn.Linear(HIDDEN, 32)),
    ),
    "submodule appended": (
        lambda m: setattr(m, "steps", nn.Sequential(nn.Linear(HIDDEN, HIDDEN))),
        lambda m, x: m.steps(x),
        lambda m: m.steps.append(nn.Linear(HIDDEN, HIDDEN)),
    ),
    "module outside the tree": (
        lambda m: setattr(m, "hidden_modules", [nn.Dropout(0.0).eval()]),
        lambda m, x: x * 2 if m.hidden_modules[0].training else x,
        lambda m: m.hidden_modules[0].train(),
    ),
    "instance forward": (
        lambda m: None,
        lambda m, x: x,
        lambda m: setattr(m.projection, "forward", lambda x: x * 3),
    ),
    "forward hook": (
        lambda m: None,
        lambda m, x: x,
        lambda m: m.projection.register_forward_hook(lambda module, args, out: out * 3),
    ),
    "forward pre-hook": (
        lambda m: None,
        lambda m, x: x,
        lambda m: m.projection.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    ),
    "class of a module": (
        lambda m: None,
        lambda m, x: x,
        lambda m: setattr(m.projection, "__class__", Tripled),
    ),
    "parametrized": (
        lambda m: None,
        lambda m, x: x,
        lambda m: nn.utils.parametrize.register_parametrization(m.block.o, "weight", Doubled()),
    ),
}


class Tripled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("in_place", [False, True], ids=["compiled", "enabled"])
@pytest.mark.parametrize("what", READS)
def test_I10_state_that_forward_read_is_compared(what, in_place):
    setup, scale, change = READS[what]
    model = new_model(before=lambda model, x: scale(model, x))
    setup(model)
    model.eval()
    graphed = (
        piecewise.enable(model, buckets=(8,), progress=False) if in_place else graph(model, buckets=(8,))
    )
    if in_place:
        graphed.capture(tokens(7))
    assert serve(graphed, tokens(5)) == "replay"
    with torch.no_grad():
        change(model)
    assert serve(graphed, tokens(5)) in ("module_state_changed", "moved_address")
    assert serve(graphed, tokens(5)) in ("module_state_changed", "moved_address")
    graphed.refresh()
    assert serve(graphed, tokens(5)) == "replay"


@pytest.mark.parametrize("method", ["capture", "explain"])
def test_I10_an_example_without_a_needed_argument_names_it(method):
    graphed = graph(new_model(), captured=False)
    with pytest.raises(MissingArguments, match=r"(?s)without 'ids'.*Rule:.*Fix:"):
        getattr(graphed, method)()
    with pytest.raises(TypeError, match="no_such"):
        getattr(graph(Linear().eval(), captured=False), method)(no_such=1)
    with torch.no_grad(), piecewise.capture_window(), pytest.raises(TypeError, match="ids"):
        graphed()
    assert graphed.capture(tokens(7)).ok


class Linear(nn.Module):
    def forward(self, x, *, bias=None):
        return x if bias is None else x + bias


class Tied(nn.Module):
    """Embedding and head share their weight, or share none that a graph has read twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Model(), nn.Linear(HIDDEN, 32, bias=False)
        self.head.weight = self.inner.embedding.weight
        self.other = state_models.Block()
        self.other.cache = self.inner.block.cache

    def forward(self, ids):
        return self.head(self.other(self.inner.block(self.inner.embedding(ids))))


def untie_by_assignment(model):
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)


def untie_through_the_table(model):
    model.head._parameters["weight"] = nn.Parameter(model.head.weight.detach() * 2)


def untie_the_first_place(model):
    model.inner.embedding.weight = nn.Parameter(model.head.weight.detach() * 2)


@pytest.mark.parametrize(
    "untie", [untie_by_assignment, untie_through_the_table, untie_the_first_place], ids=lambda f: f.__name__
)
def test_I4_tied_weights_that_are_untied_are_noticed(untie):
    torch.manual_seed(0)
    model = Tied().eval()
    graphed = graph(model, buckets=(8,))
    assert serve(graphed, tokens(5)) == "replay"
    untie(model)
    assert serve(graphed, tokens(5)) in ("module_state_changed", "moved_address")
    assert "weight" in str(graphed.report().changes)
    graphed.refresh()
    assert serve(graphed, tokens(5)) == "replay"


def test_I4_a_kv_pool_that_two_layers_share_may_be_bound_anew_and_not_be_split():
    torch.manual_seed(0)
    model = Tied().eval()
    graphed = graph(model, buckets=(8,))
    model.inner.block.cache = model.other.cache = torch.zeros_like(model.other.cache)
    assert serve(graphed, tokens(5)) == "replay"
    model.other.cache = torch.zeros_like(model.other.cache)
    assert serve(graphed, tokens(5)) == "module_state_changed"
    assert "the tensor of model.other.cache was in model.inner.block.cache" in str(graphed.report())


# What forward reads and no guard of Dynamo's compares: (how x is scaled, a change of what was read)
UNGUARDED = {
    "flag of a weight": (
        lambda m, x: x * 2 if m.projection.weight.requires_grad else x * 3,
        lambda m, patch: m.projection.weight.requires_grad_(False),
    ),
    "flag of a buffer": (
        lambda m, x: x * 2 if m.scale.requires_grad else x * 3,
        lambda m, patch: m.scale.requires_grad_(True),
    ),
    "member of __dict__": (
        lambda m, x: x * 2 if "loud" in m.__dict__ else x * 3,
        lambda m, patch: setattr(m, "loud", 1),
    ),
    "member of vars of a config": (
        lambda m, x: x * 2 if "loud" in vars(m.config) else x * m.config.factor,
        lambda m, patch: setattr(m.config, "loud", 1),
    ),
    "environment": (
        lambda m, x: x * 2 if os.environ.get("STATE_MODELS_LOUD") else x * 3,
        lambda m, patch: patch.setenv("STATE_MODELS_LOUD", "1"),
    ),
    "getenv": (
        lambda m, x: x * 2 if os.getenv("STATE_MODELS_LOUD") else x * 3,
        lambda m, patch: patch.setenv("STATE_MODELS_LOUD", "1"),
    ),
}


@pytest.mark.parametrize("what", UNGUARDED)
def test_I10_what_no_guard_compares_is_compared_where_forward_reads_it(what, monkeypatch):
    scale, change = UNGUARDED[what]
    model = new_model(before=scale)
    model.config = Config()
    graphed = graph(model, buckets=(8,))
    assert serve(graphed, tokens(5)) == "replay"
    change(model, monkeypatch)
    assert serve(graphed, tokens(5)) == "module_state_changed"
    graphed.refresh()
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_what_forward_does_not_read_is_not_compared(monkeypatch):
    model = new_model()
    graphed = graph(model, buckets=(8,))
    model.projection.weight.requires_grad_(False)
    model.loud = 1
    monkeypatch.setenv("STATE_MODELS_LOUD", "1")
    assert serve(graphed, tokens(5)) == "replay"


@pytest.mark.parametrize("asks", ["requires_grad", "Parameter", "nothing"])
def test_I10_flags_of_an_input_are_part_of_the_signature_where_forward_asks_for_them(asks):
    questions = {
        "requires_grad": lambda model, x, a: x * 2 if a.requires_grad else x * 3,
        "Parameter": lambda model, x, a: x * 2 if isinstance(a, nn.Parameter) else x * 3,
        "nothing": lambda model, x, a: x * 3,
    }
    model = new_model(after=questions[asks])
    graphed = graph(model, captured=False, buckets=(8,))
    graphed.capture(tokens(7), a=torch.ones(HIDDEN))
    for a in (torch.ones(HIDDEN), nn.Parameter(torch.ones(HIDDEN))):
        with torch.no_grad():
            state_models.assert_equal(graphed(tokens(5), a=a), model(tokens(5), a=a))
    assert graphed.stats.replays == (2 if asks == "nothing" else 1)
    if asks != "nothing":
        with pytest.raises(InputRequiresGrad, match=r"(?s)'a'.*Rule:.*Fix:"):
            graphed.capture(tokens(7), a=nn.Parameter(torch.ones(HIDDEN)))


def test_I10_state_that_is_put_back_replays_again():
    model = new_model()
    graphed = graph(model)
    model.train()
    assert serve(graphed, tokens(5)) == "module_state_changed"
    model.eval()
    assert serve(graphed, tokens(5)) == "replay"
    handle = model.register_forward_hook(lambda module, args, out: out + 1)
    assert serve(graphed, tokens(5)) == "module_state_changed"
    handle.remove()
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_an_equal_value_is_no_change_and_state_that_nothing_reads_neither():
    model = new_model(before=lambda model, x: x * model.factor)
    model.factor = float("2.5")
    graphed = graph(model)
    model.factor = float("2.50")
    model.note = "unread"
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_globals_that_forward_read_are_compared():
    model = new_model(before=lambda model, x: double(x * FACTOR * TABLE["factor"] * Kind.factor))
    graphed = graph(model, buckets=(8,))
    assert serve(graphed, tokens(5)) == "replay"
    for name, value in (("FACTOR", 5.0), ("TABLE", {"factor": 5.0}), ("double", triple)):
        with global_value(name, value):
            assert serve(graphed, tokens(5)) == "module_state_changed", name
        assert serve(graphed, tokens(5)) == "replay"
    TABLE["factor"] = 5.0
    assert serve(graphed, tokens(5)) == "module_state_changed"
    TABLE["factor"] = 2.0
    Kind.factor = 5.0
    assert serve(graphed, tokens(5)) == "module_state_changed"
    Kind.factor = 2.0
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_a_forward_replaced_on_the_class():
    class Special(Model):
        def forward(self, ids):
            return self.projection(self.block(self.embedding(ids)))

    torch.manual_seed(0)
    graphed = graph(Special().eval(), buckets=(8,))
    original = Special.forward
    Special.forward = lambda self, ids: original(self, ids) * 2
    assert serve(graphed, tokens(5)) == "module_state_changed"
    Special.forward = original
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_a_call_replaced_on_the_class(monkeypatch):
    graphed = graph(new_model(), buckets=(8,))
    original = state_models.Block.__call__
    with monkeypatch.context() as patch:
        patch.setattr(state_models.Block, "__call__", lambda self, x: original(self, x) * 2)
        assert serve(graphed, tokens(5)) == "module_state_changed"
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_global_hooks_are_hooks():
    graphed = graph(new_model(), buckets=(8,))
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if isinstance(module, nn.Embedding) else None
    )
    try:
        assert serve(graphed, tokens(5)) == "module_state_changed"
    finally:
        handle.remove()
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_an_argument_object_is_compared_by_identity_and_by_what_was_read_of_it():
    options = types.SimpleNamespace(factor=2.0)
    graphed = graph(new_model(after=lambda model, x, options: x * options.factor), captured=False)
    graphed.capture(tokens(7), options=options)
    assert serve(graphed, tokens(5), options=options) == "replay"
    options.factor = 3.0
    assert serve(graphed, tokens(5), options=options) == "module_state_changed"
    assert serve(graphed, tokens(5), options=types.SimpleNamespace(factor=2.0)) == "unseen_signature"


def test_I10_a_changed_model_is_never_captured_from_the_old_trace():
    model = new_model(before=lambda model, x: x * model.factor)
    model.factor = 2.0
    graphed = graph(model, captured=False, capture="lazy")
    for _ in range(3):
        serve(graphed, tokens(3))
    assert graphed.stats.captured == (4,)
    model.factor = 5.0
    assert [serve(graphed, tokens(7)) for _ in range(4)] == [
        "not_captured",
        "not_captured",
        "module_state_changed",
        "module_state_changed",
    ]
    assert graphed.stats.captured == (4,), "no bucket was captured in vain"
    assert graphed.capture(tokens(6)).captured == BUCKETS
    assert [serve(graphed, tokens(n)) for n in (3, 7)] == ["replay", "replay"]


@contextlib.contextmanager
def default_dtype(dtype):
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Counts(torch.overrides.TorchFunctionMode):
    """A mode that changes results."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is nn.functional.linear else out


class CountsOps(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that sees ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


GLOBAL = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.float64),
    "determinism": deterministic,
    "function mode": Counts,
    "dispatch mode": CountsOps,
    "default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("what", GLOBAL)
def test_I10_global_state_that_differs_runs_eagerly(what):
    graphed = graph(new_model(), buckets=(8,))
    with GLOBAL[what]():
        assert serve_global(graphed) == "global_state_changed"
    assert serve_global(graphed) == "replay"


def serve_global(graphed):
    before = graphed.stats.snapshot()
    with torch.no_grad():
        state_models.assert_equal(graphed(tokens(5)), graphed.model(tokens(5)))
    return state_models.what_was_counted(graphed, before)


def test_I10_autocast_at_capture_is_served_under_autocast_only_beside_the_plain_one():
    def before(model, x):
        return model.block.o(x).float()

    model = new_model(before=before)
    model.block.cache = model.block.cache.bfloat16()
    graphed = graph(model, captured=False, buckets=(8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert graphed.capture(tokens(7)).ok
        assert serve_global(graphed) == "replay"
    assert serve_global(graphed) == "global_state_changed"
    assert graphed.capture(tokens(7)).ok, "a signature of its own"
    assert serve_global(graphed) == "replay"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert serve_global(graphed) == "replay"
    assert len(graphed.report().plans) == 2


def test_I10_the_number_of_threads_is_global_state():
    graphed = graph(new_model(), buckets=(8,))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert serve_global(graphed) == "global_state_changed"
    finally:
        torch.set_num_threads(threads)
    assert serve_global(graphed) == "replay"


def test_I10_calls_with_grad_run_eagerly_and_have_gradients():
    graphed = graph(new_model(), buckets=(8,))
    before = graphed.stats.snapshot()
    graphed(tokens(5)).sum().backward()
    assert graphed.model.projection.weight.grad is not None
    assert state_models.what_was_counted(graphed, before) == "grad_enabled"


@pytest.mark.parametrize("at_capture", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_I10_one_capture_serves_no_grad_and_inference_mode(at_capture):
    model = new_model()
    with at_capture():
        graphed = graph(model, tokens(7), buckets=(8,))
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert serve_as_is(graphed, tokens(5)) == "replay"
            assert graphed(tokens(5)).is_inference() == (mode is torch.inference_mode)
    with torch.inference_mode():
        made_inside = tokens(5)
    with torch.no_grad():
        assert serve_as_is(graphed, made_inside) == "replay"


def test_I10_a_model_made_under_inference_mode():
    with torch.inference_mode():
        model = new_model()
        graphed = graph(model, buckets=(8,))
        assert serve_as_is(graphed, tokens(5)) == "replay"


def test_I10_inside_an_outer_compile_the_model_itself_is_compiled():
    graphed = graph(new_model(), buckets=(8,))

    @torch.compile(backend="eager")
    def outer(ids):
        return graphed(ids) * 2

    with torch.no_grad():
        state_models.assert_equal(outer(tokens(5)), graphed.model(tokens(5)) * 2)
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_under_vmap_and_jit_trace_the_model_runs():
    model = new_model().requires_grad_(False)
    graphed = graph(model, buckets=(8,))
    with torch.no_grad():
        traced = torch.jit.trace(lambda ids: graphed(ids), (tokens(5),), check_trace=False)
        state_models.assert_equal(traced(tokens(5, seed=1)), model(tokens(5, seed=1)))
    assert graphed.stats.reasons == {"nested_tracing": 1}

    class Rowwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            return self.linear(x)

    functional = piecewise.compile(Rowwise().eval(), buckets=(8,))
    with torch.no_grad():
        x = torch.randn(3, 5, HIDDEN)
        state_models.assert_equal(torch.vmap(functional)(x), functional.model(x))
    assert functional.stats.reasons == {"nested_tracing": 1}


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_I10_under_forward_mode_differentiation_the_model_runs(num_inputs):
    model = new_model(after=lambda model, x, a, b=None: x * a if b is None else x * a + b)
    graphed = graph(model, captured=False, buckets=(8,))
    inputs = dict(zip("ab", [torch.ones(HIDDEN)] * num_inputs, strict=False))
    graphed.capture(tokens(7), **inputs)
    with torch.no_grad(), forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(value, value * 2) for name, value in inputs.items()}
        got, want = (call(tokens(5), **duals) for call in (graphed, model))
        state_models.assert_equal(forward_ad.unpack_dual(got).tangent, forward_ad.unpack_dual(want).tangent)
    assert graphed.stats.reasons == {"nested_tracing": 1} and graphed.stats.replays == 0
    assert serve(graphed, tokens(5), **inputs) == "replay"


def test_I10_a_stance_that_forbids_compilation_is_a_clear_error_and_runs_nothing():
    model = new_model()
    graphed = graph(model, captured=False)
    state_models.calls.count = 0
    with torch.compiler.set_stance("force_eager"):
        with pytest.raises(CompileIsOff, match=r"(?s)force_eager.*Rule:.*Fix:"):
            graphed.capture(tokens(7))
        assert serve(graphed, tokens(5)) == "not_captured"
    assert state_models.calls.count == 2, "the two calls of serve"
    assert graphed.capture(tokens(7)).ok


def test_I10_an_unseen_signature_is_listed_once_with_its_count():
    graphed = graph(new_model())
    for _ in range(3):
        serve(graphed, tokens(5).int())
    assert graphed.report().unseen == {
        "(int32[5]), ids is int32[n], was int64[n] at capture (pass ids.to(torch.int64))": 3
    }
    assert "unseen signature, 3 calls: (int32[5])" in str(graphed.report())


def test_I10_the_list_of_unseen_signatures_is_bounded():
    graphed = graph(new_model())
    for size in range(1, 40):
        serve(graphed, tokens(size).int())
    assert len(graphed.report().unseen) == 16


def test_I10_signatures_are_bounded_in_number():
    graphed = graph(new_model(), buckets=(8,), max_signatures=2)
    graphed.capture(tokens(7).int())
    with pytest.raises(TooManySignatures, match=r"(?s)signature 3.*at most 2.*max_signatures"):
        graphed.capture(tokens(7)[None])
    with piecewise.capture_window():
        assert serve(graphed, tokens(10)[::2]) == "signature_limit"
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_inputs_that_disagree_about_the_token_count():
    graphed = graph(Model(after=lambda model, x, shift: x + shift).eval(), captured=False, buckets=(8,))
    graphed.capture(tokens(7), shift=rows(7))
    assert serve(graphed, tokens(5), shift=rows(5)) == "replay"
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        graphed(tokens(5), shift=rows(4))
    assert graphed.stats.reasons == {"token_count_mismatch": 1}
    assert serve(graphed, tokens(5), shift=rows(1)) == "token_count_mismatch", "eager broadcasts it"
