"""Measures latency, host time, error against a float32 reference, and memory of the variants of one case.

Latency is the time from the call to an idle device, host time the time until the call returns; the device
is idle when a call begins. At each size the variants take turns, round after round, and ratios are formed
inside a round, so that a drift of the clocks affects all variants alike. Errors are measured in the same run
and at the same sizes as times.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from piecewise import torch_api
from piecewise.errors.tools import IneffectiveOption, NothingToMeasure, UnknownVariant
from piecewise.prefill_case import PrefillCase, load_case, unless_the_model_raises
from piecewise.settings.config import FIELDS, PiecewiseConfig, read_settings
from piecewise.tools.bench.host_overhead import run_host_overhead
from piecewise.tools.bench.result import BenchResult, Spread, environment, interval
from piecewise.tools.bench.variants import (
    DEFAULT_VARIANTS,
    FLOORS,
    PEERS,
    Call,
    Prepared,
    Unavailable,
    VariantMaker,
    device_of,
    wait_for,
)
from piecewise.tools.buckets.step_cost import BENCH_SCHEMA
from piecewise.tools.exit_codes import ExitCode

DEFAULT_SIZES = (16, 128, 512, 1024, 2048)
_CALLS_PER_ROUND = 3
# Many, since the largest rounding error varies by a tenth from input to input.
DEFAULT_DRAWS = 32
# Rounds that no limit of time cuts, since a median of fewer says little.
_LEAST_ROUNDS = 3
# Seconds of measuring, and draws, of each preset; set-up comes on top.
PRESETS = {"quick": (14.0, 4), "minute": (55.0, 16), "full": (None, DEFAULT_DRAWS)}
# Settings that say how much is told and shown, not what is run.
_IRRELEVANT = ("progress",)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Runs `piecewise bench`."""
    for option in (
        ("config", "buckets", "tokens", "variants", "peer", "plot") if arguments.spec is None else ()
    ):
        has_effect = option == "plot" and arguments.results is not None
        if getattr(arguments, option) is not None and not has_effect:
            raise IneffectiveOption(option=f"--{option}", needed="SPEC")
    if arguments.host_overhead:
        return run_host_overhead(num_calls=arguments.calls, out=arguments.out)
    if arguments.results is not None:
        result = BenchResult.read(arguments.results)
    else:
        result = run_spec(
            arguments.spec, sizes=arguments.tokens, config=arguments.config, buckets=arguments.buckets,
            variants=None if arguments.variants is None else arguments.variants.split(","),
            peer=arguments.peer, rounds=arguments.rounds, preset=arguments.preset,
        )  # fmt: skip
    print(result)
    if arguments.out is not None:
        arguments.out.write(result.to_json() + "\n")
    if arguments.plot is not None:
        result.plot(arguments.plot)
    if not result.has_measured_nothing:
        return ExitCode.RIGHT
    print("piecewise: nothing was measured of what was asked for", file=sys.stderr)
    return ExitCode.NOTHING


def run_spec(
    spec: str,
    *,
    sizes: Sequence[int] | None = None,
    config: str | None = None,
    buckets: Sequence[int] | None = None,
    variants: Sequence[str] | None = None,
    peer: str | None = None,
    rounds: int = 25,
    draws: int | None = None,
    preset: str = "full",
) -> BenchResult:
    """Loads and measures the case that `spec` names; the defaults are those of `piecewise bench`.

    A preset ("quick", "minute") ends the measuring after its seconds; `rounds` are then the most.

    Raises:
        ConfigError: the spec, a setting or a variant's name is wrong.
        Exception: any error of the spec's code or of the model itself.
    """
    wanted = [*(variants or DEFAULT_VARIANTS), *([peer] if peer else [])]
    unknown = [name for name in wanted if name not in (*DEFAULT_VARIANTS, *PEERS)]
    if unknown:
        raise UnknownVariant(name=unknown[0], known=", ".join((*DEFAULT_VARIANTS, *PEERS)))
    settings, given = read_settings(config, {"progress": False})
    most = settings.max_num_tokens or DEFAULT_SIZES[-1]
    chosen = sorted(set(sizes or [size for size in DEFAULT_SIZES if size <= most] or [most]))
    if buckets is not None or "buckets" not in given.where:
        settings = PiecewiseConfig.from_any(settings, buckets=buckets or chosen)
    case = load_case(spec)
    seconds, usual_draws = PRESETS[preset]
    bench = LatencyBench(
        case, spec=spec, sizes=chosen, variants=wanted, config=settings, rounds=rounds,
        draws=draws or usual_draws, max_seconds=seconds,
    )  # fmt: skip
    result = unless_the_model_raises(case, chosen[0], bench.run)
    if result.has_measured_nothing:
        case.run(chosen[0])  # else every variant would be skipped without the model's own error
    return result


@dataclass(eq=False)
class LatencyBench:
    """Measures the variants of one case.

    Args:
        spec: the case's origin, for the record.
        variants: names as in `variants.py`, in the order of preparation.
        config: for the graphed variants.
        rounds: how often each variant is timed at each size.
        draws: number of inputs that errors are averaged over, if the case takes a seed.
        max_seconds: how long to measure, set-up not counted; None: all rounds.
    """

    case: PrefillCase
    spec: str
    sizes: Sequence[int]
    variants: Sequence[str]
    config: PiecewiseConfig
    rounds: int
    draws: int = DEFAULT_DRAWS
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        most = self.config.max_num_tokens
        missing = [n for n in self.sizes if most is not None and n > most]
        if not self.sizes or missing or self.rounds < 1 or self.draws < 1:
            raise NothingToMeasure(sizes=list(self.sizes), rounds=self.rounds, draws=self.draws)
        self.sizes, self.device = sorted(set(self.sizes)), device_of(self.case)
        self._began = time.perf_counter()
        self._skipped: dict[str, str] = {}

    def run(self) -> BenchResult:
        with torch.inference_mode():
            references = self._references()
            prepared = self._prepare_all()
            set_up = time.perf_counter() - self._began
            results = [self._measure(n, prepared, references.get(n, [])) for n in self.sizes]
            took = {"set_up": set_up, "measuring": time.perf_counter() - self._began - set_up}
            for variant in prepared:
                variant.close()
        settings = {name: getattr(self.config, name) for name in FIELDS if name not in _IRRELEVANT}
        return BenchResult(
            BENCH_SCHEMA, self.spec, environment(self.device), settings, tuple(self.sizes), self.rounds,
            {part: round(seconds, 2) for part, seconds in took.items()}, dict(self._skipped),
            {v.name: {"setup_s": round(v.setup_s, 2), "capture": v.capture} for v in prepared},
            "float32 baseline" if references else "none", _memory(prepared),
            tuple(line for lines, _ in results for line in lines),
            tuple(line for _, lines in results for line in lines),
        )  # fmt: skip

    def _tell(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    @property
    def _num_draws(self) -> int:
        sources = [self.case, *([self.case.baseline] if self.case.baseline is not None else [])]
        return self.draws if all(source.takes_seed for source in sources) else 1

    def _references(self) -> dict[int, list[list[torch.Tensor]]]:
        """Computes the baseline's results in float32 by size and draw, and keeps them on the CPU."""
        source = self.case.baseline
        if source is None:
            return {}
        self._tell("float32 reference")
        model = copy.deepcopy(source.model).float()
        found: dict[int, list[list[torch.Tensor]]] = {}
        for n in self.sizes:
            for seed in range(self._num_draws):
                with source.inputs(n, seed=seed) as inputs:
                    args, kwargs = torch_api.tree_map(_to_float32, inputs)
                    found.setdefault(n, []).append([x.cpu() for x in _float_leaves(model(*args, **kwargs))])
        del model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def _prepare_all(self) -> list[Prepared]:
        maker = VariantMaker(self.case, self.config, self.sizes)
        prepared = []
        for name in self.variants:
            self._tell(f"preparing {name}")
            try:
                prepared.append(maker.prepare(name))
            except Unavailable as reason:
                self._skip(name, reason)
        return prepared

    def _skip(self, name: str, reason: object) -> None:
        self._skipped[name] = str(reason)
        self._tell(f"{name} left out: {reason}")

    def _measure(
        self, n: int, prepared: Sequence[Prepared], references: list[list[torch.Tensor]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        self._tell(f"{n} tokens")
        share = float("inf") if self.max_seconds is None else self.max_seconds / len(self.sizes)
        until = time.perf_counter() + share
        calls: dict[str, Call] = {}
        # By draw; the first draw's inputs are made last, since the timed calls use them.
        errors: dict[str, list[float]] = {variant.name: [] for variant in prepared}
        for seed in reversed(range(max(len(references), 1))):
            with ExitStack() as stack:
                plain = stack.enter_context(self.case.inputs(n, seed=seed))
                source = self.case.baseline
                baseline = plain if source is None else stack.enter_context(source.inputs(n, seed=seed))
                for variant in prepared:
                    if seed and variant.holds_inputs or f"{variant.name}, {n} tokens" in self._skipped:
                        continue
                    try:
                        call = variant.prepare(n, *(baseline if variant.uses_baseline else plain))
                        result = call()
                    except Unavailable as reason:
                        self._skip(f"{variant.name}, {n} tokens", reason)
                        continue
                    if references:
                        errors[variant.name].append(_distance(result, references[seed]))
                    if not seed:
                        calls[variant.name] = call
                samples = self._take_turns(calls, until) if not seed else {}
        for variant in prepared:
            # A call that fell back would be timed as if it had been replayed.
            if variant.name in samples and (fell := variant.fallbacks()):
                del samples[variant.name]
                self._skip(f"{variant.name}, {n} tokens", f"calls ran eagerly: {fell}")
        results = [
            {
                "num_tokens": n,
                "variant": name,
                "latency_ms": Spread.of([latency for latency, _ in taken]).asdict(),
                "host_ms": Spread.of([host for _, host in taken]).asdict(),
                "max_abs_error": statistics.fmean(errors[name]) if errors[name] else None,
                "num_draws": len(errors[name]),
            }
            for name, taken in samples.items()
        ]
        return results, list(_ratios(n, samples, errors))

    def _take_turns(self, calls: Mapping[str, Call], until: float) -> dict[str, list[tuple[float, float]]]:
        """Times a few calls by variant and round, at most `until` that time: medians of (latency, host time)
        in ms."""
        for call in calls.values():
            for _ in range(3):
                call()
        names = list(calls)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for turn in range(self.rounds):
            if turn >= _LEAST_ROUNDS and time.perf_counter() > until:
                break
            # A B B A: each variant comes as often before another as after it.
            first = turn // 2 % max(len(names), 1)
            for name in (names[first:] + names[:first])[:: -1 if turn % 2 else 1]:
                taken = [_timed(calls[name], self.device) for _ in range(_CALLS_PER_ROUND)]
                latency, host = (statistics.median(column) for column in zip(*taken, strict=True))
                samples[name].append((latency, host))
        return samples


def _timed(call: Call, device: torch.device) -> tuple[float, float]:
    wait_for(device)
    began = time.perf_counter()
    result = call()
    returned = time.perf_counter()
    wait_for(device)
    idle = time.perf_counter()
    del result  # freeing it is not the call's work
    return (idle - began) * 1e3, (returned - began) * 1e3


def _ratios(
    n: int, samples: Mapping[str, list[tuple[float, float]]], errors: Mapping[str, list[float]]
) -> Iterator[dict[str, Any]]:
    """Yields latencies of graphed variants over the floor, of others over graphed; errors over eager's."""

    def line(above: str, below: str) -> dict[str, Any]:
        per_round = [a[0] / b[0] for a, b in zip(samples[above], samples[below], strict=True)]
        pair = {"num_tokens": n, "quantity": "latency", "of": above, "over": below}
        return pair | Spread.of(per_round).asdict() | {"interval": interval(per_round)}

    floors = {graphed: floor for floor, graphed in FLOORS.items()} | {"graphed-fused": "floor-inductor"}
    for name in samples:
        if name.startswith("graphed") or name == "breakable":
            for floor in dict.fromkeys((floors.get(name, "floor"), "floor")):
                if floor in samples:
                    yield line(name, floor)
        if name not in ("graphed", *FLOORS) and "graphed" in samples:
            yield line(name, "graphed")
    eager = errors.get("eager", [])
    for name in samples:
        if name.startswith("graphed") and len(errors[name]) == len(eager) and any(eager):
            ratio = sum(errors[name]) / sum(eager)
            yield {"num_tokens": n, "quantity": "error", "of": name, "over": "eager", "median": ratio}


def _memory(prepared: Sequence[Prepared]) -> dict[str, Any]:
    """Returns the memory of the second capture: of all buckets, and of the largest, which came first."""
    capture = next((v.capture for v in prepared if v.name == "graphed"), None)
    if capture is None:
        return {}
    again = capture["again"]
    found = {"device_bytes": again["device_bytes"], "pool_bytes": again["pool_bytes"]}
    found["buffer_bytes"] = capture["buffer_bytes"]
    alone = again["buckets"][0]["device_bytes"]
    ratio = again["device_bytes"] / alone if alone else None
    return {**found, "buckets": capture["captured"], "largest_alone_device_bytes": alone, "ratio": ratio}


def _float_leaves(result: Any) -> list[torch.Tensor]:
    leaves = torch_api.tree_leaves(dict(result) if isinstance(result, Mapping) else result)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]


def _to_float32(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return value.float() if is_float else value


def _distance(result: Any, reference: list[torch.Tensor]) -> float:
    """Returns the largest absolute difference; infinite if a value is not finite or shapes differ."""
    found = _float_leaves(result)
    same = [x.shape for x in found] == [x.shape for x in reference]
    if not same or not all(bool(x.isfinite().all()) for x in found):
        return float("inf")
    pairs = [(x.cpu().float(), y) for x, y in zip(found, reference, strict=True) if x.numel()]
    return max((float((x - y).abs().max()) for x, y in pairs), default=0.0)
