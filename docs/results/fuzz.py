"""Compares many random models with eager: `python -m docs.results.fuzz --device cuda`.

The models, how they are graphed and what is done with them are those of `test_fuzz.py`; attached mixtures of
experts are those of `test_attached_experts.py`. Processes draw with seeds of their own; one that is lost, as
after a device-side assert, counts as a fault like a wrong result, a lost bucket or a warning of a rule.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS = ("models", "experts")


def _draw_models(examples: int, seed: int, device: str, ends: float) -> dict[str, Any]:
    """Acts out so many cases, until a time; each is compared with the model's own calls."""
    os.environ["PIECEWISE_FUZZ_DEVICE"] = device
    import hypothesis
    import torch
    from fuzz_models import cases
    from hypothesis import HealthCheck, Phase
    from test_fuzz import Session

    counts = {"examples": 0, "calls": 0, "replays": 0}
    faults: list[str] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=cases())
    def act(case: Any) -> None:
        if time.time() > ends:
            return
        counts["examples"] += 1
        try:
            with torch.no_grad():
                session = Session(case)
                session.run()
            counts["calls"] += session.num_calls
            counts["replays"] += session.graphed.stats.replays
        except Exception:
            faults.append(f"{case}\n{traceback.format_exc()[-3000:]}")

    act()
    return {**counts, "faults": faults}


def _draw_experts(examples: int, seed: int, device: str, ends: float) -> dict[str, Any]:
    from test_attached_experts import run_examples

    whole: dict[str, Any] = {}
    for number in range(examples):
        if time.time() < ends:
            _add(whole, run_examples(examples=1, seed=1000 * seed + number, device=device))
    return whole


def _add(whole: dict[str, Any], found: dict[str, Any]) -> None:
    for key, value in found.items():
        whole[key] = whole.get(key, type(value)()) + value


def _work(kind: str, examples: int, seed: int, device: str, ends: float) -> None:
    """One process: prints what it found as its last line."""
    import warnings

    warnings.filterwarnings("error", message="piecewise: the rule of")
    sys.path[:0] = [
        str(ROOT / "tests" / room) for room in ("models", "invariants", "boundary_ops/huggingface")
    ]
    draw = _draw_models if kind == "models" else _draw_experts
    print(json.dumps(draw(examples, seed, device, ends)))


def main() -> int:
    """Draws what the command line asks for, in many processes; 1 where a fault was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", type=int, default=1500, help="random models")
    parser.add_argument("--experts", type=int, default=200, help="attached mixtures of experts")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0, help="of the first process")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no more are drawn")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--worker", nargs=4, metavar=("KIND", "EXAMPLES", "SEED", "ENDS"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.worker:
        kind, examples, seed, ends = arguments.worker
        _work(kind, int(examples), int(seed), arguments.device, float(ends))
        return 0
    began = time.time()
    asked = {"models": arguments.models, "experts": arguments.experts}
    total = sum(asked.values()) or 1
    running = []
    for kind in KINDS:
        share = min(max(round(arguments.processes * asked[kind] / total), 1), asked[kind])
        for number in range(share):
            examples = asked[kind] // share + (number < asked[kind] % share)
            seed = arguments.seed + 1000 * KINDS.index(kind) + number
            command = [sys.executable, "-m", "docs.results.fuzz", "--device", arguments.device]
            command += ["--worker", kind, str(examples), str(seed)]
            command.append(str(began + arguments.seconds))
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            running.append((kind, seed, examples, process))
    found: dict[str, dict[str, Any]] = {kind: {"faults": [], "processes": 0} for kind in KINDS if asked[kind]}
    for kind, seed, examples, process in running:
        whole = found[kind]
        whole["processes"] += 1
        try:
            printed, errors = process.communicate(
                timeout=max(began + arguments.seconds + 90 - time.time(), 1)
            )
            result = json.loads(printed.splitlines()[-1])
        except Exception as error:
            process.kill()
            last = "" if isinstance(error, subprocess.TimeoutExpired) else errors[-3000:]
            result = {"faults": [f"seed {seed}: lost after at most {examples} examples: {error!r}\n{last}"]}
        _add(whole, result)
    import torch

    from piecewise.tools.bench.result import environment

    report = {
        "seconds": time.time() - began,
        **found,
        "environment": environment(torch.device(arguments.device)),
    }
    text = json.dumps(report, indent=2, default=str)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    for kind, whole in found.items():
        told = ", ".join(f"{key} {value}" for key, value in whole.items() if key != "faults")
        print(f"{kind}: {told}, faults {len(whole['faults'])}")
        for fault in whole["faults"][:5]:
            print(fault[-1500:])
    return int(any(whole["faults"] for whole in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
