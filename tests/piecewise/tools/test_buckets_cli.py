"""`piecewise buckets plan | check | show`: what they print, write and refuse."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed_files import MALFORMED
from torch import nn
from traces import TRACES, needs_traces

import boundary_ops
import piecewise
from piecewise.capture.traffic_recorder import TrafficRecorder
from piecewise.settings.config import PiecewiseConfig
from piecewise.tools import cli
from piecewise.tools.buckets.planner import BucketPlans, evaluate
from piecewise.tools.buckets.steps import Histogram
from piecewise.torch_backend import piecewise_backend
from runners.errors import ConfigError


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIECEWISE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def requests_file(tmp_path):
    """Requests of 1 to 400 tokens, the short ones more often."""
    tokens = np.random.default_rng(0).geometric(0.02, 3000).clip(1, 400)
    path = tmp_path / "requests.txt"
    path.write_text("\n".join(map(str, tokens)))
    return path


def tokens_in(path) -> np.ndarray:
    return np.array(path.read_text().split(), np.int64)


def run(*argv) -> int:
    return cli.main(["buckets", *map(str, argv)])


def plan_json(capsys, *argv) -> dict:
    assert run("plan", *argv, "--format", "json", "--no-progress") == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *argv) -> str:
    assert run(*argv) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("piecewise: ") and "Rule:" in printed.err and "Fix:" in printed.err
    assert "Traceback" not in printed.err
    return printed.err


def test_a_plan_is_the_planner_s_and_stands_beside_the_engines_grids(capsys, requests_file):
    found = plan_json(capsys, "--traffic", requests_file, "--max-graphs", 6)
    steps = Histogram.of(tokens_in(requests_file))
    assert found["cover"] == int(steps.sizes[-1]) and found["cost_unit"] == "tokens"
    by_name = {line["name"]: line for line in found["compared"] if line["name"] != "plan, as many"}
    assert set(by_name) == {"tensorrt-llm", "sglang", "vllm", "plan"}
    plan = by_name["plan"]
    assert tuple(plan["buckets"]) == BucketPlans(steps, cover=found["cover"]).of(6)
    assert plan["padding"] == pytest.approx(evaluate(tuple(plan["buckets"]), steps).padding)
    assert plan["num_graphs"] == 6 and plan["graphed_steps"] == plan["graphed_tokens"] == 1.0
    for grid, same in zip(found["compared"][:-1:2], found["compared"][1:-1:2], strict=True):
        assert same["name"] == "plan, as many" and same["buckets"][-1] == grid["buckets"][-1]
        assert same["num_graphs"] <= grid["num_graphs"] and same["padding"] <= grid["padding"]


def test_a_plan_is_printed_as_a_table(capsys, requests_file):
    assert run("plan", "--traffic", requests_file, "--max-graphs", 3, "--chunk", 64, "--no-progress") == 0
    printed = capsys.readouterr().out
    assert f"{requests_file}: 3000 requests" in printed and "buckets up to 64" in printed
    header = next(line for line in printed.splitlines() if "padding" in line)
    for title in ("graphs", "up to", "worst", "steps graphed", "tokens graphed", "tokens/step", "memory"):
        assert title in header
    row = next(line.split() for line in printed.splitlines() if line.startswith("plan "))
    assert row[1:3] == ["3", "64"] and row[3].endswith("%") and row[5:7] == ["100.0%", "100.0%"]
    assert printed.rstrip().splitlines()[-1].startswith("num_tokens = [") and printed.rstrip().endswith("64]")


def test_a_plan_is_written_into_a_file_that_keeps_the_rest(capsys, tmp_path, requests_file):
    path = tmp_path / "buckets.toml"
    path.write_text(
        "# ours\n[buckets]\ngrid = 'vllm'  # for now\nmax_padding_ratio = 3.0 # tuned\n"
        "[limits]\nmax_num_tokens = 128  # of the server\nmax_batch_size = 8\n"
        "[decode]\nbatch_sizes = [1, 2]\n"
    )
    assert run("plan", "--traffic", requests_file, "--chunk", 128, "--max-graphs", 4, "-o", path) == 0
    text = path.read_text()
    for kept in ("# ours", "max_padding_ratio = 3.0 # tuned", "max_num_tokens = 128  # of the server"):
        assert kept in text
    assert "grid" not in text and "max_batch_size = 8\n" in text and "warmup_steps" not in text
    config = PiecewiseConfig.from_toml(path)
    assert len(config.buckets) == 4 and config.buckets[-1] == 128 and config.decode_batch_sizes == (1, 2)
    # A new file has the plan and the limits that were given, no more.
    fresh = tmp_path / "fresh.toml"
    assert run("plan", "--traffic", requests_file, "--chunk", 64, "--max-num-tokens", 256, "-o", fresh) == 0
    assert [line.split(" =")[0] for line in fresh.read_text().split("\n") if line] == [
        "[buckets]", "num_tokens", "[limits]", "max_num_tokens",
    ]  # fmt: skip
    assert (
        PiecewiseConfig.from_toml(fresh).buckets[-1] == PiecewiseConfig.from_toml(fresh).max_num_tokens == 256
    )
    assert "written to" in capsys.readouterr().out


def test_comments_inside_the_list_stay_with_the_sizes_that_they_are_about(tmp_path, requests_file):
    path = tmp_path / "buckets.toml"
    path.write_text(
        "[buckets]\nnum_tokens = [ # of the trace\n    # chat\n    16, 32, # short\n\n    128, # long\n"
        "    4096\n] # planned\n[decode]\nbatch_sizes = [1,\n 2] # two\n"
    )
    requests_file.write_text("10\n20\n30\n100\n200\n400\n")
    assert run("plan", "--traffic", requests_file, "--max-graphs", 6, "--no-progress", "-o", path) == 0
    assert path.read_text() == (
        "[buckets]\nnum_tokens = [ # of the trace\n    # chat\n    10, 20, 30, # short\n    100, # long\n"
        "    200, 400,\n] # planned\n[decode]\nbatch_sizes = [1,\n 2] # two\n"
    )
    # What is written is read, and written again without a change.
    before = path.read_text()
    assert run("plan", "--traffic", requests_file, "--max-graphs", 6, "--no-progress", "-o", path) == 0
    assert path.read_text() == before


def test_a_plan_goes_into_the_table_of_a_pyproject(tmp_path, requests_file):
    path = tmp_path / "pyproject.toml"
    before = "[project]\nname = 'served' # ours\n\n[tool.other]\nbuckets = 3\n"
    path.write_text(before)
    argv = ("plan", "--traffic", requests_file, "--no-progress", "--max-num-tokens", 512, "-o", path)
    assert run(*argv, "--max-graphs", 2) == 0
    assert path.read_text().startswith(before) and "[tool.piecewise.buckets]" in path.read_text()
    config = PiecewiseConfig.from_toml(path)
    assert len(config.buckets) == 2 and config.buckets[-1] == config.max_num_tokens == 512
    assert run("check", path) == run("show", path) == 0
    # Its limits hold from now on.
    assert run(*argv[:-4], "-o", path, "--max-graphs", 3) == 0
    assert PiecewiseConfig.from_toml(path).buckets[-1] == 512


def test_the_limits_of_the_file_hold_for_the_plan(capsys, tmp_path, requests_file):
    path = tmp_path / "buckets.toml"
    path.write_text("[limits]\nmax_batch_size = 2\nmax_seq_len = 51\n")
    found = plan_json(capsys, "--traffic", requests_file, "--chunk", 400, "--cover", 300, "-o", path)
    assert found["cover"] == 100
    assert any(
        "--cover 300 clamped to 100 = max_num_seqs 2 * (max_seq_len 51 - 1)" in n for n in found["notes"]
    )
    assert any("run eagerly under every list" in note for note in found["notes"])
    assert PiecewiseConfig.from_toml(path).prefill_sizes().clamped == ()


def test_a_file_that_the_new_limits_contradict_stays_as_it_was(capsys, tmp_path, requests_file):
    path = tmp_path / "buckets.toml"
    before = "[decode]\nbatch_sizes = [64]\n"
    path.write_text(before)
    message = refused(capsys, "plan", "--traffic", requests_file, "--max-num-tokens", 32, "-o", path)
    assert "decode_batch_sizes: expected a size of at most 32" in message and path.read_text() == before
    path.write_text("[what]\n")
    assert ":1: [what]" in refused(capsys, "plan", "--traffic", requests_file, "-o", path)


def test_batching_makes_steps_of_requests(capsys, tmp_path, requests_file):
    total = int(tokens_in(requests_file).sum())
    found = plan_json(
        capsys, "--traffic", requests_file, "--batching", "--max-num-tokens", 512, "--step-ms", 0
    )
    steps = -(-total // 512)
    assert any(f"planned on {steps} steps, {total} tokens" in note for note in found["notes"])
    timed = tmp_path / "timed.csv"
    timed.write_text("TIMESTAMP,ContextTokens\n" + "".join(f"{n}.0,100\n" for n in range(8)))
    for ms, count in ((500, 8), (2000, 5)):
        found = plan_json(capsys, "--traffic", timed, "--batching", "--max-num-tokens", 512, "--step-ms", ms)
        assert any(f"planned on {count} steps, 800 tokens" in note for note in found["notes"])


def test_a_holdout_is_judged_and_not_planned_on(capsys, tmp_path):
    path = tmp_path / "requests.txt"
    path.write_text("\n".join(["100"] * 30 + ["50"] * 30))
    found = plan_json(capsys, "--traffic", path, "--max-graphs", 1, "--cover", 100, "--holdout")
    assert any("judged on unseen 30 steps, 1500 tokens" in note for note in found["notes"])
    assert found["compared"][-1]["padding"] == 1.0
    # With a second bucket and all traffic seen, nothing is padded; what was not seen is.
    seen = plan_json(capsys, "--traffic", path, "--max-graphs", 2, "--cover", 100)
    assert seen["compared"][-1]["padding"] == 0.0
    unseen = plan_json(capsys, "--traffic", path, "--max-graphs", 2, "--cover", 100, "--holdout", 0.5)
    assert unseen["compared"][-1]["padding"] > 0.0
    assert any("smoothed: 30%" in note for note in unseen["notes"])


def bench_file(tmp_path, graphed, eager):
    lines = [
        {"num_tokens": n, "variant": variant, "latency_ms": {"median": ms}}
        for variant, curve in (("graphed", graphed), ("eager", eager))
        for n, ms in curve.items()
    ]
    memory = {"device_bytes": 1300, "largest_alone_device_bytes": 1100, "buckets": [64, 128, 400]}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"schema": "piecewise.bench/1", "results": lines, "memory": memory}))
    return path


def test_a_measured_cost_says_ms_memory_and_from_where_graphs_do_not_pay(capsys, tmp_path, requests_file):
    bench = bench_file(tmp_path, {1: 1.0, 400: 9.0}, {1: 5.0, 400: 6.0})
    found = plan_json(capsys, "--traffic", requests_file, "--cost", bench, "--max-graphs", 4)
    assert found["cost_unit"] == "ms"
    assert any("graphs no longer pay from 229 tokens on; --cover 228" in note for note in found["notes"])
    plan = found["compared"][-1]
    assert plan["memory_bytes"] == round(1000 / 400 * plan["buckets"][-1]) + 400
    tokens = tokens_in(requests_file)
    listed = np.array(plan["buckets"])
    served = listed[np.searchsorted(listed, tokens)]
    assert plan["cost"] == pytest.approx(float(np.interp(served, [1, 400], [1.0, 9.0]).mean()))


def test_how_far_a_cost_is_extrapolated_is_told_and_bounded(capsys, tmp_path):
    traffic = tmp_path / "requests.txt"
    bench = bench_file(tmp_path, {16: 1.0, 100: 2.0}, {16: 5.0, 100: 6.0})
    argv = ("--traffic", traffic, "--cost", bench)
    traffic.write_text("16\n100\n")
    assert not any("measured size, 1" in n and "extrapolated" in n for n in plan_json(capsys, *argv)["notes"])
    traffic.write_text("10\n800\n")
    notes = plan_json(capsys, *argv)["notes"]
    assert "costs of up to 800 tokens are extrapolated: 8.0 times the largest measured size, 100" in notes
    assert "smaller steps are taken to cost as much as the smallest measured size, 16" in notes
    traffic.write_text("10\n801\n")
    # A bucket above all steps is extrapolated too, and so are steps above all buckets.
    for more in ((), ("--cover", 100), ("--chunk", 50, "--cover", 801)):
        message = refused(capsys, "plan", *argv, "--no-progress", *more)
        assert "a size of at least 101 tokens, for steps or buckets of 801" in message
    found = plan_json(capsys, *argv, "--chunk", 400)
    assert any("extrapolated: 4.0 times" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("graphed", "says"), [(4.0, "graphs pay at the largest measured size, 400"), (7.0, "at no measured size")]
)
def test_a_measured_cost_may_favour_one_way_throughout(capsys, tmp_path, requests_file, graphed, says):
    bench = bench_file(tmp_path, {1: graphed, 400: graphed}, {1: 5.0, 400: 6.0})
    found = plan_json(capsys, "--traffic", requests_file, "--cost", bench)
    assert any(says in note for note in found["notes"])


def test_the_memory_budget_bounds_the_graphs(capsys, tmp_path, requests_file):
    bench = bench_file(tmp_path, {1: 1.0, 400: 2.0}, {1: 5.0, 400: 6.0})
    top = int(tokens_in(requests_file).max())
    budget = round(2.5 * top) + 350
    found = plan_json(capsys, "--traffic", requests_file, "--cost", bench, "--memory-budget", budget)
    assert found["compared"][-1]["num_graphs"] == 3 and found["compared"][-1]["memory_bytes"] <= budget
    assert "the memory budget allows 3 graphs" in found["notes"]
    by_hand = ("--bytes-per-token", "1KiB", "--bytes-per-graph", "1MiB", "--memory-budget")
    found = plan_json(capsys, "--traffic", requests_file, *by_hand, "2.5MiB")
    assert found["compared"][-1]["num_graphs"] == 2
    assert "for one graph of" in refused(capsys, "plan", "--traffic", requests_file, *by_hand, "1MiB")
    assert "none measured" in refused(capsys, "plan", "--traffic", requests_file, "--memory-budget", "1GiB")


def test_decode_sizes_are_planned_from_batch_sizes_or_from_a_trace(capsys, tmp_path):
    sizes = tmp_path / "batches.txt"
    sizes.write_text("\n".join(["3"] * 50 + ["7"] * 40 + ["20"]))
    path = tmp_path / "buckets.toml"
    assert (
        run(
            "plan",
            "--traffic",
            sizes,
            "--phase",
            "decode",
            "--max-graphs",
            2,
            "--max-num-seqs",
            24,
            "-o",
            path,
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "requests/step" in printed and "padded slots/step" in printed
    assert printed.rstrip().splitlines()[-2] == "batch_sizes = [7, 24]"
    config = PiecewiseConfig.from_toml(path)
    assert config.decode_batch_sizes == (7, 24) and config.max_num_seqs == 24
    assert "num_tokens" not in path.read_text()
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,100,4\n1.0,300,4\n9.0,10,1\n")
    options = ("--traffic", trace, "--phase", "decode", "--step-ms", 1000)
    found = plan_json(capsys, *options)
    assert any("planned on 6 steps, 9 requests" in note for note in found["notes"])
    assert found["compared"][-1]["buckets"] == [1, 2]
    # Draft tokens take the places of requests.
    found = plan_json(capsys, *options, "--max-num-tokens", 8, "--tokens-per-request", 4, "--cover", 64)
    assert found["cover"] == 2


def test_decode_graphs_are_weighed_against_the_cache_they_displace(capsys, tmp_path):
    sizes = tmp_path / "batches.txt"
    sizes.write_text("\n".join(str(n) for n in range(1, 33)))
    weigh = ("--cache-bytes-per-token", 10, "--cached-tokens", 100)
    numbers = []
    for share in (1, 1000, 100_000):
        found = plan_json(
            capsys,
            "--traffic",
            sizes,
            "--phase",
            "decode",
            "--max-graphs",
            32,
            "--bytes-per-graph",
            share,
            *weigh,
        )
        numbers.append(found["compared"][-1]["num_graphs"])
    assert numbers[0] == 32 and numbers[0] > numbers[1] > numbers[2] == 1
    run("plan", "--traffic", sizes, "--phase", "decode", "--bytes-per-graph", 1000, *weigh, "--no-progress")
    printed = capsys.readouterr().out
    assert "cache tokens" in printed and any(row.endswith("chosen") for row in printed.splitlines())


def test_what_a_server_recorded_is_planned_on(capsys, tmp_path):
    recorder = TrafficRecorder()
    for num_tokens in [5] * 10 + [9] * 3 + [30]:
        recorder.record(num_tokens)
    recorder.save(tmp_path / "seen.json")
    found = plan_json(capsys, "--traffic", tmp_path / "seen.json", "--max-graphs", 3)
    assert found["compared"][-1]["buckets"] == [5, 9, 30]
    assert any("planned on 14 steps, 107 tokens" in note for note in found["notes"])
    for option in (("--batching", "--max-num-tokens", 8), ("--holdout",), ("--chunk", 4)):
        assert "recorder" in refused(capsys, "plan", "--traffic", tmp_path / "seen.json", *option)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--batching",), "the most tokens of one step"),
        (("--step-ms", "5"), "--step-ms: expected to be used with --batching"),
        (("--cache-bytes-per-token", "5"), "--phase decode"),
        (("--tokens-per-request", "2"), "--phase decode"),
        (("--phase", "decode", "--chunk", "5"), "--phase prefill"),
        (("--phase", "decode", "--cache-bytes-per-token", "5"), "also --bytes-per-graph"),
        (("--chunk", "64", "--max-num-tokens", "32"), "at most max_num_tokens = 32"),
        (("--traffic-format", "csv"), "a column"),
        (("--cost", "missing.json"), "bench file missing.json"),
        (("-o", "no/such/folder/x.toml"), "--output no/such/folder/x.toml"),
        (("--holdout", "0.0001"), "at least one request on either side"),
    ],
)
def test_options_that_do_not_fit_are_refused(capsys, tmp_path, options, says):
    path = tmp_path / "requests.txt"
    path.write_text("3\n1\n2\n")
    if "--traffic-format" in options:
        path.write_text("a,b\n1,2\n")
    assert says in refused(capsys, "plan", "--traffic", path, "--no-progress", *options)


@pytest.mark.parametrize(
    "options",
    [
        ("--max-graphs", "0"), ("--max-graphs", "4097"), ("--chunk", "-1"), ("--holdout", "1"),
        ("--holdout", "x"), ("--memory-budget", "2 stones"),
        ("--memory-budget", "-1"), ("--step-ms", "nan"), ("--smooth", "2"),
        ("--cover", "9" * 99), ("--phase", "both"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(capsys, options):
    with pytest.raises(SystemExit) as caught:
        run("plan", "--traffic", "x", *options)
    assert caught.value.code == 2 and options[0] in capsys.readouterr().err


def test_a_plot_is_drawn(capsys, tmp_path, requests_file):
    pytest.importorskip("matplotlib")
    image = tmp_path / "plan.png"
    assert run("plan", "--traffic", requests_file, "--max-graphs", 3, "--plot", image) == 0
    assert image.read_bytes()[:4] == b"\x89PNG" and image.stat().st_size > 5000
    assert "a known format" in refused(
        capsys, "plan", "--traffic", requests_file, "--plot", tmp_path / "plan.xyz"
    )


def test_check_lists_what_can_never_be_reached(capsys, tmp_path):
    path = tmp_path / "buckets.toml"
    path.write_text("[buckets]\nnum_tokens = [8, 16, 64]\n[decode]\nbatch_sizes = [1, 2, 9]\n")
    assert run("check", path) == 0
    assert "3 buckets and 3 decode batch sizes, all within reach" in capsys.readouterr().out
    path.write_text(path.read_text() + "[limits]\nmax_batch_size = 4\nmax_seq_len = 9\nmax_num_tokens = 64\n")
    assert run("check", path) == 1
    printed = capsys.readouterr().out
    assert f"{path}: bucket 64 is above 32 = max_num_seqs 4 * (max_seq_len 9 - 1)" in printed
    assert f"{path}: decode batch size 9 is above 4 = max_num_seqs" in printed
    assert run("check", path, "--tokens-per-request", 40) == 1
    assert (
        "decode batch size 2 is above 1 = max_num_tokens 64 // 40 tokens per request"
        in capsys.readouterr().out
    )


def test_check_says_the_same_as_json(capsys, tmp_path):
    path = tmp_path / "buckets.toml"
    path.write_text(
        "[buckets]\nnum_tokens = [8, 64]\n[decode]\nbatch_sizes = [1, 9]\n[limits]\nmax_batch_size = 4\n"
        "max_seq_len = 9\n"
    )
    assert run("check", path, "--json") == 1
    assert json.loads(capsys.readouterr().out) == {
        "file": str(path),
        "within_reach": {"buckets": 1, "decode_batch_sizes": 1},
        "out_of_reach": [
            {"setting": "buckets", "size": 64, "limit": 32, "reason": "max_num_seqs 4 * (max_seq_len 9 - 1)"},
            {"setting": "decode_batch_sizes", "size": 9, "limit": 4, "reason": "max_num_seqs"},
        ],
    }
    path.write_text("[buckets]\nnum_tokens = [8]\n")
    assert run("check", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["out_of_reach"] == []
    assert run("check", path) == 0
    assert capsys.readouterr().out == f"{path}: 1 bucket, all within reach\n"


def test_show_prints_each_bucket(capsys, tmp_path):
    path = tmp_path / "buckets.toml"
    path.write_text(
        "[buckets]\nnum_tokens = [8, 16, 64]\nmax_padding_ratio = 2.0\n[limits]\nmax_batch_size = 2\n"
        "max_seq_len = 25\n[decode]\nbatch_sizes = [1, 2]\n"
    )
    assert run("show", path) == 0
    rows = [re.split("  +", line, maxsplit=4) for line in capsys.readouterr().out.splitlines() if line]
    limit = "48 = max_num_seqs 2 * (max_seq_len 25 - 1)"
    assert rows[1:5] == [
        ["8", "4-8", "2.00x", "1-3", "padded by more than max_padding_ratio 2"],
        ["16", "9-16", "1.78x", "-"],
        ["64", "-", "-", "-", f"never captured: 64 is above {limit}"],
        ["larger", "-", "-", "17-48",
         f"above the largest size that is captured; no step is larger than {limit}"],
    ]  # fmt: skip
    assert rows[5] == ["This version captures no decode steps; it checks and plans their batch sizes."]
    assert rows[7:9] == [["1", "1", "1.00x", "-"], ["2", "2", "1.00x", "-"]]
    assert rows[9] == ["larger", "-", "-", "-", "no step is larger than 2 = max_num_seqs"]
    path.write_text("[buckets]\nnum_tokens = [8]\n")
    assert run("show", path) == 0
    assert re.search("larger  -.*9 and more +above the largest", capsys.readouterr().out)


@pytest.mark.parametrize("limits", ["", "max_num_tokens = 300", "max_batch_size = 4\nmax_seq_len = 65"])
@pytest.mark.parametrize("ratio", [None, 1.0, 1.4, 1.7, 2.8])
def test_show_says_of_each_step_once_whether_it_is_served_as_the_router_does(capsys, tmp_path, ratio, limits):
    # 238 / 2.8 is rounded up to 85.0, but 2.8 * 85 is less than 238.
    listed = [3, 10, 37, 238, 300]
    text = f"[buckets]\nnum_tokens = {listed}\n[limits]\n{limits}\n"
    path = tmp_path / "buckets.toml"
    path.write_text(
        text if ratio is None else text.replace("[limits]", f"max_padding_ratio = {ratio}\n[limits]")
    )
    assert run("show", path, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["buckets"]
    assert [row["size"] for row in rows] == [*listed, None]
    config = PiecewiseConfig.from_toml(path)
    most = config.prefill_sizes().limit.size
    captured = config.within_limits()[0].buckets
    for num_tokens in range(1, (most or 400) + 1):
        told = []
        for row in rows:
            for kind in ("serves", "eager"):
                ends = row[kind]
                if ends and ends[0] <= num_tokens and (ends[1] is None or num_tokens <= ends[1]):
                    told.append((kind, row["size"]))
                    assert kind == "serves" or row["why"]
        bucket = min((size for size in captured if size >= num_tokens), default=None)
        is_served = bucket is not None and (ratio is None or not bucket > ratio * num_tokens)
        assert told == [("serves" if is_served else "eager", bucket)], num_tokens
    assert most is None or all(max(row[kind] or [0]) <= most for row in rows for kind in ("serves", "eager"))


def test_there_are_sixty_kinds_of_malformed_files():
    assert len({content for content, _ in MALFORMED}) == len(MALFORMED) >= 60


@pytest.mark.parametrize("command", ["check", "show"])
@pytest.mark.parametrize(("content", "says"), MALFORMED)
def test_a_malformed_file_ends_in_a_readable_error(capsys, tmp_path, command, content, says):
    path = tmp_path / "buckets.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(capsys, command, path)
    assert says in message and "buckets.toml" in message and len(message) < 3000


VALID = (
    "# ours\n[buckets]\nnum_tokens = [16, 32, 64, 128]  # a\nmax_padding_ratio = 2.0\n"
    "[limits]\nmax_num_tokens = 8192\n"
    'max_batch_size = 64\nmax_seq_len = 4096\n[capture]\nwarmup_steps = 3\nengine = "auto"\n[decode]\n'
    "batch_sizes = [1, 2, 4, 8]\n"
)


@given(
    st.integers(0, len(VALID)),
    st.integers(0, 30),
    st.text(alphabet="[]{}=,.\"'#\n\\ 0x-_ab9", max_size=12) | st.sampled_from(["[buckets]\n", '"""', "'''"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
def test_a_file_with_any_piece_replaced_is_valid_or_told_with_a_line(tmp_path, start, length, piece):
    path = tmp_path / "buckets.toml"
    path.write_text(VALID[:start] + piece + VALID[start + length :])
    try:
        config = PiecewiseConfig.from_toml(path)
    except ConfigError as error:
        message = str(error)
        assert "Fix:" in message and "Rule:" in message
        assert re.search(r"buckets\.toml:\d+: |at line \d+|end of document", message), message
    else:
        assert PiecewiseConfig.from_toml(path) == config


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        out = torch.empty_like(x)
        cumulate(x, out)
        return self.second(out)


def _cumulate(x, out):
    out.copy_(x.cumsum(0))


cumulate = boundary_ops.define(
    "buckets_cli::cumulate(Tensor x, Tensor(a!) out) -> ()",
    _cumulate,
    token_args={"x": 0, "out": 0},
)


def test_a_file_s_limits_take_effect_in_compile_and_are_told(tmp_path):
    path = tmp_path / "buckets.toml"
    path.write_text(
        "[buckets]\nnum_tokens = [4, 8, 16]\n[limits]\nmax_batch_size = 2\nmax_seq_len = 5\n"
        "[decode]\nbatch_sizes = [1, 2]\n"
    )
    with pytest.warns(
        UserWarning, match=r"bucket 16 is above 8 = max_num_seqs 2.*decode batch sizes 1, 2"
    ) as caught:
        graphed = piecewise.compile(Rows(), path)
    assert caught[0].filename == __file__
    with torch.no_grad():
        assert graphed.capture(torch.ones(4, 8)).captured == (4, 8)
        for num_tokens in (3, 3, 8, 16):
            x = torch.randn(num_tokens, 8)
            torch.testing.assert_close(graphed(x), graphed.model(x))
    assert graphed.stats.reasons == {"above_largest_bucket": 1}
    for text in (str(graphed.report()), graphed.report().to_markdown()):
        assert (
            "left out: bucket 16 is above 8" in text
            and "left out: decode batch sizes 1, 2: this version" in text
        )
    assert len(json.loads(graphed.report().to_json())["left_out"]) == 2
    # What was called is what the next file is planned from.
    assert graphed.traffic.counts == {3: 2, 8: 1, 16: 1}
    graphed.traffic.save(tmp_path / "seen.json")
    assert (
        run("plan", "--traffic", tmp_path / "seen.json", "-o", tmp_path / "next.toml", "--no-progress") == 0
    )
    assert PiecewiseConfig.from_toml(tmp_path / "next.toml").buckets == (3, 8, 16)


def test_a_config_without_clamped_sizes_is_taken_as_it_is(recwarn):
    config = PiecewiseConfig(buckets=[4, 8], max_num_seqs=2, max_seq_len=5)
    assert piecewise.compile(Rows(), config).piecewise_config is config
    assert not [each for each in recwarn if "piecewise" in str(each.message)]


def test_the_backend_clips_and_records_too():
    compiled = torch.compile(
        Rows(),
        backend=piecewise_backend,
        options={"buckets": [4, 8, 16], "max_num_seqs": 2, "max_seq_len": 5},
    )
    with torch.no_grad(), pytest.warns(UserWarning, match="bucket 16 is above 8"):
        # Dynamo's first graph is of one size only, so that call has no token count.
        for num_tokens in (6, 7, 5):
            compiled(torch.ones(num_tokens, 8))
    handle = piecewise.handle(compiled)
    assert handle.traffic.counts == {5: 1, 7: 1}
    assert handle.report().left_out == ("bucket 16 is above 8 = max_num_seqs 2 * (max_seq_len 5 - 1)",)


@needs_traces
def test_real_traces_are_planned_from_the_command_line(capsys, tmp_path):
    found = plan_json(
        capsys, "--traffic", TRACES / "mooncake_conversation.jsonl", "--chunk", 2048, "--max-graphs", 20,
        "--holdout", "-o", tmp_path / "buckets.toml",
    )  # fmt: skip
    assert any("37.3% of tokens in the prefix cache" in note for note in found["notes"])
    by_name = {line["name"]: line for line in found["compared"]}
    assert by_name["plan"]["padding"] <= 0.03 and by_name["plan"]["graphed_steps"] == 1.0
    assert PiecewiseConfig.from_toml(tmp_path / "buckets.toml").buckets == tuple(by_name["plan"]["buckets"])
