"""What the commands refuse, each with its own class."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch

from piecewise.errors import tools
from piecewise.tools.cli import find_command
from piecewise.tools.demo import models

CASE = """
import torch
import piecewise

def case():
    return piecewise.PrefillCase(torch.nn.Linear(4, 4), lambda n: ((torch.ones(n, 4),), {}))
"""
PLAN = ("buckets", "plan", "--no-progress", "--traffic", "FOLDER/requests.txt")
DECODE = (*PLAN, "--phase", "decode")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "requests.txt").write_text("3\n1\n2\n")
    (tmp_path / "timed.csv").write_text("TIMESTAMP,ContextTokens\n1.0,3\n")
    results = [
        {"variant": name, "num_tokens": 2, "latency_ms": {"median": 1.0}} for name in ("eager", "graphed")
    ]
    (tmp_path / "bench.json").write_text(json.dumps({"schema": "piecewise.bench/1", "results": results}))
    (tmp_path / "limited.toml").write_text("[limits]\nmax_num_tokens = 2\n")
    (tmp_path / "recorded.json").write_text(
        '{"format": "piecewise-traffic", "version": 1, "counts": [[4, 2]]}'
    )
    (tmp_path / "refused_case.py").write_text(CASE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("refused_case", None)


def run(folder, *argv):
    return find_command([part.replace("FOLDER", str(folder)) for part in argv])()


@pytest.mark.parametrize(
    ("refusal", "argv", "says"),
    [
        (tools.IneffectiveOption, (*PLAN, "--step-ms", "5"), "to be used with --batching"),
        (tools.NoStepLimit, (*PLAN, "--batching"), "the most tokens of one step"),
        (tools.ChunkAboveLimit, (*PLAN, "--chunk", "8", "--max-num-tokens", "4"), "max_num_tokens = 4"),
        (tools.BudgetWithoutMemory, (*PLAN, "--memory-budget", "1GiB"), "none measured"),
        (tools.SmallMemoryBudget, (*PLAN, "--memory-budget", "5", "--bytes-per-token", "4"), "at least 12 B"),
        (tools.SmallTraffic, (*PLAN, "--holdout", "0.001"), "files of 3 requests"),
        (tools.LimitsLeaveNothing,
         (*DECODE, "--max-num-tokens", "1", "--tokens-per-request", "2"), "max_num_tokens 1 // 2"),
        (tools.NoCacheRate, (*DECODE, "--cache-bytes-per-token", "5"), "also --bytes-per-graph"),
        (tools.NoDecodeTimes, (*DECODE, "--step-ms", "5"), "token counts only"),
        (tools.RecordedSteps,
         ("buckets", "plan", "--traffic", "FOLDER/recorded.json", "--chunk", "4"), "--chunk with"),
        (tools.WrongTraffic, (*PLAN, "--traffic-format", "jsonl"), "a JSON object"),
        (tools.WrongBenchFile, (*PLAN, "--cost", "FOLDER/none.json"), "a readable JSON file"),
        (tools.TooFarFromMeasured, (*PLAN, "--cost", "FOLDER/bench.json", "--cover", "17"), "at least 3 t"),
        (tools.UnwritableOutput, (*PLAN, "-o", "FOLDER/no/such.toml"), "--output"),
        (tools.WrongSpec, ("explain", "refused_case:cases"), "the nearest is case"),
        (tools.UnknownVariant, ("bench", "refused_case:case", "--variants", "fast"), "'fast'"),
        (tools.UnwritableOutput, ("verify", "refused_case:case", "--json", "FOLDER"), "it is a folder"),
    ],
)  # fmt: skip
def test_a_command_refuses(folder, refusal, argv, says):
    with pytest.raises(refusal, match=says) as caught:
        run(folder, *argv)
    assert "Rule:" in str(caught.value) and "Fix:" in str(caught.value)


def test_a_plot_needs_matplotlib_and_a_known_format(folder, monkeypatch):
    for hidden in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(tools.NoMatplotlib):
        run(folder, *PLAN, "--plot", "FOLDER/plan.png")
    monkeypatch.undo()
    if importlib.util.find_spec("matplotlib") is not None:
        with pytest.raises(tools.WrongPlot, match="plan.xyz"):
            run(folder, *PLAN, "--plot", "FOLDER/plan.xyz")


def test_the_demo_needs_what_it_is_asked_for(folder, monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(tools.NoSuchDevice):
            run(folder, "demo", "--device", "cuda")
    with monkeypatch.context() as patched:
        patched.setattr(models, "smollm2_file", lambda: None)
        with pytest.raises(tools.NoDemoModel):
            run(folder, "demo", "--model", "smollm2")
        (folder / "broken.gguf").write_bytes(b"no model")
        patched.setattr(models, "smollm2_file", lambda: folder / "broken.gguf")
        with pytest.raises(tools.UnreadableDemoModel, match="broken.gguf"):
            run(folder, "demo", "--model", "smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tools.NoTransformers):
        run(folder, "demo")
