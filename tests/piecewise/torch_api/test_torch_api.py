"""Each private torch API that the compile-time half uses does what its wrapper says, on this version."""

from __future__ import annotations

import collections
import inspect
import queue
import sys
import weakref

import pytest
import sympy
import torch
import torch._dynamo as dynamo
from dict_things import Other, Thing, needs_numbers, thing
from torch import nn
from torch._inductor import codecache
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._sympy.functions import FloorDiv, IntTrueDiv, PythonMod

from piecewise import torch_api


def compile_with(function, *args, names=(), mark=()):
    """Traces `function` and returns (what `look(graph)` saw inside the backend, the graph)."""
    seen = {}

    def backend(graph, example_inputs):
        seen["graph"] = graph
        seen["guards"] = torch_api.current_guards()
        seen["writes"] = torch_api.sources_to_be_written()
        seen["sources"] = {n.name: torch_api.source_name(n) for n in graph.graph.find_nodes(op="placeholder")}
        seen["code"] = torch_api.traced_code()
        return graph.forward

    for tensor, dim in mark:
        torch_api.mark_dynamic(tensor, dim)
    with torch_api.tracing_config(list(names), repeats=True), torch.no_grad():
        seen["result"] = torch.compile(function, backend=backend, fullgraph=True)(*args)
    torch_api.forget_compilation(
        getattr(function, "__code__", None) or type(function).forward.__code__, backend
    )
    return seen


def fakes_of(graph):
    return [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]


def test_a_marked_dim_has_a_symbol_of_its_own_and_an_unmarked_one_none():
    def function(x, y):
        return x.sum() + y.sum()

    x, y = torch.zeros(5, 5), torch.zeros(5)
    graph = compile_with(function, x, y, mark=[(x, 0), (x, 1), (y, 0)])["graph"]
    shape_env = torch_api.shape_env_of(fakes_of(graph))
    sizes = [
        torch_api.expression(size, shape_env)
        for fake in fakes_of(graph)
        if isinstance(fake, torch.Tensor)
        for size in fake.shape
    ]
    assert len(set(sizes)) == 3 and all(size.is_Symbol for size in sizes), "no duck sizing"

    def other(x):
        return x + 1

    z = torch.zeros(6, 3)
    (fake,) = (
        f for f in fakes_of(compile_with(other, z, mark=[(z, 0)])["graph"]) if isinstance(f, torch.Tensor)
    )
    assert isinstance(fake.shape[0], torch.SymInt) and fake.shape[1] == 3


def test_a_named_int_is_a_symbol_and_another_a_constant():
    def function(t0, i0, i1):
        return t0 * i0 + i1

    graph = compile_with(function, torch.zeros(3), 7, 9, names=["i0"])["graph"]
    shape_env = torch_api.shape_env_of(fakes_of(graph))
    sizes = torch_api.symbolic_sizes(shape_env)
    assert sizes[0, -1].is_Symbol and (1, -1) not in sizes
    assert torch_api.symbol_source(shape_env, sizes[0, -1]) == (0, -1)


def test_sizes_are_found_whether_an_op_reads_the_tensor_or_not():
    def function(t0, t1):
        return t0 * t1.shape[1]

    t0, t1 = torch.zeros(4), torch.zeros(2, 6)
    graph = compile_with(function, t0, t1, mark=[(t0, 0), (t1, 0), (t1, 1)])["graph"]
    sizes = torch_api.symbolic_sizes(torch_api.shape_env_of(fakes_of(graph)))
    assert (0, 0) in sizes and (1, 1) in sizes


def test_scalars_and_data_dependent_sizes_stay_in_the_graph():
    def function(x):
        return x[x > 0] * x.sum().item()

    assert compile_with(function, torch.arange(4.0))["result"].tolist() == [6.0, 12.0, 18.0]


def test_unbacked_symbols_are_told_from_sizes():
    def function(x):
        return x.nonzero()

    graph = compile_with(function, torch.arange(4.0))["graph"]
    (node,) = (n for n in graph.graph.nodes if n.target == "nonzero")
    shape_env = torch_api.shape_env_of([node.meta["example_value"]])
    assert torch_api.is_unbacked(torch_api.expression(node.meta["example_value"].shape[0], shape_env))
    assert not torch_api.is_unbacked(sympy.Symbol("s0"))


def test_expressions_are_simplified_after_symbols_unify():
    def function(x, y):
        return x + y

    x, y = torch.zeros(5), torch.zeros(5)
    graph = compile_with(function, x, y, mark=[(x, 0), (y, 0)])["graph"]
    shape_env = torch_api.shape_env_of(fakes_of(graph))
    left, right = (f.shape[0] for f in fakes_of(graph) if isinstance(f, torch.Tensor))
    assert torch_api.expression(left, shape_env) == torch_api.expression(right, shape_env)
    assert torch_api.expression(3, shape_env) == 3 and torch_api.expression(True, shape_env) is None
    assert torch_api.expression("x", shape_env) is None


def test_guards_on_sizes_and_where_they_come_from():
    def function(t0):
        return t0 + 1 if t0.shape[0] < 10 else t0

    t0 = torch.zeros(5)
    graph = compile_with(function, t0, mark=[(t0, 0)])["graph"]
    shape_env = torch_api.shape_env_of(fakes_of(graph))
    symbol = torch_api.symbolic_sizes(shape_env)[0, 0]
    check = torch_api.compile_expressions(torch_api.guard_expressions(shape_env), [symbol])
    assert all(check(9)) and not all(check(10))
    assert torch_api.guard_expressions(None) == [] and torch_api.symbolic_sizes(None) == {}


def test_compiled_expressions_compute_what_sympy_computes():
    n, m = sympy.Symbol("n", integer=True), sympy.Symbol("m", integer=True)
    expressions = [n * 2 + m, n**2, PythonMod(n, 3), FloorDiv(n, m), IntTrueDiv(n, m), sympy.Eq(n, 5), n < m]
    function = torch_api.compile_expressions(expressions, [n, m])
    for values in ((5, 2), (16, 40)):
        wanted = [expression.subs({n: values[0], m: values[1]}) for expression in expressions]
        for got, want in zip(function(*values), wanted, strict=True):
            assert got == (bool(want) if isinstance(got, bool) else pytest.approx(float(want)))
    assert torch_api.compile_expressions([], [n])(1) == () and torch_api.compile_expressions([n], [n])(7) == (
        7,
    )


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.factor, self.items, self.calls = 2.0, [1.0], 0

    def forward(self, x):
        self.calls += 1
        self.items.append(2.0)
        return self.linear(x) * self.factor + (1 if hasattr(self, "extra") else 0)


def test_guards_name_what_was_read_and_writes_what_will_be_written():
    model = Reads()
    seen = compile_with(lambda model, x: model(x), model, torch.zeros(2, 3))
    guards = {(guard.source, guard.kind) for guard in seen["guards"]}
    assert ("L['model'].factor", "CONSTANT_MATCH") in guards
    asked = [guard for guard in seen["guards"] if guard.kind == "HASATTR"]
    assert any("extra" in (guard.arguments.get("attr"), guard.source.rpartition(".")[2]) for guard in asked)
    assert ("L['model']", ("calls",)) in seen["writes"] and ("L['model'].items", ()) in seen["writes"]
    assert any(source.endswith("['linear']._parameters['weight']") for source in seen["sources"].values())
    assert model.calls == 1, "Dynamo writes after the graph has run"


def test_outside_a_backend_there_are_no_guards():
    assert torch_api.current_guards() == []
    assert torch_api.traced_code() == []


def test_code_that_is_run_at_many_places_is_listed_once():
    def double(x):
        return x * 2

    code = compile_with(lambda x: double(double(double(x))), torch.ones(3))["code"]
    assert code.count(double.__code__) == 1


def test_the_sources_of_a_tensor_that_is_read_at_two_places():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.again, self.other = self.weight, nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight + self.again + self.other

    seen = compile_with(Tied(), torch.zeros(2, 3))
    (sources,) = [(guard.source, guard.other) for guard in seen["guards"] if guard.other]
    assert sorted("again" in source for source in sources) == [False, True]
    assert all("_parameters" in source for source in sources)


def test_the_code_that_a_trace_went_through():
    def called(x):
        return x + 1

    def function(x):
        return called(x)

    code = compile_with(function, torch.zeros(2, 3))["code"]
    assert function.__code__ in code and called.__code__ in code


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) + 1


class Broken(Part):
    def forward(self, x):
        y = x * 2
        torch._dynamo.graph_break()
        return super().forward(y)


class Decorated(Part):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Called:
    def __init__(self):
        self.part = Part()

    def __call__(self, x):
        return self.part(x)


def part_of_a_function(x, part=Part()):  # noqa: B008
    return part(x)


@pytest.mark.parametrize(
    ("given", "owner_of", "whole"),
    [
        (Part(), lambda given: given, [True]),
        (Broken(), lambda given: given, [False, False]),
        (Decorated(), lambda given: given, [True]),
        (Called(), lambda given: given, [True]),
        (nn.Sequential(Part()), lambda given: given, [True]),
        (Part().forward, lambda given: given.__self__, [True]),
        (part_of_a_function, lambda given: given, [True]),
    ],
    ids=["module", "broken", "decorated", "callable", "torch's module", "method", "function"],
)
def test_what_torch_compile_was_called_with(given, owner_of, whole):
    seen = []

    def backend(graph, example_inputs, **arguments):
        seen.append(torch_api.callable_in_compilation())
        return graph.forward

    dynamo.reset()
    compiled = torch.compile(given, backend=backend, options={"a": 1})
    with torch.no_grad():
        compiled(torch.zeros(2, 3))
    assert seen == [(owner_of(given), each) for each in whole]
    found = torch_api.compilation_of(compiled)
    assert found == (owner_of(given), backend, {"options": {"a": 1}}) and found[0] is owner_of(given)


def test_a_module_compiled_in_place_and_what_was_not_compiled():
    def backend(graph, example_inputs):
        return graph.forward

    part = Part()
    assert torch_api.compilation_of(part) is None and torch_api.compilation_of(len) is None
    part.compile(backend=backend)
    assert torch_api.compilation_of(part) == (part, backend, {})


def test_a_compilation_may_be_one_models_alone():
    """Dynamo would use it for any model of the class."""
    for guard, expected in ((list, 1), (torch_api.guard_modules_of, 2)):
        compiled = []

        def backend(graph, example_inputs, guard=guard, compiled=compiled):
            compiled.append(graph)
            guard(graph.graph.find_nodes(op="placeholder"))
            return graph.forward

        dynamo.reset()
        for part in [Part(), Part()]:
            with torch.no_grad():
                torch.compile(part, backend=backend)(torch.zeros(2, 3))
        assert len(compiled) == expected


def test_twins_have_symbols_where_earlier_compilations_had_none_and_leave_the_tensors_alone():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(fakes_of(graph))
        return graph.forward

    def function(x, y, names):
        return x + y, names["z"] @ names["z"].T

    x, longer = torch.arange(5.0)[None], torch.zeros(1, 9)  # x is a view
    z = torch.zeros(4, 3)
    compiled = torch.compile(function, backend=backend, dynamic=False)
    with torch.no_grad():
        compiled(x, x, {"z": z})
        assert not any(isinstance(size, torch.SymInt) for fake in graphs[0] for size in fake.shape)
        twins = torch_api.with_symbolic_sizes((x, x, {"z": z}))
        with torch_api.marks_are_wishes():
            compiled(*twins)
        (fake, *_) = [fake for fake in graphs[1] if isinstance(fake, torch.Tensor)]
        assert fake.shape[0] == 1 and isinstance(fake.shape[1], torch.SymInt)
        compiled(longer, longer, {"z": torch.zeros(7, 5)})
    assert len(graphs) == 2 and not vars(x) and not vars(z)
    assert twins[0] is twins[1] and twins[0]._base is None and twins[0].data_ptr() == x.data_ptr()
    assert twins[0].stride() == x.stride() and torch.equal(twins[0], x)


def test_what_is_forgotten_is_freed():
    class Backend:
        def __call__(self, graph, example_inputs):
            self.graph = graph
            return graph.forward

    def function(x):
        return x + 1

    backend = Backend()
    num_backends = len(dynamo.eval_frame.cached_backends)
    with torch.no_grad():
        torch.compile(function, backend=backend)(torch.zeros(3))
    assert len(dynamo.eval_frame.cached_backends) == num_backends + 1
    torch_api.forget_compilation(function.__code__, backend)
    assert len(dynamo.eval_frame.cached_backends) == num_backends
    gone = weakref.ref(backend)
    del backend
    assert gone() is None


def test_a_forgotten_code_object_is_traced_again():
    traces = []

    def backend(graph, example_inputs):
        traces.append(graph)
        return graph.forward

    def function(x):
        return x + 1

    for _ in range(2):
        with torch.no_grad():
            torch.compile(function, backend=backend)(torch.zeros(3))
        torch_api.forget_compilation(function.__code__, backend)
    assert len(traces) == 2


def test_a_fake_mode_forgets_the_tensors_that_it_stood_in_for():
    model = nn.Linear(3, 3)
    graph = compile_with(lambda model, x: model(x), model, torch.zeros(2, 3))["graph"]
    assert weakref.getweakrefs(model.weight)
    torch_api.forget_tensors(torch_api.fake_mode_of(fakes_of(graph)))
    assert not weakref.getweakrefs(model.weight)
    torch_api.forget_tensors(None)


@pytest.mark.parametrize("how", ["stance", "config"])
def test_a_disabled_dynamo_is_seen(how):
    assert torch_api.dynamo_is_disabled() is None
    with torch.compiler.set_stance("force_eager") if how == "stance" else dynamo.config.patch(disable=True):
        assert ("force_eager" if how == "stance" else "disabled") in torch_api.dynamo_is_disabled()
    assert torch_api.dynamo_is_disabled() is None
    for stance in ("eager_on_recompile", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            assert stance in torch_api.dynamo_is_disabled()


def test_global_state_is_compared_with_gradients_off():
    state = torch_api.GlobalState()
    with torch.no_grad():
        assert state.check()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not state.check()
        with torch.device("meta"):
            assert not state.check()
            inside = torch_api.GlobalState()
        with torch.device("meta"):
            assert inside.check(), "the same device in another block"
        with torch.device("cpu"):
            assert not inside.check()
        assert state.check() and not inside.check()
    with torch.inference_mode():
        assert state.check()


def test_modes_that_see_functions_or_ops_are_global_state():
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    state = torch_api.GlobalState()
    with torch.no_grad(), Mode():
        assert not state.check()
    assert torch_api.GlobalState()._modes == ()


def test_the_tracing_config_is_put_back():
    before = dynamo.config.capture_scalar_outputs, torch.compiler.config.dynamic_sources
    with torch_api.tracing_config(["i0"], repeats=False):
        assert dynamo.config.capture_scalar_outputs and "i0" in torch.compiler.config.dynamic_sources
    assert (dynamo.config.capture_scalar_outputs, torch.compiler.config.dynamic_sources) == before


@pytest.mark.parametrize("users", [True, False])
@pytest.mark.parametrize("repeats", [True, False])
def test_fake_modes_remember_ops_where_they_repeat_and_the_user_lets_them(repeats, users):
    with dynamo.config.patch(fake_tensor_cache_enabled=users):
        with torch_api.tracing_config([], repeats=repeats):
            traced = FakeTensorMode()
        modes = (traced, torch_api.new_fake_mode(repeats=repeats))
        assert [mode.cache_enabled for mode in modes] == [repeats and users] * 2
        assert dynamo.config.fake_tensor_cache_enabled is users


def test_what_fixes_a_size_is_told_with_its_line():
    def function(t0):
        return t0 * 2 if int(t0.shape[0]) == 5 else t0

    t0 = torch.zeros(5)
    line = function.__code__.co_firstlineno + 1
    graph = compile_with(function, t0, mark=[(t0, 0)])["graph"]
    places = torch_api.specialisation_places(torch_api.shape_env_of(fakes_of(graph)))
    assert any("test_torch_api.py" in place and f"line {line}" in place for place in places), places
    assert torch_api.specialisation_places(None) == []


def test_dict_numbers_tell_on_all_pythons_but_one():
    assert torch_api.dict_versions_tell() == (sys.version_info[:3] != (3, 13, 0))


DICT_WRITES = {
    "replaced": lambda owner: owner.update(a=object()),
    "added": lambda owner: owner.update(b=1),
    "deleted": lambda owner: owner.pop("a"),
    "by default": lambda owner: owner.setdefault("c", 3),
    "cleared": lambda owner: owner.clear(),
    "reordered": lambda owner: owner.update(a=owner.pop("a")),
}


@needs_numbers
@pytest.mark.parametrize("write", DICT_WRITES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_numbers_tell_of_each_write_to_each_dict(write, which):
    dicts = [{"a": 1, "z": 2} for _ in range(3)]
    is_same = torch_api.dict_versions(dicts, [], [])
    assert is_same() and dicts[which]["a"] == 1 and is_same()
    DICT_WRITES[write](dicts[which])
    assert not is_same()


OBJECT_CHANGES = {
    "attribute set": lambda item: setattr(item, "a", 2.0),
    "attribute added": lambda item: setattr(item, "b", 2.0),
    "attribute deleted": lambda item: delattr(item, "a"),
    "written through the dict": lambda item: item.__dict__.update(a=2.0),
    "other attributes": lambda item: setattr(item, "__dict__", dict(item.__dict__)),
    "other class": lambda item: setattr(item, "__class__", Other),
}


@needs_numbers
@pytest.mark.parametrize("change", OBJECT_CHANGES)
@pytest.mark.parametrize("which", [0, 1])
def test_numbers_tell_of_each_change_of_each_object(change, which):
    items = [thing(a=1.0), thing(a=1.0)]
    is_same = torch_api.dict_versions([items[0].__dict__, items[1].__dict__, {}], items, [Thing, Thing])
    assert is_same()
    OBJECT_CHANGES[change](items[which])
    assert not is_same()


def test_a_class_that_is_not_the_expected_one_is_told_at_once():
    assert not torch_api.dict_versions([], [thing()], [Other])()


def test_the_users_of_a_storage_are_counted():
    tensor = torch.randn(4, 8)
    storage = tensor.untyped_storage()
    assert torch_api.num_storage_users(storage) == 1
    view = tensor[1:]
    assert torch_api.num_storage_users(storage) == 2
    parameter = torch.nn.Parameter(tensor)
    assert torch_api.num_storage_users(storage) == 3
    del view, parameter
    assert torch_api.num_storage_users(storage) == 1


def test_an_aten_graph_keeps_what_writes_and_takes_a_symbolic_count():
    fake_mode = torch_api.new_fake_mode()
    rows = torch_api.symbolic_count(fake_mode, "rows", 5)
    with fake_mode:
        x = torch.empty(rows, 8)

    def function(count, x):
        x.add_(1)
        return (x.view(count * 8).to(torch.bfloat16),)

    graph = torch_api.trace_aten(function, (rows, x), fake_mode).graph
    names = [node.target._schema.name for node in graph.nodes if hasattr(node.target, "_schema")]
    assert names == ["aten::add_", "aten::view", "aten::_to_copy"]
    assert str(graph.output_node().args[0][0].meta["val"].shape[0]) == f"8*{rows}"
    holds = torch_api.row_condition(fake_mode, rows)
    assert [holds(count) for count in (1, 2, 1000)] == [False, True, True]


def test_no_pattern_matches_across_an_op_that_writes():
    from piecewise.torch_api.pattern_matcher import CallFunction, KeywordArg, PatternSet

    aten = torch.ops.aten
    patterns = PatternSet("sums of sines")
    pattern = CallFunction(aten.add.Tensor, CallFunction(aten.sin.default, KeywordArg("x")), KeywordArg("y"))
    found = []
    patterns.add(pattern, lambda match: match.kwargs["y"] is not match.kwargs["x"], found.append)

    def swept(function):
        fake_mode = torch_api.new_fake_mode()
        with fake_mode:
            x, y = torch.empty(4), torch.empty(4)
        return patterns.sweep(torch_api.trace_aten(function, (x, y), fake_mode))

    assert swept(lambda x, y: (x.sin() + y,)) == len(found) == 1
    assert found[0].output_node().target is aten.add.Tensor
    assert swept(lambda x, y: (x.sin() + x,)) == 0

    def written_between(x, y):
        sine = x.sin()
        x.add_(1)
        return (sine + y,)

    assert swept(written_between) == 0


def test_a_pattern_matches_the_keywords_that_it_names_and_no_others():
    from piecewise.torch_api.pattern_matcher import CallFunction, KeywordArg, PatternSet

    gelu = torch.ops.aten.gelu.default

    def num_matches(function, **named):
        patterns = PatternSet("gelus")
        patterns.add(CallFunction(gelu, KeywordArg("x"), **named), lambda match: True, lambda match: None)
        fake_mode = torch_api.new_fake_mode()
        with fake_mode:
            x = torch.empty(4)
        return patterns.sweep(torch_api.trace_aten(lambda x: (function(x),), (x,), fake_mode))

    def by_tanh(x):
        return nn.functional.gelu(x, approximate="tanh")

    assert num_matches(by_tanh, approximate="tanh") == num_matches(nn.functional.gelu) == 1
    assert num_matches(nn.functional.gelu, approximate="tanh") == num_matches(by_tanh) == 0


def test_a_symbolic_count_is_named_by_its_name_and_starts_at_two():
    modes = [torch_api.new_fake_mode() for _ in range(2)]
    first, second = (torch_api.symbolic_count(mode, "num_rows", 8) for mode in modes)
    assert torch_api.size_hint(3 * first + 1) == 25 and torch_api.size_hint(7) == 7
    assert str(first) == str(second) and first.node.hint == 8
    holds = torch_api.row_condition(modes[0], first)
    assert [holds(count) for count in (0, 1, 2, 1 << 20)] == [False, False, True, True]
    assert first % 4 == 0 and first <= 64
    holds = torch_api.row_condition(modes[0], first)
    assert [holds(count) for count in (4, 6, 64, 68)] == [True, False, True, False]
    other = torch_api.new_fake_mode()
    assert holds(torch_api.symbolic_count(other, "num_rows", 8)) and len(other.shape_env.guards) == 2
    assert second == 8
    assert [torch_api.row_condition(modes[1], second)(count) for count in (4, 8)] == [False, True]
    assert [torch_api.row_condition(modes[1], 5)(count) for count in (4, 5)] == [False, True]


def traced_for(function, *shapes):
    mode = torch_api.new_fake_mode()
    rows = torch_api.symbolic_count(mode, "num_rows", 8)
    with mode:
        tensors = [torch.empty(tuple(rows if size == "n" else size for size in shape)) for shape in shapes]
    return torch_api.functional_aten_graph(function, (rows, *tensors), mode), (rows, *tensors), mode


def test_writes_become_one_copy_each_at_the_end_and_casts_are_resolved():
    def function(rows, x, w):
        x.add_(1)
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.nn.functional.linear(x, w)
        x[0] = 5.0
        return (y * rows,)

    graph, (_, x, w), _ = traced_for(function, ("n", 4), (3, 4))
    ops = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert ops.count(torch.ops.aten.copy_.default) == 1 and ops[-1] is torch.ops.aten.copy_.default
    assert torch.ops.aten._to_copy.default in ops and torch.ops.aten.add_.Tensor not in ops
    assert all("val" in node.meta for node in graph.graph.nodes if node.op == "call_function")
    given = torch.zeros(2, 4)
    (result,) = graph(2, given, torch.ones(3, 4))
    assert result.dtype is torch.bfloat16 and result.tolist() == [[8.0] * 3] * 2
    assert given.tolist() == [[5.0] * 4, [1.0] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_that_consist_of_others_are_taken_apart_for_a_symbolic_count(dtype):
    def function(rows, x, w):
        return (torch.nn.functional.linear(x.to(dtype), w.to(dtype)),)

    graph, _, _ = traced_for(function, (1, "n", 4), (3, 4))
    assert torch.ops.aten.mm.default in [node.target for node in graph.graph.nodes]
    (result,) = graph(5, torch.ones(1, 5, 4), torch.ones(3, 4))
    assert result.tolist() == [[[4.0] * 3] * 5]


def test_ops_that_consist_of_others_are_told():
    aten = torch.ops.aten
    assert all(map(torch_api.is_composite, (aten.linear.default, aten.to.dtype, aten.reshape.default)))
    assert not any(map(torch_api.is_composite, (aten.addmm.default, aten.view.default, aten.add.Tensor)))


def test_inductor_compiles_for_any_count_with_the_graphs_strides_and_leaves_its_settings():
    settings = torch._inductor.config.save_config_portable()
    graph, arguments, mode = traced_for(lambda rows, x: ((x + 1).t().contiguous().t(),), ("n", 4))
    before = torch_api.inductor_cache_counts()
    compiled = torch_api.compile_aten_graph(graph, arguments, mode)
    assert sum(torch_api.inductor_cache_counts()) > sum(before)
    assert torch._inductor.config.save_config_portable() == settings
    for count in (2, 8, 33):
        x = torch.randn(count, 4)
        with torch.no_grad():
            (found,) = compiled(count, x)
        assert torch.equal(found, x + 1) and found.stride() == (1, count)


def test_the_workers_that_compile_kernels_are_woken_for_a_gpu_alone(monkeypatch):
    woken = []
    assert isinstance(inspect.getattr_static(AsyncCompile, "wakeup"), classmethod)
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: woken.append(True))
    hashed = queue.SimpleQueue()
    monkeypatch.setattr(torch_api.process, "_hash_installed_code", hashed.put)
    torch_api.start_compile_workers([3, torch.ones(2), "text"])
    assert woken == [] and hashed.empty()
    mode = FakeTensorMode()
    on_device = FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cuda", 0))
    torch_api.start_compile_workers([3, torch.ones(2), on_device])
    assert woken == [True] and hashed.get(timeout=60) == torch.device("cuda", 0)


def test_the_hashes_that_cache_keys_hold_are_kept():
    assert codecache.torch_key() is codecache.torch_key()
    assert codecache.CacheBase.get_system() is codecache.CacheBase.get_system()
    torch_api.process._hash_installed_code(torch.device("cuda", 99))  # says nothing, wherever it fails


def test_the_settings_that_a_compile_changes_exist():
    known = torch._inductor.config.save_config_portable()
    assert set(torch_api.process._INDUCTOR_PATCHES) <= set(known) | set(torch._inductor.config._config)


def test_no_autocast_inside_the_block():
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
        with torch_api.without_autocast():
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_settings_that_change_results_show_in_words():
    cpu = torch.device("cpu")
    plain = torch_api.numeric_settings(cpu)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_api.numeric_settings(cpu) != plain
    torch.set_default_dtype(torch.float64)
    try:
        assert torch_api.numeric_settings(cpu) != plain
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch_api.numeric_settings(cpu) == plain


def test_a_twin_of_a_fake_has_its_sizes_and_the_memory_that_it_is_given():
    mode = torch_api.new_fake_mode()
    with mode:
        rows = torch_api.symbolic_count(mode, "n", 6)
        base = torch.empty(rows, 4)
        view = base.view(rows, 2, 2)[:, 1:]
        other = torch.empty(rows, 4)
    twin, moved = torch_api.fake_twin(view, None), torch_api.fake_twin(view, other)
    for made in (twin, moved):
        assert str(made.shape) == str(view.shape) and made.stride() == view.stride()
        assert made.storage_offset() == view.storage_offset() and torch_api.is_fake(made)
        assert (made.dtype, made.device, made.requires_grad) == (view.dtype, view.device, False)
    assert len({t.untyped_storage()._cdata for t in (base, twin, moved)}) == 3
    assert moved.untyped_storage()._cdata == other.untyped_storage()._cdata
    with mode:  # ops go on from it as from any other
        assert str((twin * 2).shape) == str(view.shape)
        assert twin.flatten(1).untyped_storage()._cdata == twin.untyped_storage()._cdata
        assert twin.as_strided((rows, 3), (4, 1)).shape[1] == 3
    assert not torch_api.holds_constant(twin)


def test_attributes_that_are_set_on_tensors_are_noted():
    def forward(x, y):
        y.tag = 2
        z = x + 1
        z.other = 3
        return z * y.tag

    with torch_api.tensor_attributes_set() as names:
        torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(2), torch.ones(2))
    assert sorted(names) == ["other", "tag"]
    with torch_api.tensor_attributes_set() as names:
        torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(2))
    assert names == []


def test_all_that_dynamo_looks_at_is_noted_guarded_or_not():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.function, self.number = nn.functional.silu, 2.0

        def forward(self, x):
            return self.function(nn.functional.silu(x)) * self.number

    model = Reads()
    with torch_api.sources_read() as sources:
        compile_with(model.forward, torch.ones(3))
    assert any(source.endswith(".number") for source in sources)
    assert any(source.endswith(".function") for source in sources)
    before = len(sources)
    compile_with(model.forward, torch.ones(3))
    assert len(sources) == before, "the block is over"


def test_sources_may_call_names_of_dynamos_own():
    names = torch_api.names_in_sources()
    assert names["___odict_getitem"](collections.OrderedDict(a=1), "a") == 1
    assert eval("___tuple_iterator_getitem(each, 1)", dict(names), {"each": iter((1, 2))}) == 2


def test_an_object_that_is_not_opaque_has_no_answer_of_its_own():
    assert torch_api.opaque_answer(object()) is None
    assert {"TENSOR_MATCH", "CLOSURE_MATCH"} <= torch_api.guard_kinds()


def test_int8_products_below_a_class_are_those_of_any_row_count():
    """torchao asks for them with `out_dtype`, on a GPU; nothing runs there."""
    from torch._higher_order_ops.out_dtype import out_dtype

    from piecewise.passes.int8_matmul import int8_matmul

    mode = torch_api.new_fake_mode()
    rows = torch_api.symbolic_count(mode, "rows", 8)
    with mode:
        a, b = (torch.empty(sizes, dtype=torch.int8, device="cuda") for sizes in ((rows, 16), (16, 32)))
        wide = torch.empty((16, 32), device="cuda")

    def product(a, b):
        return (out_dtype(torch.ops.aten.mm.default, torch.int32, a, b),)

    def targets(*arguments):
        graph = torch_api.trace_below(
            product, arguments, mode, int_matmul=int8_matmul, torch_function=True
        ).graph
        return [node.target for node in graph.nodes if node.op == "call_function"]

    assert targets(a, b) == [int8_matmul]
    assert int8_matmul not in targets(a, wide) and torch.ops.aten.mm.default in targets(a, wide)


def test_which_classes_say_what_is_inside():
    from torch.testing._internal.two_tensor import TwoTensor

    class Kin(torch.Tensor):
        pass

    plain = torch.zeros(2)
    parameter, two = torch.nn.Parameter(plain), TwoTensor(plain, plain)
    assert [torch_api.is_wrapper(each) for each in (plain, parameter, two)] == [False, False, True]
    assert not any(map(torch_api.is_opaque, (plain, parameter, two, plain.as_subclass(Kin))))
    assert [torch_api.has_torch_function(each) for each in (plain, parameter, two)] == [False] * 3
    assert torch_api.has_torch_function(plain.as_subclass(Kin))
    assert not torch_api.has_own_torch_function(plain.as_subclass(Kin))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_transforms_and_tracers_are_seen() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_api.forbids_replay())
        return x

    x = torch.ones(2)
    look(x)
    torch.func.vmap(look)(x)
    torch.jit.trace(look, x, check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        look(x)
    with torch.compiler.set_stance("force_eager"):
        look(x)
        assert torch_api.is_forced_eager()
    with torch.compiler.set_stance("eager_on_recompile"):
        look(x)
    look(x)
    assert seen == [False, True, True, True, True, False, False] and not torch_api.is_forced_eager()


def test_einsums_are_chosen_again_after_the_last_of_several_blocks():
    settings = torch.backends.opt_einsum
    before = settings.enabled
    first, second = torch_api.einsums_from_the_left(), torch_api.einsums_from_the_left()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not settings.enabled
    second.__exit__(None, None, None)
    assert settings.enabled == before
