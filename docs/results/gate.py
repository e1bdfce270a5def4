"""Tests the gate on a device: `python -m docs.results.gate`.

Measures an unchanged model of 4 layers (hidden 2048) in `--runs` processes of their own, and compares each
with a baseline of the runs before it, as `piecewise regress` does; then again with each of `FAULTS` planted.
Writes `gate.json` beside this file, or into `--out`: what regressed in each run, for each fault the findings,
and the share of false alarms, also by bootstrap: baselines drawn from the runs, each judging another run.
`--smoke` takes a tiny model, to try the command itself.

`case` is the spec. The environment variable `GATE_FAULT` names the planted fault.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import piecewise
from docs.results.llama_1b import four_layers, smoke
from piecewise.capture.build_plan import PlanAssembler
from piecewise.tools.gate.baseline import Baseline, read_record, run_of
from piecewise.tools.gate.compare import compare, judge
from piecewise.tools.gate.quantities import RULES, Quantity, quantities
from runners.cuda.graph import CudaGraph

SIZES = "16,128,512"
_DRAWS = 200
# Runs of the first baseline.
_FIRST = 3


class _Before(nn.Module):
    """Runs a function on the input of a module."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.change(x))


def _change_mlp(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    layers = model.model.layers
    layers[-1].mlp = _Before(layers[-1].mlp, change)


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states, None


def _lose_boundary(model: Any) -> None:
    model.model.layers[-1].self_attn = _NoAttention()


def _mix_tokens(model: Any) -> None:
    _change_mlp(model, lambda x: x + 0 * x.sort(1).values)


def _make_wrong(model: Any) -> None:
    _change_mlp(model, lambda x: x * 1.5)


def _part_inputs(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj = _Before(layer.self_attn.k_proj, lambda x: x * 1.001)
        layer.self_attn.v_proj = _Before(layer.self_attn.v_proj, lambda x: x * 0.999)


def _take_memory(model: Any) -> None:
    _change_mlp(model, lambda x: x + 0 * x.repeat(1, 1, 64).amax(-1, keepdim=True))


def _fail_bucket(model: Any) -> None:
    """Lets the capture of all buckets but the smallest fail."""
    function_for, smallest = PlanAssembler.function_for, 8 if os.environ.get("GATE_SMOKE") else 16

    def refuse(assembler: PlanAssembler, segment: Any, bucket: int) -> Any:
        if bucket > smallest:
            raise RuntimeError("planted")
        return function_for(assembler, segment, bucket)

    PlanAssembler.function_for = refuse  # type: ignore[method-assign]


def _slow_segment(model: Any) -> None:
    """Lets the device wait before each replay of one segment: about a tenth of a call of 512 tokens."""
    replay, cycles = CudaGraph.replay, int(os.environ.get("GATE_CYCLES", "200000"))

    def wait_and_replay(graph: CudaGraph) -> None:
        if "layers.2" in graph.segment:
            torch.cuda._sleep(cycles)
        replay(graph)

    CudaGraph.replay = wait_and_replay  # type: ignore[method-assign]


# Fault → how to plant it, and a part of the name of a finding that must be there.
FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "a boundary op is gone": (_lose_boundary, "boundary ops, piecewise::attn_inplace"),
    "a segment runs eagerly": (_mix_tokens, "eager ops, sort"),
    "a bucket is dropped": (_fail_bucket, "graphed: bucket "),
    "rows are wrong": (_make_wrong, "error of graphed"),
    "memory doubles": (_take_memory, "graph memory"),
    "a fusion stops matching": (_part_inputs, "fusions, pack_linears"),
    "a segment is slower": (_slow_segment, "graphed ÷ floor, 512 tokens"),
}


def case() -> piecewise.PrefillCase:
    """Makes the model, with the fault that the environment names."""
    made = smoke() if os.environ.get("GATE_SMOKE") else four_layers()
    fault = os.environ.get("GATE_FAULT")
    if fault:
        FAULTS[fault][0](made.model)
    return made


def _measure(folder: Path, name: str, *, fault: str = "", smoke: bool) -> dict[str, Any]:
    settings, out = folder / "settings.toml", folder / f"{name}.json"
    settings.write_text('[compile]\nfusions = ["pack_linears"]\n')
    command = [sys.executable, "-m", "piecewise", "bench", "docs.results.gate:case", "--quick", "--tokens"]
    command += ["8,16" if smoke else SIZES, "--variants", "eager,graphed,floor", "--config", str(settings)]
    command += [
        "--buckets",
        "8,16" if smoke else SIZES,
        "--rounds",
        "3" if smoke else "12",
        "--out",
        str(out),
    ]
    environment = {**os.environ, "GATE_FAULT": fault, "GATE_SMOKE": "1" if smoke else ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return read_record(out)


def _alarms(
    runs: Sequence[Mapping[str, Any]], values: Mapping[str, Any], kinds: Mapping[str, str]
) -> list[str]:
    """Judges the numbers of a run by those of others."""
    found = []
    for name, now in values.items():
        before, now = (Quantity(kinds[name], *each) for each in (runs[-1]["values"][name], now))
        past = [run["values"][name][0] for run in runs[:-1]]
        if judge(name, before, now, past, RULES[kinds[name]]).verdict == "regression":
            found.append(name)
    return found


def _bootstrap(runs: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> dict[str, float]:
    """Returns the share of false alarms by the number of runs in the baseline."""
    generator, shares = np.random.default_rng(0), {}
    for size in (1, 3, 5):
        if len(runs) <= size:
            continue
        draws = (generator.permutation(len(runs))[: size + 1] for _ in range(_DRAWS))
        alarms = [
            bool(_alarms([runs[i] for i in drawn[1:]], runs[drawn[0]]["values"], kinds)) for drawn in draws
        ]
        shares[str(size)] = sum(alarms) / len(alarms)
    return shares


def _write(folder: Path, found: dict[str, Any], record: dict[str, Any]) -> None:
    """Writes what is known so far, since the whole takes minutes."""
    kinds, runs = {name: each.kind for name, each in quantities(record).items()}, found["runs"]
    # The first three are the baseline that a user makes; each later run is judged by all before it.
    for number, run in enumerate(runs):
        run["regressions"] = _alarms(runs[:number], run["values"], kinds) if number >= _FIRST else None
    found["environment"] = record["environment"]
    found["false alarms"] = sum(bool(run["regressions"]) for run in runs)
    found["share of false alarms, by runs in the baseline"] = _bootstrap(runs, kinds)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gate.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--go-on", type=Path, metavar="FILE", help="add to what this file of an earlier run holds"
    )
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"command": "python -m docs.results.gate", "runs": [], "faults": {}}
    if arguments.go_on is not None:
        found = json.loads(arguments.go_on.read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = _measure(folder, "first", smoke=arguments.smoke)
        found["runs"].append(run_of(record))
        while len(found["runs"]) < arguments.runs:
            record = _measure(folder, f"run{len(found['runs'])}", smoke=arguments.smoke)
            found["runs"].append(run_of(record))
            _write(arguments.out, found, record)
            print(len(found["runs"]), found["runs"][-1]["regressions"], flush=True)
        baseline = Baseline(record, tuple(found["runs"][:-1]))
        for fault in [fault for fault in FAULTS if fault not in found["faults"]]:
            faulty = _measure(folder, "fault", fault=fault, smoke=arguments.smoke)
            told = {each.name: each.cause for each in compare(baseline, faulty).of("regression")}
            is_caught = any(FAULTS[fault][1] in name for name in told)
            found["faults"][fault] = {"caught": is_caught, "regressions": told}
            print(fault, is_caught, told, flush=True)
            _write(arguments.out, found, record)
    print(found["false alarms"], found["share of false alarms, by runs in the baseline"])


if __name__ == "__main__":
    main()
