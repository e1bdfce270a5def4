"""Compares two source trees of the project in one run: `python -m docs.results.two_trees OTHER`.

OTHER is a folder with the other tree, such as `git worktree add OTHER REV` makes. Each tree runs in processes
of its own, in turns (other, this, this, other): the benchmark of the 1B shape, then the host time of a call
with empty segments. Writes `two_trees.json` beside this file, or into `--out`: the median latency of each
variant and size in each tree, the ratio of this tree's to the other's, and the host times. `--smoke` takes a
tiny model and few rounds, to try the command itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The fused one first: it moves weights, and graphs read the addresses of their capture.
VARIANTS = "eager,graphed-fused,graphed,graphed-captured"
_HOST_ROW = re.compile(
    r"^(\d+) layers\s+([\d.]+)\s+([\d.]+) \((\d+) entries\)\s+([-\d.]+)\s+([\d.]+)", re.MULTILINE
)


def _run(tree: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "piecewise", "bench", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} in {tree} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return done.stdout


def _latencies(tree: Path, smoke: bool, rounds: int, environments: dict[str, Any]) -> dict[str, float]:
    spec = "docs.results.llama_1b:" + ("smoke" if smoke else "llama_1b")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        sizes = ("--tokens", "16,64") if smoke else ()
        _run(tree, spec, "--variants", VARIANTS, "--rounds", str(rounds), "--out", str(out), *sizes)
        found = json.loads(out.read_text())
    environments["this" if tree == ROOT else "other"] = found["environment"]
    return {
        f"{line['variant']}, {line['num_tokens']} tokens": line["latency_ms"]["median"]
        for line in found["results"]
    }


def _host_times(tree: Path, smoke: bool) -> dict[str, float]:
    text = _run(tree, "--host-overhead", "--calls", "200" if smoke else "2000")
    return {f"{layers} layers": float(whole) for layers, *_, whole in _HOST_ROW.findall(text)}


def _compared(measure: Any, other: Path) -> dict[str, Any]:
    samples: dict[Path, list[dict[str, float]]] = {other: [], ROOT: []}
    for tree in (other, ROOT, ROOT, other):
        samples[tree].append(measure(tree))
    rows = {}
    for name in samples[ROOT][0]:
        this, before = ([each[name] for each in samples[tree]] for tree in (ROOT, other))
        ratio = statistics.mean(this) / statistics.mean(before)
        rows[name] = {"other": before, "this": this, "this over other": round(ratio, 4)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, metavar="OTHER")
    parser.add_argument(
        "--other-commit", metavar="REV", help="what OTHER holds, where it is no checkout of its own"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    other = arguments.other.resolve()
    environments: dict[str, Any] = {}

    def latencies(tree: Path) -> dict[str, float]:
        return _latencies(tree, arguments.smoke, arguments.rounds, environments)

    rows = _compared(latencies, other)
    if arguments.other_commit:
        environments["other"]["commit"] = arguments.other_commit
    found = {
        "command": "python -m docs.results.two_trees OTHER",
        "environments": environments,
        "latency_ms": rows,
        "host_us_per_call": _compared(lambda tree: _host_times(tree, arguments.smoke), other),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "two_trees.json").write_text(json.dumps(found, indent=1) + "\n")
    for rows in (found["latency_ms"], found["host_us_per_call"]):
        for name, row in rows.items():
            print(f"{name:24} {row['this over other']:.3f}   {row}")


if __name__ == "__main__":
    main()
