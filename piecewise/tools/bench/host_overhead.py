"""Measures the host time of a graphed call without the kernels.

The segments of a captured toy model are replaced by empty ones, so that only the package's own work remains.
It is timed in three parts: the fixed part (binding, signature, bucket, copy-in, output), which must not grow
with depth; the comparison of addresses and module state, which does; and the calls of boundary ops.
"""

from __future__ import annotations

import dataclasses
import json
import timeit
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import boundary_ops
import piecewise
from piecewise.api import graphs_of
from piecewise.report.record import table
from piecewise.tools.bench.result import environment
from piecewise.tools.command_output import OutputFile
from piecewise.tools.exit_codes import ExitCode
from runners.engine import CapturedGraph
from runners.state.state_check import StateCheck
from runners.step_plan import CallStep, ReplayStep

_BUCKET, _NUM_TOKENS, _HIDDEN, _VOCAB = 32, 24, 32, 64
_ROUNDS = 7
# Of the JSON, whose results have what `host_time` returns.
SCHEMA = "piecewise.host-overhead/1"

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


def run_host_overhead(*, num_calls: int, out: OutputFile | None) -> ExitCode:
    """Prints the host time of one call by depth, the best of several rounds; `out` gets it as JSON.

    A boundary call is timed with an op that does nothing. Returns an exit code, since PIECEWISE_DISABLE keeps
    the calls out of graphs.
    """
    here = environment(torch.device("cpu"))
    print("{device}; torch {torch}, Python {python}".format_map(here))
    print(
        f"Host time per call, µs, best of {_ROUNDS} rounds of {num_calls} calls: tape engine, empty segments,"
        " two tensor inputs, one tensor output\n"
    )
    measured = [time for depth in (2, 32) if (time := host_time(depth, num_calls=num_calls)) is not None]
    rows = [("", "fixed part", "state comparison", "each boundary call", "whole call")]
    for time in measured:
        parts = (f"{time[f'{part}_us']:.1f}" for part in ("fixed", "state", "boundary", "whole"))
        fixed, state, boundary, whole = parts
        compared = f"{state} ({time['num_entries']} entries)"
        rows.append((f"{time['num_layers']} layers", fixed, compared, boundary, whole))
    unmeasured = f"NOTHING MEASURED: a call of {_NUM_TOKENS} tokens is not replayed"
    print(table(rows) if measured else unmeasured)
    if out is not None:
        found = {"schema": SCHEMA, "environment": here, "rounds": _ROUNDS, "calls": num_calls}
        out.write(json.dumps({**found, "results": measured}, indent=2) + "\n")
    return ExitCode.RIGHT if measured else ExitCode.NOTHING


def host_time(num_layers: int, *, num_calls: int) -> dict[str, float] | None:
    """Measures the parts of a call of this depth on the tape engine; returns None without a replay."""
    # The settings of a project are about its own model.
    config = piecewise.PiecewiseConfig(buckets=(_BUCKET,), engine="tape", progress=False)
    graphed = piecewise.compile(_Toy(num_layers).eval(), config)
    ids, positions = torch.arange(_NUM_TOKENS), torch.arange(_NUM_TOKENS)
    with torch.no_grad():
        graphed.capture(ids, positions)
        graphed(ids, positions)
        if not graphed.stats.replays:
            return None
        served = graphs_of(graphed).signatures[0].served
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
    return {
        "num_layers": num_layers, "fixed_us": fixed, "state_us": state, "whole_us": whole,
        "num_entries": steps.check.num_entries, "boundary_us": (calls - fixed) / num_layers,
    }  # fmt: skip


def _emptied(step: ReplayStep | CallStep) -> ReplayStep:
    return ReplayStep(CapturedGraph(step.name, (), 0), step.name)


def _best_us(call: Callable[[], object], num_calls: int) -> float:
    """Returns the least of several rounds' means, since other work on the machine only adds time."""
    return min(timeit.repeat(call, number=num_calls, repeat=_ROUNDS)) / num_calls * 1e6
