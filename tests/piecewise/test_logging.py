"""The loggers say what was traced, lowered and captured, and why not, where somebody asked for it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from state_models import graph, new_model, tokens

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def records(name, level):
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append(record)

    logger, handler = logging.getLogger(name), Keep()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def texts(found):
    return [record.getMessage() for record in found]


def test_a_capture_is_told_at_info():
    with records("piecewise", logging.INFO) as found:
        graphed = graph(new_model(), buckets=(4, 8), fusions=("auto",))
        with torch.no_grad():
            graphed(tokens(5))
    said = "\n".join(texts(found))
    for words in ("tracing Model(int64[7])", "traced ", "lowering 2 graph segments (eager)", "lowered: "):
        assert words in said
    for bucket in (4, 8):
        assert f"capturing bucket {bucket}\n" in said and f"bucket {bucket} is captured in " in said
    assert not [record for record in found if record.levelno != logging.INFO]


def test_decisions_and_each_fallback_are_told_at_debug():
    with records("piecewise", logging.DEBUG) as found, records("runners", logging.DEBUG) as of_runners:
        graphed = graph(new_model(after=lambda model, x: x - x.mean(0)))
        with torch.no_grad():
            graphed(tokens(17))
            graphed(tokens(17))
    said = texts(found)
    assert any("not in a graph: mean (consumes_token_dim" in text and __file__ in text for text in said)
    assert "segment 1 (block): boundary, 1 ops" in said
    assert said.count("a call runs eagerly (above_largest_bucket) 17 tokens, largest bucket 16") == 2
    assert any("captured segment 0" in text and "bucket 16" in text for text in texts(of_runners))


def test_a_failed_bucket_is_told_with_its_traceback(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no kernel at all")

    monkeypatch.setattr("piecewise.capture.build_plan.PlanAssembler.capture", fail)
    with records("piecewise", logging.DEBUG) as found:
        graph(new_model(), captured=False, allow_eager=True, buckets=(8,)).capture(tokens(7))
    (record,) = [each for each in found if each.exc_info]
    assert "bucket 8" in record.getMessage() and record.exc_info[2] is not None
    assert any("bucket 8 is failed" in text and "no kernel at all" in text for text in texts(found))


def test_a_replay_says_nothing():
    graphed = graph(new_model())
    with torch.no_grad():
        graphed(tokens(5))
        with records("piecewise", 1) as found, records("runners", 1) as of_runners:
            graphed(tokens(5))
    assert graphed.stats.replays == 2 and not found and not of_runners


def test_an_attached_model_is_told():
    import small_transformers as small

    with records("boundary_ops", logging.INFO) as found:
        small.attached()
    assert "attached LlamaForCausalLM: 3 layers" in texts(found)


@pytest.mark.parametrize("name", ["piecewise", "runners", "boundary_ops"])
def test_a_library_leaves_the_output_to_its_user(name):
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger(name).handlers)


PROGRAM = """
import {first}
import torch, piecewise, boundary_ops
from torch import nn

def sums_(x, out):
    out.copy_(x.cumsum(0))

schema = "log_test::sums(Tensor x, Tensor(a!) out) -> ()"
sums = boundary_ops.define(schema, sums_, token_args=dict(x=0, out=0))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        x, out = self.first(x), torch.empty_like(x)
        sums(x, out)
        return out - out.mean(0)

model = Model()
graphed = piecewise.compile(model, buckets=[8], progress=False)
with torch.no_grad():
    graphed.capture(torch.randn(5, 4))
    x = torch.randn(3, 4)
    torch.testing.assert_close(graphed(x), model(x))
    assert graphed.stats.replays == 1
"""


@pytest.mark.parametrize("first", ["torch", "piecewise", "piecewise.api"])
@pytest.mark.parametrize(
    ("setting", "said", "unsaid"),
    [
        ("+piecewise", ("capturing bucket 8", "not in a graph: mean"), ("captured segment 0",)),
        ("piecewise,+runners", ("capturing bucket 8", "captured segment 0"), ("not in a graph",)),
        ("+dynamo", (), ("capturing bucket 8",)),
    ],
    ids=["debug", "info", "others"],
)
def test_torch_logs_knows_the_loggers_whatever_is_imported_first(first, setting, said, unsaid):
    if setting == "+dynamo" and first != "torch":
        pytest.skip("what torch leaves out does not depend on the order")
    environment = {**os.environ, "TORCH_LOGS": setting, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert found.returncode == 0, found.stderr
    lines = found.stderr.splitlines()
    for words in said:
        assert len([line for line in lines if words in line]) == 1, f"{words} once in\n{found.stderr}"
    assert not [line for words in unsaid for line in lines if words in line]
