"""Segments lowered by Inductor are eager's to rounding, compiled once per distinct one, and fail alone."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inspection import inspect
from lowered_models import captured, check
from torch import nn
from toy_models import HIDDEN, Toy, make_ids, mix, shift

import piecewise
from piecewise import torch_api
from piecewise.errors.lowering import SegmentNotLowered
from piecewise.ir.graph_key import graph_key
from piecewise.lowering import lowering
from piecewise.lowering.lowering import FIELDS_IN_KEY, Lowering
from piecewise.report import progress
from piecewise.settings.config import PiecewiseConfig
from piecewise.torch_backend import piecewise_backend
from runners.errors import CaptureError, ConfigError
from runners.state.state_check import StateRef

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def compiles(monkeypatch):
    """Runs the aten graphs as they are, which takes no compiler; gives those that were asked for."""
    asked = []

    def pretended(graph, arguments, fake_mode):
        asked.append(graph)
        return graph

    monkeypatch.setattr(torch_api, "compile_aten_graph", pretended)
    return asked


def num_steps(graphed, bucket):
    runners = inspect(graphed).runners
    return [runner.graph_for(bucket).num_ops for runner in runners]


def plan_of(graphed):
    return inspect(graphed).plan


# With the compiler.


def test_a_model_is_eagers_to_rounding_at_every_size_and_each_segment_one_step():
    settings = torch._inductor.config.save_config_portable(), torch._functorch.config.save_config_portable()
    model = Toy(num_blocks=4).eval()
    graphed, report = check(model)
    assert num_steps(graphed, 8) == [1] * 5
    assert (report.num_segments, report.num_distinct, report.num_compiled, report.kept_eager) == (5, 3, 3, ())
    verified = graphed.verify(*[make_ids(6), torch.arange(6)])
    assert verified.ok, verified
    assert settings == (
        torch._inductor.config.save_config_portable(),
        torch._functorch.config.save_config_portable(),
    )
    again = graphed.refresh().lowerings[0]
    assert (again.num_compiled, again.num_reused, again.num_segments) == (0, 3, 5)


def test_a_transformers_llama_is_eagers_to_rounding():
    pytest.importorskip("transformers")
    from small_transformers import build

    from boundary_ops import PagedKVCache, PrefillBatch
    from boundary_ops.huggingface.adapter import attach

    model = build("Llama", num_hidden_layers=4)
    cache = PagedKVCache.for_model(model, num_tokens=128, block_size=4)
    attach(model, cache)
    graphed = piecewise.compile(model, buckets=[8, 16], lowering="inductor", progress=False)
    ids = torch.arange(8).unsqueeze(0)
    report = graphed.capture(input_ids=ids, position_ids=ids.clone(), use_cache=False)
    assert report.ok and (report.lowerings[0].num_segments, report.lowerings[0].num_distinct) == (5, 3)
    with torch.no_grad():
        for n in (2, 5, 8, 13, 16):
            batch = PrefillBatch.build(cache, [f"request {n}"], [n])
            with batch:
                packed = batch.pack([list(range(1, n + 1))])
                verified = graphed.verify(input_ids=packed, position_ids=batch.positions, use_cache=False)
            assert verified.ok and verified.checks[0].path == "graph", verified


class Mutating(nn.Module):
    """Writes a table in a graph segment, reads a row of it that is a tensor of its own, and an input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.table = torch.linspace(-1, 1, 4 * HIDDEN).reshape(4, HIDDEN)
        self.row = self.table[1]
        self.counter = nn.Buffer(torch.zeros(3, dtype=torch.int64))
        self.cache = torch.zeros(64, HIDDEN)

    def forward(self, x, added):
        y = self.linear(x)
        self.table.mul_(0.5)
        y = y + self.row
        self.row.add_(1)
        self.counter.add_(2)
        y = y + self.table[1] * self.counter.sum()
        x.add_(added)
        out = torch.empty_like(y)
        mix(y, x, y, out, self.cache)
        return out * 2, x


def mutated_inputs(n):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, HIDDEN, generator=generator), torch.randn(n, HIDDEN, generator=generator)


def test_a_segment_that_writes_memory_of_two_inputs_keeps_eager_kernels_and_is_right():
    graphed, report = check(Mutating().eval(), arguments=mutated_inputs, buckets=(4, 8), sizes=(2, 4, 5, 8))
    (kept,) = report.kept_eager
    assert "segment 0" in kept.segment and "share memory that it writes" in kept.reason
    lowered = inspect(graphed).signature.lowerings[0].lowered
    assert num_steps(graphed, 4)[0] > 1 and [each.segment.index for each in lowered] == [2, 4]


def test_a_restart_finds_every_segment_on_disk_whatever_the_hash_seed(tmp_path):
    program = """
import torch, piecewise, json
from inspection import inspect
from toy_models import Toy
torch.manual_seed({seed})
graphed = piecewise.compile(Toy(num_blocks=2).eval(), buckets=[4, 8], lowering="inductor", progress=False)
report = graphed.capture(torch.arange({tokens}), torch.arange({tokens})).lowerings[0]
from torch._dynamo.utils import counters
found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
keys = sorted(inspect(graphed).lowering._compiled)
print(json.dumps([report.num_compiled, report.num_from_disk, found > 0, keys]))
"""
    import json

    found = []
    for seed, tokens in ((1, 5), (2, 7)):
        environment = {
            **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "models")]),
        }  # fmt: skip
        text = program.format(seed=seed, tokens=tokens)
        ran = subprocess.run(
            [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True
        )
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    (first, second) = found
    assert first[:3] == [3, 0, False] and second[:3] == [3, 3, True]
    assert first[3] == second[3]


# Without it: what is compiled, how often, and what is made of it.


def test_layers_that_differ_in_their_parameters_alone_are_compiled_once(compiles):
    few, many = (captured(Toy(num_blocks=layers).eval())[1].lowerings[0] for layers in (4, 16))
    assert len(compiles) == 6
    assert (few.num_segments, few.num_distinct, few.num_compiled) == (5, 3, 3)
    assert (many.num_segments, many.num_distinct, many.num_compiled) == (17, 3, 3)


class Widths(nn.Module):
    """Three layers of one program: two of one width, one of another; the dtype of the last can differ."""

    def __init__(self, widths=(8, 8, 12)):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(HIDDEN, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, HIDDEN) for width in widths)
        self.cache = torch.zeros(64, HIDDEN)

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x))
            out = torch.empty_like(x)
            mix(x, x, x, out, self.cache)
            x = out
        return x


def test_another_width_or_another_stride_is_another_segment(compiles):
    arguments = dict(arguments=lambda n: (torch.randn(n, HIDDEN),))
    assert captured(Widths((8, 8, 8)), **arguments)[1].lowerings[0].num_distinct == 1
    assert captured(Widths((8, 8, 12)), **arguments)[1].lowerings[0].num_distinct == 2
    model = Widths((8, 8, 8))
    model.up[1].weight = nn.Parameter(torch.randn(HIDDEN, 8).T)
    assert captured(model, **arguments)[1].lowerings[0].num_distinct == 2
    assert len(compiles) == 1 + 2 + 2


def test_one_token_and_the_sizes_that_are_asked_for_are_compiled_alone(compiles):
    _, report = captured(Toy(num_blocks=1).eval(), buckets=(1, 4, 8), compile_sizes=(8,))
    assert report.lowerings[0].num_compiled == 2 * 3  # any, 1, 8
    placeholders = [len(graph.graph.find_nodes(op="placeholder")) for graph in compiles]
    assert placeholders[0] - 1 == placeholders[1] == placeholders[2]


def test_compiled_for_some_sizes_is_eagers_to_rounding(compiles):
    check(Toy(num_blocks=1).eval(), buckets=(1, 4, 8, 16), compile_sizes=(4, 16))


def test_a_bucket_that_a_compile_excludes_is_compiled_alone(monkeypatch):
    def assumes(graph, arguments, fake_mode):
        if isinstance(arguments[0], torch.SymInt):
            assert arguments[0] % 4 == 0  # as a compiler may: noted as a guard
        return graph

    monkeypatch.setattr(torch_api, "compile_aten_graph", assumes)
    arguments = dict(arguments=rows_of)
    graphed, report = check(Tanh().eval(), buckets=(4, 6, 8), sizes=(3, 5, 6, 8), **arguments)
    assert (report.num_distinct, report.num_compiled) == (2, 4) and report.kept_eager == ()
    by_rows = inspect(graphed).signature.lowerings[0].lowered[0].by_rows
    assert by_rows[4] is by_rows[8] is not by_rows[6]


class Projections(nn.Module):
    """Three linears of one input, which fusions pack into one."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.o, self.cache = nn.Linear(HIDDEN, HIDDEN), torch.zeros(64, HIDDEN)

    def forward(self, x):
        out = torch.empty_like(x)
        mix(self.q(x), self.k(x), self.v(x), out, self.cache)
        return self.o(out)


def test_what_fusions_have_made_is_lowered(compiles):
    graphed, report = check(Projections().eval(), arguments=rows_of, fusions=("pack_linears",))
    assert dict(graphed.report().plans[0].fusions.matches)["pack_linears"] == 1
    assert report.kept_eager == () and num_steps(graphed, 8) == [1, 1]
    ops = [node.target for node in compiles[0].graph.nodes if node.op == "call_function"]
    assert ops.count(torch.ops.aten.mm.default) == 1


class Tanh(nn.Module):
    """Two layers of which only the second has a tanh."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.cache = torch.zeros(64, HIDDEN)

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh() if index == 1 else layer(x)
            out = torch.empty_like(x)
            mix(x, x, x, out, self.cache)
            x = out
        return x


def rows_of(n):
    return (torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)),)


def refuse_tanh(graph, arguments, fake_mode):
    if graph.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
        raise NotImplementedError("no tanh here\nand more")
    return graph


def test_I6_a_segment_that_cannot_be_compiled_keeps_eager_kernels_alone(monkeypatch):
    monkeypatch.setattr(torch_api, "compile_aten_graph", refuse_tanh)
    graphed, report = check(Tanh().eval(), arguments=rows_of)
    (kept,) = report.kept_eager
    assert "segment 2" in kept.segment and kept.reason == "NotImplementedError: no tanh here"
    assert (
        "eager kernels in segment 2" in str(graphed.report()) and "no tanh here" in graphed.report().to_json()
    )
    plan, functions = plan_of(graphed), inspect(graphed).assembler.functions
    eager = [s.index for s in plan.graph_segments() if functions[s.index] is s.function and not s.views_only]
    assert eager == [2]


def test_with_strict_it_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(torch_api, "compile_aten_graph", refuse_tanh)
    graphed = piecewise.compile(Tanh().eval(), buckets=[4], lowering="inductor", strict=True, progress=False)
    with pytest.raises(SegmentNotLowered, match="segment 2(.|\n)*no tanh here"):
        graphed.capture(*rows_of(3))


def test_I6_a_kernel_that_fails_when_it_first_runs_keeps_eager_ones_at_that_size(monkeypatch):
    def small_only(graph, arguments, fake_mode):
        def run(rows, *tensors):
            if rows > 8 and "tanh" in graph.code:
                raise RuntimeError("out of shared memory")
            return graph(rows, *tensors)

        return run

    monkeypatch.setattr(torch_api, "compile_aten_graph", small_only)
    graphed, _ = check(Tanh().eval(), arguments=rows_of)
    (kept,) = graphed.report().captures[0].lowerings[0].kept_eager
    assert (
        "segment 2" in kept.segment and "at 16 rows" in kept.reason and "out of shared memory" in kept.reason
    )
    strict = piecewise.compile(Tanh().eval(), buckets=[16], lowering="inductor", strict=True, progress=False)
    with pytest.raises(CaptureError, match="out of shared memory"):
        strict.capture(*rows_of(3))


class Pinned(nn.Module):
    """A boundary op writes half of a tensor that is made in a graph and read by a later one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.o = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        both = self.linear(x)
        shift(x * both[:, HIDDEN:], both[:, :HIDDEN])
        return self.o(both), both[:, HIDDEN:]


def test_a_view_that_a_boundary_op_writes_stays_a_view_of_what_is_read_later(compiles):
    graphed, report = check(Pinned().eval(), arguments=rows_of)
    assert report.kept_eager == ()
    first = inspect(graphed).signature.lowerings[0].lowered[0].layout
    assert [result.source for result in first.results].count("cover") == 1


class Overlapping(nn.Module):
    """The caller is given two views of one memory, of which none covers the other."""

    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(HIDDEN, HIDDEN), torch.zeros(64, HIDDEN)

    def forward(self, x):
        out = torch.empty_like(x)
        mix(x, x, x, out, self.cache)
        y = self.linear(out)
        return y[:, :10], y[:, 6:], y.t()[2:5].t() * 1, y.argmax(-1), y > 0


def test_results_that_overlap_lie_in_one_memory_as_eagers_do(compiles):
    graphed, report = check(Overlapping().eval(), arguments=rows_of)
    assert report.kept_eager == ()
    with torch.no_grad():
        left, right, *_ = graphed(*rows_of(5))
    left[:, 6] = 7.0
    assert torch.equal(right[:, 0], torch.full((5,), 7.0))


class Twice(nn.Module):
    """Two results of equal content, one of which a boundary op writes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        y = self.linear(x)
        z = y.clone()
        out = torch.empty_like(y)
        shift(y, out)
        return z + out, z.t()


def test_results_of_two_memories_never_share_one(monkeypatch):
    def merges(graph, arguments, fake_mode):
        def run(*given):
            results = list(graph(*given))
            twins = [i for i, r in enumerate(results) if r.shape == results[0].shape]
            for index in twins:
                if torch.equal(results[index], results[twins[0]]):
                    results[index] = results[twins[0]]
            return results

        return run

    monkeypatch.setattr(torch_api, "compile_aten_graph", merges)
    check(Twice().eval(), arguments=rows_of)


def test_results_have_the_plans_strides_whatever_the_compiler_gives(monkeypatch):
    def flips(graph, arguments, fake_mode):
        return lambda *given: [r.t().contiguous().t() if r.dim() == 2 else r for r in graph(*given)]

    monkeypatch.setattr(torch_api, "compile_aten_graph", flips)
    graphed, _ = check(Tanh().eval(), arguments=rows_of)
    plan, assembler = plan_of(graphed), inspect(graphed).assembler
    for segment in plan.graph_segments():
        for index, tensor in zip(
            segment.outputs, assembler.runners[segment.index].graph_for(8).outputs, strict=True
        ):
            assert tensor.stride() == tuple(plan.values[index].strides(8))


def test_a_function_that_returns_its_argument_does_not_hand_it_on(monkeypatch):
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            y, out = x * 1, self.linear(x)
            shift(y, out)
            return out + x

    def returns_argument(graph, arguments, fake_mode):
        def run(rows, *given):
            results = list(graph(rows, *given))
            return [next((g for g in given if g.shape == r.shape and torch.equal(g, r)), r) for r in results]

        return run

    monkeypatch.setattr(torch_api, "compile_aten_graph", returns_argument)
    check(Same().eval(), arguments=rows_of)


class Casting(Toy):
    """A region of forward runs under autocast, and one inside it does not."""

    def forward(self, ids, positions=None):
        x = self.embedding(ids)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.blocks[0].qkv(x)
            with torch.autocast("cpu", enabled=False):
                z = self.blocks[0].o(x)
        out = torch.empty_like(x)
        mix(y[:, :HIDDEN].float(), x, z, out, self.blocks[0].cache)
        return self.projection(out)


def test_casts_of_the_region_and_of_the_caller_are_those_of_eager(compiles):
    model = Casting().eval()
    graphed, report = check(model)
    assert report.kept_eager == ()
    for plain in (Toy(num_blocks=1).eval(), Casting().eval()):  # the second has a region without casts
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            ambient, _ = captured(plain)
            got, want = ambient(make_ids(8), torch.arange(8)), plain(make_ids(8), torch.arange(8))
        assert ambient.stats.replays == 1 and got.dtype is want.dtype is torch.bfloat16
        assert torch.equal(got, want)


def test_the_backend_lowers_too(compiles):
    model = Toy(num_blocks=1).eval()
    compiled = torch.compile(
        copy.deepcopy(model), backend=piecewise_backend, dynamic=True,
        options={"buckets": [4, 8], "lowering": "inductor", "progress": False},
    )  # fmt: skip
    with torch.no_grad(), piecewise.capture_window():
        for n in (5, 8):
            torch.testing.assert_close(compiled(make_ids(n)), model(make_ids(n)))
    assert piecewise.handle(compiled).stats.replays == 2 and compiles


def _shown_many_times(model, x):
    pair, wide = torch.stack([x * 2, x], 1), x.unsqueeze(1).expand(-1, 3, -1)
    flat = pair.reshape(-1, 2 * HIDDEN), wide.reshape(-1, 3 * HIDDEN)
    return x.repeat_interleave(2, dim=1), pair, wide, *flat


def test_results_that_show_an_element_many_times_are_compiled():
    _, report = check(Toy(_shown_many_times, num_blocks=1, project=False).eval())
    assert not report.kept_eager


# Settings, keys and reports.


FIELDS_NOT_IN_KEY = frozenset(
    {
        *("buckets", "max_padding_ratio", "max_num_tokens", "max_num_seqs", "max_seq_len", "compile_sizes"),
        *("decode_batch_sizes", "max_signatures", "warmup_steps", "capture", "engine", "num_streams"),
        *("fusions", "progress", "frontend", "boundary_ops", "boundary", "min_coverage", "outputs", "strict"),
    }
)


def test_every_setting_is_in_the_key_or_deliberately_not():
    names = {item.name for item in dataclasses.fields(PiecewiseConfig)}
    assert FIELDS_IN_KEY | FIELDS_NOT_IN_KEY == names, "decide whether the new setting changes compiled code"
    assert not FIELDS_IN_KEY & FIELDS_NOT_IN_KEY


def test_the_key_has_what_changes_the_code_and_no_more(compiles):
    graphed, _ = captured(Toy(num_blocks=1).eval())
    plan = plan_of(graphed)

    def keys(**settings):
        config = dataclasses.replace(graphed.piecewise_config, **settings)
        made = Lowering(config)
        made.lower(plan, (4, 8))
        return set(made._compiled)

    plain = keys()
    assert plain == keys(warmup_steps=1, outputs="view", strict=True, buckets=(4, 8)) and len(plain) == 2
    assert len(keys(compile_sizes=(4,)) - plain) == 2
    torch.set_float32_matmul_precision("high")
    try:
        assert not plain & keys()
    finally:
        torch.set_float32_matmul_precision("highest")


def scaled_by(box):
    @torch.compiler.allow_in_graph
    def scaled(x):
        return x * box[0]

    return scaled


class Chooses(Toy):
    """Applies one of two functions that go by one name."""

    def __init__(self):
        super().__init__(num_blocks=1)
        self.boxes = [2.0], [-3.0]
        self.one, self.other = map(scaled_by, self.boxes)

    def forward(self, ids, positions=None, flag=False):
        x = self.embedding(ids)
        x = self.blocks[0](self.other(x) if flag else self.one(x))
        return self.projection(x)


@pytest.mark.parametrize("fusions", [(), ("auto",)])
def test_functions_of_one_name_are_not_one_program(compiles, fusions):
    model = Chooses().eval()
    graphed, _ = captured(model, buckets=(8,), fusions=fusions)
    graphed.capture(make_ids(5), torch.arange(5), flag=True)
    ids, positions = make_ids(6), torch.arange(6)
    with torch.no_grad():
        for flag in (False, True):
            torch.testing.assert_close(graphed(ids, positions, flag), model(ids, positions, flag))
        assert graphed.stats.replays == 2
        for box in model.boxes:  # which nothing but a new trace can find
            box[0] = 7.0
        graphed.refresh()
        for flag in (False, True):
            torch.testing.assert_close(graphed(ids, positions, flag), model(ids, positions, flag))
    assert graphed.stats.replays == 4


def test_programs_of_torchs_functions_have_one_key_in_each_capture():
    keys = []
    for _ in range(2):
        graphed, _ = captured(Toy(num_blocks=2).eval(), lowering="eager")
        keys.append([segment.lowering_key for segment in plan_of(graphed).graph_segments()])
    assert keys[0] == keys[1]


def test_graph_keys_have_no_addresses():
    graphed, _ = captured(Toy(num_blocks=2).eval(), lowering="eager")
    for segment in plan_of(graphed).graph_segments():
        text = repr(graph_key(plan_of(graphed), segment))
        assert "0x" not in text and "[n, 16]" in text and segment.lowering_key in text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(compile_sizes=[8]), "compile_sizes: expected () where lowering is 'eager'"),
        (dict(compile_sizes=[8, 12], lowering="inductor"), "compile_sizes[1]: expected one of the buckets"),
        (dict(compile_sizes=[8, 8], lowering="inductor"), "compile_sizes[1]"),
        (dict(lowering="triton"), "lowering: expected 'eager' or 'inductor'"),
    ],
)
def test_compile_sizes_that_do_nothing_are_refused(settings, says):
    with pytest.raises(ConfigError) as caught:
        PiecewiseConfig(buckets=(4, 8), **settings)
    assert says in str(caught.value)


def test_sizes_out_of_reach_are_not_compiled_either():
    config = PiecewiseConfig(buckets=(4, 8, 16), compile_sizes=(4, 16), lowering="inductor", max_seq_len=8,
                             max_num_seqs=1)  # fmt: skip
    assert config.within_limits()[0].compile_sizes == (4,)


class Marked(torch.Tensor):
    """What a quantized weight may be: a tensor whose ops are its own."""


def test_explain_says_what_will_be_compiled_and_what_not():
    model = Toy(num_blocks=2).eval()
    graphed = piecewise.compile(model, buckets=[4, 8], lowering="inductor", progress=False)
    shown = graphed.explain(make_ids(5), torch.arange(5))
    assert "3 graph segments, 3 distinct, to be lowered by inductor" in str(shown)
    assert "to be lowered" in shown.to_markdown() and not shown.asdict()["lowering"]["is_done"]
    assert "to be lowered" not in str(piecewise.explain(model, make_ids(5), torch.arange(5)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(state=StateRef({"w": Marked(torch.ones(2))}, "w", "w")), "is a Marked, no plain tensor"),
        (dict(sizes=None), "has a size that is not a function of the token count"),
        (dict(dtype=None), "has a size that is not a function of the token count"),
    ],
)
def test_what_cannot_be_lowered_is_previewed(change, says):
    graphed, _ = captured(Toy(num_blocks=1).eval(), lowering="eager")
    plan = plan_of(graphed)
    index = plan.segments[0].inputs[-1]
    values = [dataclasses.replace(v, **change) if v.index == index else v for v in plan.values]
    plan = dataclasses.replace(plan, values=tuple(values))
    config = PiecewiseConfig(buckets=(4,), lowering="inductor", progress=False)
    (kept,) = Lowering(config).preview(plan, (4,)).kept_eager
    assert "segment 0" in kept.segment and says in kept.reason
    (same,) = (
        Lowering(config)
        .lower(dataclasses.replace(plan, segments=plan.segments[:1]), (4,))
        .report()
        .kept_eager
    )
    assert same == kept


def test_views_of_one_memory_under_two_dtypes_are_not_lowered(compiles):
    class Bits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)
            self.cache = torch.zeros(64, HIDDEN)
            self.words = torch.zeros(4, dtype=torch.float32)
            self.bits = self.words.view(torch.int32)

        def forward(self, x):
            x = self.linear(x)
            self.words.add_(1)
            x = x + self.bits[0]
            out = torch.empty_like(x)
            mix(x, x, x, out, self.cache)
            return out

    graphed, report = check(Bits().eval(), arguments=rows_of)
    (kept,) = report.kept_eager
    assert "share memory that it writes" in kept.reason


def test_the_report_tells_the_parts_of_the_start_up(compiles):
    _, report = captured(Toy(num_blocks=1).eval())
    parts = dataclasses.asdict(report.times)
    assert set(parts) == {"trace", "lowering", "warm_up", "capture"}
    assert all(took > 0 for took in parts.values())
    assert "start-up took" in str(report) and "lowered by inductor" in str(report)
    assert report.asdict()["lowerings"][0]["num_distinct"] == 2


def test_progress_names_each_part_and_is_silent_when_asked(compiles, monkeypatch):
    said, silent = [], progress.progress_bar

    class Bar:
        def set_description(self, text):
            said.append(text)

        def set_postfix_str(self, text): ...
        def update(self, count): ...
        def close(self): ...

    def made(total, *, enabled):
        return Bar() if enabled else silent(total, enabled=False)

    for module in (progress, lowering, sys.modules["piecewise.capture.store"]):
        monkeypatch.setattr(module, "progress_bar", made)
    arguments = make_ids(5), torch.arange(5)
    quiet = piecewise.compile(Toy(num_blocks=1).eval(), buckets=[4], lowering="inductor", progress=False)
    quiet.capture(*arguments)
    assert said == []
    loud = piecewise.compile(Toy(num_blocks=1).eval(), buckets=[4], lowering="inductor")
    loud.capture(*arguments)
    assert said == ["tracing", "capturing bucket 4", "lowering segments"]
