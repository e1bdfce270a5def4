"""Measures the host time of a graphed call without the kernels.

The segments of a captured toy model are replaced by empty ones, so that only the package's own work remains.
It is timed in three parts: the fixed part (binding, signature, bucket, copy-in, output), which must not grow
with depth; the comparison of addresses and module state, which does; and the calls of boundary ops.
"""

from __future__ import annotations

import dataclasses
import platform
import timeit
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import boundary_ops
import piecewise
from piecewise.report.record import table
from piecewise.tools.exit_codes import ExitCode
from runners.engine import CapturedGraph
from runners.state.state_check import StateCheck
from runners.step_plan import CallStep, ReplayStep

_BUCKET, _NUM_TOKENS, _HIDDEN, _VOCAB = 32, 24, 32, 64
_ROUNDS = 7

_nothing = boundary_ops.define(
    "piecewise_bench::nothing(Tensor x, Tensor(a!) out) -> ()",
    lambda x, out: None,
    token_args={"x": 0, "out": 0},
)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(_HIDDEN)
        self.first, self.second = nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(self.norm(x))
        out = torch.zeros_like(inner)
        _nothing(inner, out)
        return x + self.second(out)


class _Toy(nn.Module):
    """Takes two tensors, [num_tokens] each; returns one, [num_tokens, hidden]."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCAB, _HIDDEN), nn.Embedding(_VOCAB, _HIDDEN)
        self.layers = nn.ModuleList(_Layer() for _ in range(num_layers))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return x


def print_host_overhead(*, num_calls: int) -> ExitCode:
    """Prints the host time of one call by depth, in microseconds, the best of several rounds.

    A boundary call is timed with an op that does nothing. Returns an exit code, since settings in the
    environment may keep the calls out of graphs.
    """
    print(f"{_processor()}; torch {torch.__version__}, Python {platform.python_version()}")
    print(
        f"Host time per call, µs, best of {_ROUNDS} rounds of {num_calls} calls: tape engine, empty segments,"
        " two tensor inputs, one tensor output\n"
    )
    rows = [("", "fixed part", "state comparison", "each boundary call", "whole call")]
    for depth in (2, 32):
        row = _host_overhead(depth, num_calls=num_calls)
        if row is None:
            print(f"NOTHING MEASURED: a call of {_NUM_TOKENS} tokens is not replayed under these settings")
            return ExitCode.NOTHING
        rows.append(row)
    print(table(rows))
    return ExitCode.RIGHT


def _host_overhead(num_layers: int, *, num_calls: int) -> tuple[str, str, str, str, str] | None:
    """Measures a model of this depth on the tape engine; returns its row, or None without a replay."""
    graphed = piecewise.compile(_Toy(num_layers).eval(), buckets=[_BUCKET], engine="tape", progress=False)
    ids, positions = torch.arange(_NUM_TOKENS), torch.arange(_NUM_TOKENS)
    with torch.no_grad():
        graphed.capture(ids, positions)
        graphed(ids, positions)
        if not graphed.stats.replays:
            return None
        # Taking a call apart needs what the public interface hides.
        served = graphed._graphs.signatures[0].served
        steps = served[_BUCKET].steps
        graphs_empty = [_emptied(step) if isinstance(step, ReplayStep) else step for step in steps.steps]
        all_empty = [_emptied(step) for step in steps.steps]
        timed = []
        for kept, check in (
            (all_empty, StateCheck()),
            (graphs_empty, StateCheck()),
            (graphs_empty, steps.check),
        ):
            partly = dataclasses.replace(steps, steps=tuple(kept), check=check, _bound=OrderedDict())
            served[_BUCKET] = dataclasses.replace(served[_BUCKET], steps=partly)
            timed.append(_best_us(partial(graphed, ids, positions), num_calls))
        fixed, calls, whole = timed
        state = _best_us(steps.check.is_unchanged, num_calls)
    assert graphed.stats.eager_calls == 0, graphed.stats
    compared = f"{state:.1f} ({steps.check.num_entries} entries)"
    boundary = (calls - fixed) / num_layers
    return f"{num_layers} layers", f"{fixed:.1f}", compared, f"{boundary:.1f}", f"{whole:.1f}"


def _emptied(step: ReplayStep | CallStep) -> ReplayStep:
    return ReplayStep(CapturedGraph(step.name, (), 0), step.name)


def _best_us(call: Callable[[], object], num_calls: int) -> float:
    """Returns the least of several rounds' means, since other work on the machine only adds time."""
    return min(timeit.repeat(call, number=num_calls, repeat=_ROUNDS)) / num_calls * 1e6


def _processor() -> str:
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
