"""Measures several streams on the 1B-shaped Llama: `python -m docs.results.streams`.

Eager kernels without fusions, so that q, k and v and gate and up are matmuls of their own; the same calls on
one, two and three streams, interleaved; results must be the same bits. `--smoke` takes a tiny model, on
whatever device there is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import piecewise
from docs.results import llama_1b
from piecewise.tools.bench.result import environment

SIZES = (16, 64, 128, 512)
_STREAMS = (1, 2, 3)
_CALLS = 5


def _milliseconds(graphed: piecewise.GraphedModule, call: dict[str, Any], device: torch.device) -> float:
    """Of one call, call to device idle, the mean of a few."""
    began = time.perf_counter()
    for _ in range(_CALLS):
        graphed(**call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / _CALLS * 1e3


def main() -> int:
    """Measures what the command line asks for and prints it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "streams.json")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    arguments = parser.parse_args()
    case = llama_1b.smoke() if arguments.smoke else llama_1b.llama_1b()
    sizes = (4, 8) if arguments.smoke else SIZES
    with torch.inference_mode():
        made, reports = {}, {}
        with case.inputs(sizes[-1]) as (_, example):
            device = example["input_ids"].device
            for count in _STREAMS:
                made[count] = piecewise.compile(case.model, buckets=sizes, num_streams=count, progress=False)
                reports[count] = made[count].capture(**example).asdict()["streams"]
        results = []
        for size in sizes:
            with case.inputs(size) as (_, call):
                logits = [graphed(**call).logits for graphed in made.values()]
                assert all(torch.equal(logits[0], other) for other in logits), "other bits on several streams"
                taken: dict[int, list[float]] = {count: [] for count in made}
                for _ in range(arguments.rounds):
                    for count, graphed in made.items():
                        taken[count].append(_milliseconds(graphed, call, device))
            medians = {count: statistics.median(times) for count, times in taken.items()}
            results.append({"num_tokens": size, "ms": medians})
            ratios = ", ".join(f"{count} streams {medians[count] / medians[1]:.3f}" for count in _STREAMS[1:])
            print(f"{size} tokens: one stream {medians[1]:.3f} ms; {ratios}", flush=True)
        for graphed in made.values():
            assert not graphed.stats.eager_calls, graphed.stats.reasons
    found = {"environment": environment(device), "results": results, "segments": reports}
    arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
