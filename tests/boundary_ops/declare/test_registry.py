"""Declaring boundary ops: what is accepted, what is refused and why, and what a trace sees of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._guards import detect_fake_mode

import boundary_ops
import piecewise
from boundary_ops import define, lookup, register, registered, unregister
from boundary_ops.errors.declare import (
    AmbiguousOverload,
    MissingTokenDim,
    NoImplementation,
    NotDeclared,
    OpExists,
    ReturnsResult,
    SchemaChanged,
    UnknownArgument,
    UnknownOp,
    UnreadableSchema,
    WritesNothing,
    WrongImplementation,
    WrongTokenArgs,
    WrongTokenDim,
)

# Ops of "another library", made with torch alone.
OTHER = torch.library.Library("registry_other", "FRAGMENT")
OTHER.define("attn(Tensor q, Tensor(a!) out) -> ()")
OTHER.define("returning(Tensor q) -> Tensor")
OTHER.define("aliasing(Tensor(a!) out) -> Tensor(a!)")
OTHER.define("single.only(Tensor(a!) out) -> ()")
OTHER.define("many.first(Tensor(a!) out) -> ()")
OTHER.define("many.second(Tensor(a!) out, int n) -> ()")
OTHER.impl("attn", lambda q, out: out.copy_(q), "CPU")

SCHEMA = "registry_test::double(Tensor x, Tensor(a!) out, float factor=2.0) -> ()"


def double(x, out, factor=2.0):
    out.copy_(x * factor)


@pytest.fixture
def op():
    yield define(SCHEMA, double, token_args={"x": 0, "out": 0})
    if lookup("registry_test::double"):
        unregister("registry_test::double")


def trace(function, *inputs):
    """The one graph of a full trace in which dim 0 of each input is a symbol of its own."""
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph.forward

    for tensor in inputs:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph, result


def op_nodes(graph):
    return [node for node in graph.graph.nodes if lookup(node.target) is not None]


def assert_four_lines(error, *names):
    what, *rest = str(error.value).splitlines()
    assert len(rest) == 2 and rest[0].startswith("  Rule: ") and rest[1].startswith("  Fix:  ")
    for name in names:
        assert name in str(error.value)


def test_a_defined_op_runs_and_tells_its_declaration(op):
    x, out = torch.randn(3), torch.zeros(3)
    assert op(x, out) is None
    torch.testing.assert_close(out, x * 2)
    torch.ops.registry_test.double(x, out, factor=3.0)
    torch.testing.assert_close(out, x * 3)
    assert op.name == "registry_test::double" and op.mutated == ("out",)
    assert dict(op.token_args) == {"x": 0, "out": 0} and not op.capture_safe and op.warm_up is None
    assert op in registered() and op.overload is torch.ops.registry_test.double.default
    with pytest.raises(AttributeError):
        op.name = "other"


@pytest.mark.parametrize("spelling", ["declared", "torch.ops"])
def test_I8_a_trace_holds_one_node_and_never_runs_the_implementation(op, spelling):
    calls = []

    def counted(x, out, factor=2.0):
        calls.append(type(x))
        double(x, out, factor)

    define(SCHEMA, counted, token_args={"x": 0, "out": 0})
    called = op if spelling == "declared" else torch.ops.registry_test.double

    def model(x):
        out = torch.empty_like(x)
        called(x, out)
        return out + 1

    x = torch.randn(5, 4)
    graph, result = trace(model, x)
    torch.testing.assert_close(result, x * 2 + 1)
    assert len(op_nodes(graph)) == 1
    # Once for the call itself, on real tensors; fakes never reach it.
    assert calls == [torch.Tensor]


@pytest.mark.parametrize("declared", [True, False])
def test_token_args_make_the_symbols_of_a_callers_out_and_of_x_one(declared):
    name = f"registry_test::link_{declared}"
    link = define(
        f"{name}(Tensor x, Tensor(a!) out) -> ()",
        lambda x, out: out.copy_(x),
        token_args={"x": 0, "out": 0} if declared else None,
    )

    def model(x, out):
        link(x, out)
        return out * 2

    graph, _ = trace(model, torch.randn(5, 4), torch.zeros(5, 4))
    values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    fakes = [value for value in values if isinstance(value, torch.Tensor)]
    shapes = detect_fake_mode(fakes).shape_env
    found = {shapes.simplify(fake.shape[0].node.expr) for fake in fakes}
    assert len(found) == (1 if declared else 2)
    unregister(name)


def test_a_declared_token_dim_that_is_absent_names_the_argument():
    op = define(
        "registry_test::deep(Tensor x, Tensor(a!) out) -> ()",
        lambda x, out: None,
        token_args={"x": 0, "out": 2},
    )
    with pytest.raises(MissingTokenDim, match="argument 'out'"):
        op.definition.fake(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(Exception, match="argument 'out'"):
        trace(lambda x: op(x, torch.empty_like(x)), torch.randn(5, 4))
    unregister(op.name)


def test_defining_again_replaces_the_implementation_for_those_who_hold_the_op(op):
    held, x, out = op.overload, torch.ones(2), torch.zeros(2)
    again = define(SCHEMA, lambda x, out, factor=2.0: out.fill_(7), capture_safe=True)
    held(x, out)
    assert out.tolist() == [7, 7]
    assert (
        again.overload is held and lookup(held) is again and again.capture_safe and again.token_args is None
    )
    assert [known.name for known in registered()].count(op.name) == 1


def test_defining_again_with_another_schema_is_refused_and_changes_nothing(op):
    with pytest.raises(SchemaChanged) as error:
        define("registry_test::double(Tensor x, Tensor(a!) out) -> ()", double)
    assert_four_lines(error, "registry_test::double", "float factor", "another name")
    assert lookup(op.name) is op


def test_an_unregistered_name_can_be_defined_again(op):
    unregister(op.name)
    assert lookup(op.name) is None and op not in registered()
    op(torch.ones(2), torch.zeros(2))
    assert lookup(define(SCHEMA, double).overload).name == op.name
    unregister(op.name)
    with pytest.raises(NotDeclared, match="not declared"):
        unregister(op.name)


@pytest.mark.parametrize(
    ("refusal", "schema", "names"),
    [
        (
            ReturnsResult,
            "registry_bad::returns(Tensor x) -> Tensor",
            ("registry_bad::returns", "-> Tensor", "torch.empty"),
        ),
        (
            ReturnsResult,
            "registry_bad::alias(Tensor(a!) x) -> Tensor(a!)",
            ("registry_bad::alias", "torch.empty"),
        ),
        (ReturnsResult, "registry_bad::number(Tensor(a!) x) -> int", ("registry_bad::number", "-> int")),
        (WritesNothing, "registry_bad::pure(Tensor x) -> ()", ("registry_bad::pure", "(a!)")),
        (UnreadableSchema, "registry_bad::broken(Tensor x", ("cannot be parsed", "registry_bad::broken")),
        (UnreadableSchema, "unqualified(Tensor(a!) x) -> ()", ("namespace", "unqualified")),
        (OpExists, "registry_other::attn(Tensor q, Tensor(a!) out) -> ()", ("exists already", "register(")),
    ],
)
def test_schemas_that_cannot_be_boundaries_are_refused_with_what_to_do(refusal, schema, names):
    before = registered()
    with pytest.raises(refusal) as error:
        define(schema, lambda *args: None)
    assert_four_lines(error, *names)
    assert isinstance(error.value, ValueError) and registered() == before


@pytest.mark.parametrize(
    ("refusal", "token_args", "name"),
    [
        (UnknownArgument, {"y": 0}, "'y'"),
        (UnknownArgument, {"outt": 0}, "'out'"),
        (UnknownArgument, {"factor": 0}, "'factor'"),
        (WrongTokenDim, {"x": -1}, "-1"),
        (WrongTokenDim, {"x": True}, "True"),
        (WrongTokenDim, {"x": "0"}, "'0'"),
        (WrongTokenArgs, {}, "{}"),
        (WrongTokenArgs, [("x", 0)], "[('x', 0)]"),
    ],
)
def test_token_args_that_do_not_fit_the_schema_are_refused(refusal, token_args, name):
    with pytest.raises(refusal) as error:
        define(SCHEMA, double, token_args=token_args)
    assert_four_lines(error, "registry_test::double", "token_args", name)


@pytest.mark.parametrize("impl", [None, {}, {"cpu": 3}, {"tpu": double}, "double"])
def test_implementations_that_are_none_are_refused(impl):
    with pytest.raises(WrongImplementation) as error:
        define(SCHEMA, impl)
    assert_four_lines(error, "impl", "cuda")


def test_a_device_without_implementation_is_named():
    op = define("registry_test::devices(Tensor x, Tensor(a!) out) -> ()", {"cuda": lambda x, out: None})
    with pytest.raises(NoImplementation) as error:
        op(torch.ones(1), torch.ones(1))
    assert_four_lines(error, "registry_test::devices", "'cpu'", "cuda")
    define("registry_test::devices(Tensor x, Tensor(a!) out) -> ()", {"cpu": lambda x, out: out.copy_(x)})
    out = torch.zeros(1)
    op(torch.ones(1), out)
    assert out.item() == 1
    unregister(op.name)


def test_with_grad_mode_the_op_runs_and_autograd_records_none_of_its_writes(op):
    x, pool = torch.ones(3, requires_grad=True), torch.zeros(3)
    op(x, pool)
    assert pool.tolist() == [2, 2, 2] and not pool.requires_grad and pool.grad_fn is None
    with torch.inference_mode():
        op(x, pool)


def test_existing_ops_are_registered_by_any_spelling():
    op = register("registry_other::attn", token_args={"q": 0}, warm_up=print)
    assert op.name == "registry_other::attn" and op.mutated == ("out",) and op.warm_up is print
    assert register("registry_other::attn.default").name == op.name
    only = register("registry_other::single")
    assert only.name == "registry_other::single.only" and lookup(torch.ops.registry_other.single) is only
    second = register("registry_other::many.second")
    assert lookup(torch.ops.registry_other.many.second) is second
    assert lookup(torch.ops.registry_other.many.first) is None
    for name in (op.name, only.name, second.name):
        unregister(name)


@pytest.mark.parametrize(
    ("refusal", "name", "names"),
    [
        (UnknownOp, "registry_other::atn", ("registry_other::atn", "did you mean", "'registry_other::attn'")),
        (UnknownOp, "nowhere_at_all::zzzz", ("nowhere_at_all::zzzz", "import the library")),
        (UnknownOp, "attn", ("attn",)),
        (
            AmbiguousOverload,
            "registry_other::many",
            ("several overloads", "registry_other::many.first", "registry_other::many.second"),
        ),
        (UnknownOp, "registry_other::many.third", ("registry_other::many.third", "did you mean")),
        (ReturnsResult, "registry_other::returning", ("-> Tensor",)),
        (ReturnsResult, "registry_other::aliasing", ("-> Tensor",)),
        (ReturnsResult, "aten::relu", ("aten::relu", "-> Tensor")),
    ],
)
def test_registering_what_cannot_be_a_boundary_is_refused(refusal, name, names):
    before = registered()
    with pytest.raises(refusal) as error:
        register(name)
    assert_four_lines(error, *names)
    assert registered() == before


def test_lookup_knows_overloads_packets_and_names_and_nothing_else(op):
    for target in (op, op.overload, torch.ops.registry_test.double, op.name, "registry_test::double.default"):
        assert lookup(target) is op
    for target in (
        torch.add,
        "add_",
        "output",
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add,
        None,
        3,
        double,
    ):
        assert lookup(target) is None


def test_importing_the_package_imports_neither_transformers_nor_triton_nor_dynamo():
    code = (
        "import sys, torch; before = set(sys.modules); import boundary_ops; "
        "new = set(sys.modules) - before; "
        "print([m for m in new if m.split('.')[0] in ('transformers', 'triton') or m == 'torch._dynamo'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert boundary_ops.attn_inplace in registered()


class IntArgument(torch.nn.Module):
    """Hands its op a number made of the token count, or one that the caller passes."""

    def __init__(self, op):
        super().__init__()
        self.linear, self.op = torch.nn.Linear(4, 4), op

    def forward(self, x, number=None):
        x = self.linear(x)
        out = torch.empty_like(x)
        self.op(x, x.shape[0] * 2 if number is None else number, out)
        return self.linear(out)


def _times(x, number, out):
    out.copy_(x * number)


_ints = torch.library.Library("registry_ints", "DEF")
_ints.define("times(Tensor x, int number, Tensor(a!) out) -> ()")
_ints.impl("times", _times, "CPU")


@pytest.fixture
def foreign_times():
    boundary_ops.register("registry_ints::times")
    yield torch.ops.registry_ints.times
    boundary_ops.unregister("registry_ints::times")


def test_I10_an_int_of_a_foreign_op_that_fixes_the_token_count_is_refused(foreign_times):
    graphed = piecewise.compile(IntArgument(foreign_times).eval(), buckets=(8,), progress=False)
    with pytest.raises(piecewise.TokenDimError, match=r"(?s)test_registry.py.*Fix:.*'number' as SymInt"):
        graphed.capture(torch.randn(7, 4))


def test_I10_an_int_of_a_foreign_op_that_the_caller_passes_is_part_of_the_signature(foreign_times):
    model = IntArgument(foreign_times).eval()
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    graphed.capture(torch.randn(7, 4), number=3)
    for number, replays in ((3, 1), (5, 1)):
        x = torch.randn(5, 4)
        with torch.no_grad():
            torch.testing.assert_close(graphed(x, number=number), model(x, number=number))
        assert graphed.stats.replays == replays
    assert graphed.stats.reasons == {"unseen_signature": 1}


def test_I10_an_int_of_an_op_defined_here_follows_the_token_count():
    op = boundary_ops.define(
        "registry_defined::times(Tensor x, int number, Tensor(a!) out) -> ()", _times,
        token_args={"x": 0, "out": 0},
    )  # fmt: skip
    try:
        model = IntArgument(op).eval()
        graphed = piecewise.compile(model, buckets=(8,), progress=False)
        graphed.capture(torch.randn(7, 4))
        for size in (1, 5, 8):
            x = torch.randn(size, 4)
            with torch.no_grad():
                torch.testing.assert_close(graphed(x), model(x))
        assert graphed.stats.replays == 3
    finally:
        boundary_ops.unregister("registry_defined::times")
