"""Runs `piecewise buckets plan`: plans buckets for traffic, and compares the plan with engines' grids."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from piecewise.errors.tools import (
    BudgetWithoutMemory,
    ChunkAboveLimit,
    IneffectiveOption,
    LimitsLeaveNothing,
    NoCacheRate,
    NoStepLimit,
    RecordedSteps,
    SmallMemoryBudget,
    SmallTraffic,
)
from piecewise.report.progress import delayed_bar
from piecewise.report.record import shown_bytes, table
from piecewise.settings.config import DEFAULT_BUCKETS, PiecewiseConfig
from piecewise.settings.grids import DECODE_GRIDS, ENGINE_GRIDS, Grid
from piecewise.settings.whole_file import is_replaced
from piecewise.tools.buckets.planner import BucketPlans, PlanOutcome, SlotRate, evaluate, slot_table
from piecewise.tools.buckets.plot import plan_figure
from piecewise.tools.buckets.step_cost import PADDED_TOKENS, GraphMemory, StepCost, read_bench
from piecewise.tools.buckets.steps import Histogram, chunked, decode_batches, packed
from piecewise.tools.buckets.traffic import Requests, read_requests
from piecewise.tools.exit_codes import ExitCode
from piecewise.tools.plot import save_figure

_DEFAULT_STEP_MS = 25.0
_HOLDOUT_SMOOTHING = 0.3
# Entries of the planner's table that take about two seconds; plans of as many graphs as an engine's grid has
# are only made within this many.
_QUICK = 25_000_000
# Settings that the command line may set, and then writes.
_LIMITS = ("max_num_tokens", "max_num_seqs")

# A bucket list's name, its sizes, and the outcome of the steps under it.
_Comparison = tuple[str, tuple[int, ...], PlanOutcome]


def run(arguments: argparse.Namespace) -> ExitCode:
    """Plans a bucket list, prints it, and writes it where asked."""
    _check_options(arguments)
    planner = _Planner(arguments)
    chosen = planner.chosen()
    lines, notes = list(planner.compared(chosen)), list(planner.notes())
    if arguments.format == "json":
        compared = [
            {"name": name.strip(), "buckets": list(buckets), **dataclasses.asdict(outcome)}
            for name, buckets, outcome in lines
        ]
        found = {"cover": planner.cover, "cost_unit": planner.cost.unit, "notes": notes, "compared": compared}
        print(json.dumps(found, indent=1))
    else:
        print(*notes, "", _shown(lines, planner.cost, planner.unit), sep="\n")
        if planner.is_decode:
            shown = slot_table(planner.steps, planner.of, planner.most_graphs, len(chosen), planner.rate)
            print(f"\n{shown}")
        print(f"\n{'batch_sizes' if planner.is_decode else 'num_tokens'} = {list(chosen)}")
    if arguments.output:
        _write(planner, chosen)
    if arguments.plot:
        save_figure(planner.figure(lines, notes), arguments.plot)
    return ExitCode.RIGHT


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuses options that have no effect beside another one."""
    is_decode = arguments.phase == "decode"
    weighs_cache = arguments.cache_bytes_per_token is not None
    for option, is_set, works, needed in (
        ("--chunk", arguments.chunk, not is_decode, "--phase prefill"),
        ("--batching", arguments.batching, not is_decode, "--phase prefill"),
        ("--step-ms", arguments.step_ms is not None, is_decode or arguments.batching, "--batching"),
        ("--cost", arguments.cost, not is_decode, "--phase prefill"),
        ("--tokens-per-request", arguments.tokens_per_request != 1, is_decode, "--phase decode"),
        ("--cache-bytes-per-token", weighs_cache, is_decode, "--phase decode"),
        ("--cached-tokens", arguments.cached_tokens, weighs_cache, "--cache-bytes-per-token"),
    ):
        if is_set and not works:
            raise IneffectiveOption(option=option, needed=needed)


def _settings(arguments: argparse.Namespace, base: PiecewiseConfig) -> PiecewiseConfig:
    """Returns the settings of the file to write, with the command line's limits."""
    # The lists will be replaced, so they need not fit the limits of the command line.
    limits = {name: getattr(arguments, name) or getattr(base, name) for name in _LIMITS}
    if arguments.chunk and limits["max_num_tokens"] and arguments.chunk > limits["max_num_tokens"]:
        raise ChunkAboveLimit(chunk=arguments.chunk, limit=limits["max_num_tokens"])
    return dataclasses.replace(base, buckets=DEFAULT_BUCKETS, decode_batch_sizes=None, **limits)


def _cost(arguments: argparse.Namespace) -> tuple[StepCost, GraphMemory | None]:
    cost, memory = read_bench(arguments.cost) if arguments.cost else (PADDED_TOKENS, None)
    for name in ("bytes_per_token", "bytes_per_graph"):
        if getattr(arguments, name) is not None:
            memory = dataclasses.replace(memory or GraphMemory(0, 0), **{name: getattr(arguments, name)})
    if arguments.memory_budget is not None and memory is None:
        raise BudgetWithoutMemory()
    return cost, memory


class _Planner:
    """Plans bucket lists for the known steps, under the budgets of the command line.

    Attributes:
        base: the settings of the file to write.
        steps, judged: the steps that the plan is made from, and those that it is judged on.
        cover: the largest bucket.
        largest: the largest bucket or step.
        most_graphs: the most sizes of a list.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.is_decode = arguments.phase == "decode"
        self.unit = "requests" if self.is_decode else "tokens"
        self._bar = partial(delayed_bar, enabled=not arguments.no_progress)
        target = arguments.output
        is_there = target is not None and is_replaced(target)
        self.base = PiecewiseConfig.from_toml(target) if is_there else PiecewiseConfig()
        self.settings = _settings(arguments, self.base)
        self.limit = self.settings.prefill_sizes().limit
        if self.is_decode:
            self.limit = self.settings.decode_limit(tokens_per_request=arguments.tokens_per_request)
        self.cost, self.memory = _cost(arguments)
        self.traffic = [self._read(path) for path in arguments.traffic]
        known, unseen = self._split()
        self.is_unseen = bool(unseen)
        self.steps = self._steps_of(known)
        self.judged = self._steps_of(unseen) if unseen else self.steps
        self.cover = self._find_cover()
        self.largest = int(max(self.cover, self.steps.sizes[-1], self.judged.sizes[-1]))
        if self.cost.unit == "ms":
            self.cost.check_reach(self.largest, path=arguments.cost)
        self.rate = self._slot_rate(known)
        usual = _HOLDOUT_SMOOTHING if arguments.holdout is not None else 0.0
        self.smoothing = usual if arguments.smooth is None else arguments.smooth
        self.most_graphs = min(arguments.max_graphs, self._most_within_budget())
        self._by_cover: dict[int, BucketPlans] = {}

    def _read(self, path: str) -> Requests:
        """Reads one file of --traffic; refuses a recorder's if options need requests."""
        arguments = self.arguments
        requests = read_requests(
            path, format=arguments.traffic_format, column=arguments.column,
            watch=lambda rows: self._bar(rows, f"reading {Path(path).name}", "requests"),
        )  # fmt: skip
        for option, is_set in (
            ("--batching", arguments.batching),
            ("--chunk", arguments.chunk is not None),
            ("--step-ms", arguments.step_ms is not None),
            ("--holdout", arguments.holdout is not None),
        ):
            if is_set and requests.counts is not None:
                raise RecordedSteps(option=option, path=path)
        return requests

    def _split(self) -> tuple[list[Requests], list[Requests]]:
        """Splits the traffic into the part to plan from and, if asked, another to judge the plan on."""
        share, traffic = self.arguments.holdout, self.traffic
        if share is None:
            return traffic, []
        cuts = [len(requests) - round(len(requests) * share) for requests in traffic]
        if not all(0 < cut < len(requests) for cut, requests in zip(cuts, traffic, strict=True)):
            raise SmallTraffic(share=share, counts=", ".join(str(len(requests)) for requests in traffic))
        pairs = list(zip(traffic, cuts, strict=True))
        return [each.part(0, cut) for each, cut in pairs], [each.part(cut, len(each)) for each, cut in pairs]

    def _steps_of(self, traffic: list[Requests]) -> Histogram:
        return Histogram.merged([Histogram.of(self._steps(each), each.counts) for each in traffic])

    def _steps(self, requests: Requests) -> np.ndarray[Any, np.dtype[np.int64]]:
        arguments, step_ms = self.arguments, self.arguments.step_ms
        if self.is_decode:
            if requests.counts is not None or (requests.arrival_s is None and step_ms is None):
                return requests.num_tokens  # batch sizes, one per step
            step_s = (step_ms or _DEFAULT_STEP_MS) / 1000
            return decode_batches(requests, step_s=step_s, max_num_seqs=self.limit.size)
        if not arguments.batching:
            return chunked(requests.num_tokens, arguments.chunk) if arguments.chunk else requests.num_tokens
        most = self.settings.max_num_tokens or arguments.chunk
        if most is None:
            raise NoStepLimit()
        with self._bar(None, "batching", "requests", total=len(requests)) as bar:
            limit, step_s = self.settings.max_num_seqs, self._step_seconds()
            return packed(requests, most, max_num_seqs=limit, step_s=step_s, watch=bar.update)

    def _step_seconds(self) -> Callable[[int], float] | None:
        """Returns a function from a step's tokens to its seconds; None if all requests wait at the start."""
        step_ms, cost = self.arguments.step_ms, self.cost
        if step_ms == 0:
            return None
        if step_ms is None and cost.unit == "ms":
            return lambda num_tokens: float(cost.graphed(np.array([num_tokens]))[0]) / 1000
        seconds = (step_ms if step_ms is not None else _DEFAULT_STEP_MS) / 1000
        return lambda num_tokens: seconds

    def _find_cover(self) -> int:
        """Finds the largest bucket: the option's, or the limit, or the largest step."""
        arguments, limit = self.arguments, self.limit.size
        if limit is not None and limit < 1:
            raise LimitsLeaveNothing(reason=self.limit.reason)
        chunk = 0 if self.is_decode else arguments.chunk
        asked = arguments.cover or limit or chunk or int(self.steps.sizes[-1])
        return min(asked, limit) if limit is not None else asked

    def _slot_rate(self, traffic: list[Requests]) -> SlotRate | None:
        arguments = self.arguments
        if not self.is_decode or arguments.cache_bytes_per_token is None:
            return None
        tokens = arguments.cached_tokens or SlotRate.cached_tokens(traffic)
        if tokens is None or not arguments.bytes_per_graph or not arguments.cache_bytes_per_token:
            raise NoCacheRate()
        return SlotRate(arguments.bytes_per_graph, arguments.cache_bytes_per_token, tokens)

    def _most_within_budget(self) -> int:
        budget, memory = self.arguments.memory_budget, self.memory
        if budget is None or memory is None:
            return self.arguments.max_graphs
        fitting = memory.most_graphs(largest=self.cover, budget_bytes=budget)
        if fitting == 0:
            needed = shown_bytes(memory.of((self.cover,)))
            raise SmallMemoryBudget(budget=shown_bytes(budget), needed=needed, cover=self.cover)
        return fitting

    def of(self, num_graphs: int, cover: int | None = None) -> tuple[int, ...]:
        """Returns the best list of at most `num_graphs` sizes."""
        what = f"planning {num_graphs} graphs"
        return self._plans(cover).of(num_graphs, watch=lambda layers: self._bar(layers, what, "graphs"))

    def _plans(self, cover: int | None) -> BucketPlans:
        cover = cover or self.cover
        if cover not in self._by_cover:
            steps = self.steps.smoothed(cover, share=self.smoothing)
            self._by_cover[cover] = BucketPlans(steps, cover=cover, cost=self.cost)
        return self._by_cover[cover]

    def chosen(self) -> tuple[int, ...]:
        """Returns the list to write: as many graphs as are allowed, or as are worth their memory."""
        if self.rate is None:
            return self.of(self.most_graphs)
        return self.rate.best(self.steps, self.of, self.most_graphs)

    def compared(self, chosen: tuple[int, ...]) -> Iterator[_Comparison]:
        """Yields engines' grids, each with a plan of as many graphs over its range, then the chosen plan."""
        judge = partial(
            evaluate, histogram=self.judged, cost=self.cost, memory=self.memory,
            max_padding_ratio=self.settings.max_padding_ratio,
        )  # fmt: skip
        grids = DECODE_GRIDS if self.is_decode else {name: Grid(name).sizes for name in ENGINE_GRIDS}
        for name, sizes_up_to in grids.items():
            sizes = sizes_up_to(self.cover)
            if sizes:
                yield name, sizes, judge(sizes)
            if sizes and len(sizes) * self._plans(sizes[-1]).num_candidates <= _QUICK:
                same = self.of(len(sizes), sizes[-1])
                yield "  plan, as many", same, judge(same)
        yield "plan", chosen, judge(chosen)

    def figure(self, compared: list[_Comparison], notes: list[str]) -> Any:
        """Draws the compared lists, without the plans of as many graphs as an engine's grid has."""
        lists = {name: buckets for name, buckets, _ in compared if not name.startswith(" ")}
        grids = DECODE_GRIDS if self.is_decode else ENGINE_GRIDS
        left_out = [f"{name} left out: no size up to {self.cover}" for name in grids if name not in lists]
        traffic = ", ".join(Path(path).name for path in self.arguments.traffic)
        title = f"{len(lists['plan'])} graphs for {traffic}\ncost: {self.cost.origin}, {date.today()}"
        notes = [*left_out, *notes]
        return plan_figure(self.judged, lists, title=title, unit=self.unit, notes=notes)

    def notes(self) -> Iterator[str]:
        """Yields notes for the reader on the traffic, the limits and the cost."""
        arguments, limit = self.arguments, self.limit
        for path, requests in zip(arguments.traffic, self.traffic, strict=True):
            what = "recorded sizes" if requests.counts is not None else "requests"
            extra = f", {requests.num_empty} empty ones left out" if requests.num_empty else ""
            if requests.num_cached_tokens:
                whole = int(requests.num_tokens.sum()) + requests.num_cached_tokens
                extra += f", {requests.num_cached_tokens / whole:.1%} of tokens in the prefix cache"
            yield f"{path}: {len(requests)} {what}{extra}"
        role = "judged on unseen" if self.is_unseen else "planned on"
        counts = f"{self.judged.num_steps} steps, {self.judged.num_tokens} {self.unit}"
        yield f"{role} {counts}; buckets up to {self.cover}"
        if arguments.cover and limit.size is not None and arguments.cover > limit.size:
            yield f"--cover {arguments.cover} clamped to {limit.size} = {limit.reason}"
        largest = int(self.judged.sizes[-1])
        if largest > self.cover:
            larger = f"steps of more than {self.cover} {self.unit} (up to {largest})"
            yield f"{larger} run eagerly under every list"
        if self.most_graphs < arguments.max_graphs:
            yield f"the memory budget allows {self.most_graphs} graphs"
        if self.smoothing:
            yield f"smoothed: {self.smoothing:.0%} of each step spread over sizes within 5 %"
        if self.cost.unit == "ms":
            size, knots = self.cost.break_even(), self.cost.knots
            if self.largest > knots[-1]:
                times = f"{self.largest / knots[-1]:.1f} times the largest measured size, {knots[-1]}"
                yield f"costs of up to {self.largest} tokens are extrapolated: {times}"
            if self.judged.sizes[0] < knots[0]:
                yield f"smaller steps are taken to cost as much as the smallest measured size, {knots[0]}"
            if size is None:
                yield f"graphs pay at the largest measured size, {int(knots[-1])} tokens"
            elif size == int(knots[0]):
                yield f"graphs pay at no measured size, from {size} tokens up"
            else:
                more = f"--cover {max(size - 1, 1)} leaves those eager"
                yield f"graphs no longer pay from {size} tokens on; {more}"


def _shown(lines: list[_Comparison], cost: StepCost, unit: str) -> str:
    mean = "ms/step" if cost.unit == "ms" else f"{unit}/step"
    heads = "", "graphs", "up to", "padding", "worst", "steps graphed", f"{unit} graphed", mean, "memory"
    rows: list[tuple[object, ...]] = [heads]
    for name, buckets, found in lines:
        padding = f"{found.padding:.3%}", f"{found.worst_padding:.2f}x"
        graphed = f"{found.graphed_steps:.1%}", f"{found.graphed_tokens:.1%}"
        price = f"{found.cost:.3f}" if cost.unit == "ms" else f"{found.cost:.1f}"
        memory = shown_bytes(found.memory_bytes) if found.memory_bytes is not None else "-"
        rows.append((name, found.num_graphs, buckets[-1], *padding, *graphed, price, memory))
    return table(rows)


def _write(planner: _Planner, chosen: tuple[int, ...]) -> None:
    arguments, target = planner.arguments, planner.arguments.output
    values: dict[str, Any] = {"decode_batch_sizes" if planner.is_decode else "buckets": chosen}
    values |= {each: getattr(arguments, each) for each in _LIMITS if getattr(arguments, each) is not None}
    # Checked as a whole before writing: a file that contradicts the new limits is refused and unchanged.
    changed = dataclasses.replace(planner.base, **values)
    with target.writing():
        changed.to_toml(target, only=list(values))
    if arguments.format == "text":
        print(f"written to {target.path}")
