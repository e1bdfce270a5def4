"""Measures what the rules of rows add to a start-up: `python -m docs.results.analysis`.

A Llama of 16 small layers is traced as `capture()` does. The effects walk, which runs each kind of node once
on fakes, is timed with and without noting ops for the rules, by turns; then the walk that applies the rules.
The loop of `docs/results/startup.py` tells how fast the host is: 30 ms are asked where it takes 30 us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import piecewise
from docs.results.llama_1b import small_layers
from docs.results.startup import LOOP
from piecewise.analysis.classify import Classifier
from piecewise.analysis.rows.walk import RowsWalk
from piecewise.capture import analyse as compiler
from piecewise.ir import effects as aliases
from piecewise.ir.tensors import storage_of, tensors_in
from piecewise.tools.bench.result import environment


class _Effects(TorchDispatchMode):
    """What a walk for effects alone notes."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.tags: set[torch.Tag] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.tags |= set(func.tags)
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                self.written |= set(map(storage_of, tensors_in(value)))
        return func(*args, **kwargs)

    def recording(self, value: Any, asked: Any) -> None:
        return None


def _seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _measured(num_layers: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each part, medians."""
    case = small_layers(num_layers)
    found: dict[str, list[float]] = {"effects": [], "effects_and_ops": [], "rules": []}
    spent: list[float] = []
    find_facts, classify = compiler.find_facts, Classifier.run
    walk = {name: getattr(RowsWalk, name) for name in ("in_graph", "eager", "item", "boundary")}

    def timed_facts(*args: Any, **kwargs: Any) -> Any:
        for _ in range(rounds):
            recorder, aliases.OpRecorder = aliases.OpRecorder, _Effects  # type: ignore[misc, assignment]
            try:
                found["effects"].append(_seconds(lambda: find_facts(*args, **kwargs)))
            finally:
                aliases.OpRecorder = recorder  # type: ignore[misc]
            found["effects_and_ops"].append(_seconds(lambda: find_facts(*args, **kwargs)))
        return find_facts(*args, **kwargs)

    def timed_rules(classifier: Classifier) -> Any:
        """The first cut's: later ones find what it has judged."""
        result = classify(classifier)
        if not found["rules"]:
            found["rules"].append(sum(spent))
        return result

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result: list[Any] = []
            spent.append(_seconds(lambda: result.append(function(*args, **kwargs))))
            return result[0]

        return call

    for name, function in walk.items():
        setattr(RowsWalk, name, timed(function))
    compiler.find_facts, Classifier.run = timed_facts, timed_rules  # type: ignore[method-assign]
    try:
        graphed = piecewise.compile(case.model, buckets=(4, 8, 16), progress=False)
        with case.inputs(8) as (args, kwargs), torch.inference_mode():
            graphed.capture(*args, **kwargs)
    finally:
        for name, function in walk.items():
            setattr(RowsWalk, name, function)
        compiler.find_facts, Classifier.run = find_facts, classify  # type: ignore[method-assign]
    loop_us = min(timeit.repeat(LOOP, number=500, repeat=5)) / 500 * 1e6
    parts = {name: statistics.median(values) * 1e3 for name, values in found.items()}
    added = parts["effects_and_ops"] - parts["effects"] + parts["rules"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "num_layers": num_layers,
        "ms": parts,
        "added_ms": added,
        "loop_us": loop_us,
        "added_ms_at_30_us": added * 30 / loop_us,
        "environment": environment(device),
    }


def main() -> int:
    """Measures and prints; writes a file where one is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    result = _measured(arguments.layers, arguments.rounds)
    parts = ", ".join(f"{name} {took:.1f} ms" for name, took in result["ms"].items())
    print(f"{parts}; added {result['added_ms']:.1f} ms, loop {result['loop_us']:.0f} us: ", end="")
    print(f"{result['added_ms_at_30_us']:.1f} ms where the loop takes 30 us")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
