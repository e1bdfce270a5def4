"""The benchmark's record: what is compared with what, what is left out and why. Nothing is timed here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from inspection import inspect
from torch import Tensor, nn

import boundary_ops
import piecewise
from piecewise.errors.tools import NoMatplotlib, NothingToMeasure, WrongCase
from piecewise.tools.bench.latency import LatencyBench
from piecewise.tools.bench.result import BenchResult, Spread
from piecewise.tools.bench.variants import PEERS, VariantMaker, run_floor
from piecewise.tools.buckets.step_cost import BENCH_SCHEMA

HIDDEN = 8


def _copy(x: Tensor, out: Tensor) -> None:
    out.copy_(x.cumsum(0))


_copy_op = boundary_ops.define("latency_test::sum(Tensor x, Tensor(a!) out) -> ()", _copy)


class Model(nn.Module):
    def __init__(self, *, uses_op: bool, wrong_by: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.uses_op, self.wrong_by = uses_op, wrong_by

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        if self.uses_op:
            out = torch.empty_like(x)
            _copy_op(x, out)
        else:
            out = x.cumsum(0)
        return {"y": self.second(out) + self.wrong_by}


def make_case(*, wrong_by: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> piecewise.PrefillCase:
    unmodified = Model(uses_op=False).to(dtype).eval()
    model = Model(uses_op=True, wrong_by=wrong_by).to(dtype).eval()
    model.load_state_dict(unmodified.state_dict())

    def inputs(n: int) -> Any:
        generator = torch.Generator().manual_seed(n)
        return (torch.randn(n, HIDDEN, generator=generator).to(dtype),), {}

    return piecewise.PrefillCase(model, inputs, piecewise.PrefillCase(unmodified, inputs))


def run(case: piecewise.PrefillCase, **options: Any) -> BenchResult:
    settings = dict(sizes=[4, 8], variants=["eager", "graphed", "floor"], rounds=2, spec="here:case")
    config = piecewise.PiecewiseConfig(buckets=(2, 4, 8), progress=False)
    return LatencyBench(case, **{**settings, "config": config, **options}).run()


def test_each_size_and_variant_has_a_line_and_a_ratio() -> None:
    found = json.loads(run(make_case()).to_json())
    assert found["schema"] == BENCH_SCHEMA and found["skipped"] == {} and found["sizes"] == [4, 8]
    lines = {(line["num_tokens"], line["variant"]) for line in found["results"]}
    assert lines == {(n, name) for n in (4, 8) for name in ("eager", "graphed", "floor")}
    for line in found["results"]:
        for quantity in ("latency_ms", "host_ms"):
            spread = line[quantity]
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert line["host_ms"]["median"] <= line["latency_ms"]["median"]
        assert 0 < line["max_abs_error"] < 0.2
    pairs = {(line["quantity"], line["of"], line["over"]) for line in found["ratios"]}
    assert pairs == {
        ("latency", "graphed", "floor"),
        ("latency", "eager", "graphed"),
        ("error", "graphed", "eager"),
    }
    assert [line["median"] for line in found["ratios"] if line["quantity"] == "error"] == [1.0, 1.0]
    assert found["environment"]["torch"] == torch.__version__
    capture = found["variants"]["graphed"]["capture"]
    assert capture["captured"] == [2, 4, 8] and all(b["num_graphs"] == 2 for b in capture["buckets"])
    memory = found["memory"]
    assert memory["buckets"] == [2, 4, 8] and memory["ratio"] == 1.0 and memory["device_bytes"] > 0


def test_a_wrong_result_shows_in_the_errors() -> None:
    found = run(make_case(wrong_by=3.0))
    for n in (4, 8):
        ratio = found.ratio("graphed", "eager", n, quantity="error")
        assert ratio is not None and ratio > 10
    missing = run(make_case(wrong_by=float("nan")))
    wrong = [line["max_abs_error"] for line in missing.results if line["variant"] == "graphed"]
    assert wrong == [float("inf")] * 2


def test_errors_are_the_mean_over_inputs_of_other_seeds() -> None:
    plain = make_case()
    seen: list[tuple[int, int]] = []

    def inputs(n: int, *, seed: int) -> Any:
        seen.append((n, seed))
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(n, HIDDEN, generator=generator).to(torch.bfloat16),), {}

    case = piecewise.PrefillCase(plain.model, inputs, piecewise.PrefillCase(plain.baseline.model, inputs))
    found = run(case, sizes=[4])
    draws = {line["variant"]: line["num_draws"] for line in found.results}
    assert draws == {"eager": 32, "graphed": 32, "floor": 1}
    assert seen[-1] == (4, 0)  # those are timed
    reference, errors = case.baseline.model.float(), []
    for seed in range(32):
        (x,), _ = inputs(4, seed=seed)
        with torch.inference_mode():
            errors.append(float((case.model(x)["y"].float() - reference(x.float())["y"]).abs().max()))
    (graphed,) = [line["max_abs_error"] for line in found.results if line["variant"] == "graphed"]
    assert graphed == pytest.approx(sum(errors) / 32)
    assert len(set(errors)) > 1


def test_what_cannot_be_measured_is_left_out_with_its_reason() -> None:
    names = ["eager", "reduce-overhead", "graphed", "floor", "breakable"]
    found = run(make_case(), sizes=[4, 6], variants=names)
    assert {line["variant"] for line in found.results if line["num_tokens"] == 4} == {
        "eager",
        "graphed",
        "floor",
    }
    assert {line["variant"] for line in found.results if line["num_tokens"] == 6} == {"eager", "graphed"}
    assert found.skipped["floor, 6 tokens"] == "6 is no captured bucket"
    assert "graphs of its own" in found.skipped["reduce-overhead"] and "breakable" in found.skipped
    table = str(found)
    assert "left out: 6 is no captured bucket" in table and "latency, graphed ÷ floor" in table
    assert PEERS == ("breakable",)


def test_a_size_that_runs_eagerly_is_not_called_graphed() -> None:
    found = run(make_case(), sizes=[4, 16])
    assert "above_largest_bucket" in found.skipped["graphed, 16 tokens"]
    assert {line["variant"] for line in found.results if line["num_tokens"] == 16} == {"eager"}


def test_the_floor_runs_the_plans_kernels() -> None:
    case = make_case(dtype=torch.float32)
    config = piecewise.PiecewiseConfig(buckets=(4,), progress=False)
    with torch.inference_mode():
        maker = VariantMaker(case, config, [4])
        graphed, _ = maker._captured("graphed")
        (signature,) = inspect(graphed).signatures
        functions = signature.assemblers[0].functions
        with case.inputs(4) as (args, kwargs):
            _, leaves = signature.match(signature.binder.bind(*args, **kwargs))
            (found,) = run_floor(signature.served[4].plan, functions, leaves, 4)
            assert torch.equal(found, case.model(*args, **kwargs)["y"])


def test_a_record_is_written_whole_and_drawn(tmp_path: Any) -> None:
    found = run(make_case(), sizes=[4])
    with pytest.raises(FileNotFoundError, match="there is no folder .*new"):
        found.write(tmp_path / "new" / "result.json")
    (tmp_path / "new").mkdir()
    found.write(tmp_path / "new" / "result.json")
    assert json.loads((tmp_path / "new" / "result.json").read_text())["spec"] == "here:case"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result.json"]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(NoMatplotlib):
            found.plot(tmp_path / "plot.png")
    else:
        found.plot(tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_spread_is_the_median_and_the_quartiles() -> None:
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0)
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0)


@pytest.mark.parametrize("options", [dict(sizes=[]), dict(rounds=0)])
def test_nothing_to_measure_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(NothingToMeasure):
        run(make_case(), **options)


def test_a_baseline_is_a_case() -> None:
    case = make_case()
    with pytest.raises(WrongCase, match="PrefillCase.baseline"):
        piecewise.PrefillCase(case.model, case.make_inputs, case.model)


def test_lowered_kernels_are_compared_with_a_floor_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from piecewise import torch_api

    compiled: list[Any] = []

    def pretended(graph: Any, arguments: Any, fake_mode: Any) -> Any:
        compiled.append(graph)
        return lambda *given: [result + 0.5 for result in graph(*given)]

    monkeypatch.setattr(torch_api, "compile_aten_graph", pretended)
    names = ["eager", "graphed", "graphed-inductor", "floor-inductor"]
    case = make_case(dtype=torch.float32)
    found = run(case, sizes=[4], variants=names)
    pairs = {(line["of"], line["over"]) for line in found.ratios if line["quantity"] == "latency"}
    assert ("graphed-inductor", "floor-inductor") in pairs and ("graphed-inductor", "graphed") in pairs
    assert ("graphed", "floor-inductor") not in pairs and len(compiled) == 2
    errors = {line["variant"]: line["max_abs_error"] for line in found.results}
    assert errors["graphed-inductor"] == errors["floor-inductor"] > 0.4 > errors["graphed"]


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_each_variant_comes_as_often_before_another_as_after_it(names: str) -> None:
    case = make_case()
    bench = LatencyBench(
        case,
        spec="here:case",
        sizes=[4],
        variants=[],
        config=piecewise.PiecewiseConfig(),
        rounds=2 * len(names),
    )
    order: list[str] = []
    bench._take_turns({name: lambda name=name: order.append(name) for name in names}, float("inf"))
    taken = "".join(order[3 * len(names) :: 3])  # three calls to warm up, and three in a round
    rounds = [taken[at : at + len(names)] for at in range(0, len(taken), len(names))]
    assert (
        rounds == {"ab": ["ab", "ba", "ba", "ab"], "abc": ["abc", "cba", "bca", "acb", "cab", "bac"]}[names]
    )
