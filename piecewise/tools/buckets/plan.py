"""`piecewise buckets plan`: from traffic files to a bucket file, and what it is worth."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecewise.report.progress import DelayedBars
from piecewise.report.report import shown_bytes, text_table
from piecewise.settings.config import DEFAULT_BUCKETS, PiecewiseConfig
from piecewise.settings.grids import DECODE_GRIDS, ENGINE_GRIDS, Grid
from piecewise.tools.buckets.planner import BucketPlans, Outcome, evaluate
from piecewise.tools.buckets.slots import SlotRate, slot_table
from piecewise.tools.buckets.step_cost import GraphMemory, MeasuredCost, PaddedTokens, StepCost, read_bench
from piecewise.tools.buckets.steps import check_options, read_traffic, split_traffic, step_limit, steps_of
from piecewise.tools.buckets.traffic import Histogram, Requests
from piecewise.tools.command_output import check_writable, writing
from piecewise.tools.exit_codes import ExitCode
from runners.errors import ConfigError

_HOLDOUT_SMOOTHING = 0.3
# Entries of the planner's table that are made in about two seconds; a plan of as many graphs as a peer's grid
# has is only made within them.
_QUICK = 25_000_000
# Settings that the command line may set, and that are then written.
_LIMITS = ("max_num_tokens", "max_num_seqs")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the result: a list by name, and how the steps fare under it."""

    name: str
    buckets: tuple[int, ...]
    outcome: Outcome


def run_plan(arguments: argparse.Namespace) -> ExitCode:
    """Plan, print, and write what was asked for."""
    bars = DelayedBars(enabled=not arguments.no_progress)
    check_options(arguments)
    check_writable("--output", arguments.output)
    check_writable("--plot", arguments.plot)
    settings = _settings(arguments)
    cost, memory = _cost(arguments)
    traffic = [read_traffic(arguments, path, bars) for path in arguments.traffic]
    known, unseen = split_traffic(arguments, traffic)

    def steps_in(part: list[Requests]) -> Histogram:
        return Histogram.merged([steps_of(arguments, settings, each, cost, bars) for each in part])

    steps = steps_in(known)
    judged = steps_in(unseen) if unseen else steps
    planner = _Planner(arguments, steps, cost, memory, _cover(arguments, settings, steps), bars)
    rates = _slot_rate(arguments, known)
    chosen = planner.chosen(rates)
    lines = list(_compared(planner, settings, judged, chosen))
    notes = list(_notes(arguments, settings, traffic, cost, planner, judged, is_unseen=bool(unseen)))
    if arguments.format == "json":
        print(json.dumps(_as_json(lines, notes, planner.cover, cost), indent=1))
    else:
        for note in notes:
            print(note)
        print("\n" + _shown(lines, cost, _unit(arguments)))
        if arguments.phase == "decode":
            print("\n" + slot_table(planner.steps, planner.of, planner.most_graphs, len(chosen), rates))
        print(f"\n{'num_tokens' if arguments.phase == 'prefill' else 'batch_sizes'} = {list(chosen)}")
    if arguments.output:
        _write(arguments, chosen)
    if arguments.plot:
        from piecewise.tools.buckets.plot import draw

        draw(arguments.plot, judged, {line.name: line.buckets for line in lines if line.name[:1] != " "})
    return ExitCode.RIGHT


def _settings(arguments: argparse.Namespace) -> PiecewiseConfig:
    """The settings of the file that is to be written, under the limits of the command line."""
    base = PiecewiseConfig()
    if arguments.output and Path(arguments.output).exists():
        base = PiecewiseConfig.from_toml(arguments.output)
    # The lists are about to be replaced; they need not fit the limits of the command line.
    limits = {name: getattr(arguments, name) or getattr(base, name) for name in _LIMITS}
    if arguments.chunk and limits["max_num_tokens"] and arguments.chunk > limits["max_num_tokens"]:
        raise ConfigError(
            f"--chunk {arguments.chunk}",
            expected=f"at most max_num_tokens = {limits['max_num_tokens']}",
            got=str(arguments.chunk),
            rule="a chunk is one step, or part of one",
            fix="lower --chunk, or raise --max-num-tokens",
        )
    return dataclasses.replace(base, buckets=DEFAULT_BUCKETS, decode_batch_sizes=None, **limits)


def _cost(arguments: argparse.Namespace) -> tuple[StepCost, GraphMemory | None]:
    cost: StepCost = PaddedTokens()
    memory: GraphMemory | None = None
    if arguments.cost:
        cost, memory = read_bench(arguments.cost)
    if arguments.bytes_per_graph is not None or arguments.bytes_per_token is not None:
        per_token = memory.bytes_per_token if memory else 0
        per_graph = memory.bytes_per_graph if memory else 0
        memory = GraphMemory(
            arguments.bytes_per_token if arguments.bytes_per_token is not None else per_token,
            arguments.bytes_per_graph if arguments.bytes_per_graph is not None else per_graph,
        )
    if arguments.memory_budget is not None and memory is None:
        raise ConfigError(
            "--memory-budget",
            expected="the memory of graphs",
            got="none measured",
            rule="a budget is compared with the pool of the largest bucket and each graph's own share",
            fix="give --cost with a bench file that has memory, or --bytes-per-token and --bytes-per-graph",
        )
    return cost, memory


def _cover(arguments: argparse.Namespace, settings: PiecewiseConfig, steps: Histogram) -> int:
    """The largest bucket: what is asked for, or the limit, or the largest step; never above the limit."""
    limit = step_limit(arguments, settings).size
    if limit is not None and limit < 1:
        raise ConfigError(
            "the limits", expected="room for one token", got=step_limit(arguments, settings).reason,
            rule="a bucket above the limits is never reached", fix="raise them",
        )  # fmt: skip
    asked = arguments.cover or limit
    if asked is None:
        asked = arguments.chunk if arguments.chunk and arguments.phase == "prefill" else int(steps.sizes[-1])
    return min(asked, limit) if limit is not None else asked


class _Planner:
    """Plans over the known steps, under the budgets of the command line."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        steps: Histogram,
        cost: StepCost,
        memory: GraphMemory | None,
        cover: int,
        bars: DelayedBars,
    ) -> None:
        share = arguments.smooth
        if share is None:
            share = _HOLDOUT_SMOOTHING if arguments.holdout is not None else 0.0
        self.steps, self.cost, self.memory, self.cover, self.smoothing = steps, cost, memory, cover, share
        self._bars = bars
        self._by_cover: dict[int, BucketPlans] = {}
        self.is_decode = arguments.phase == "decode"
        self.most_graphs = arguments.max_graphs
        if arguments.memory_budget is not None:
            assert memory is not None
            fitting = memory.most_graphs(largest=cover, budget_bytes=arguments.memory_budget)
            if fitting == 0:
                raise ConfigError(
                    f"--memory-budget {shown_bytes(arguments.memory_budget)}",
                    expected=f"at least {shown_bytes(memory.of((cover,)))}, for one graph of {cover} tokens",
                    got=shown_bytes(arguments.memory_budget),
                    rule="every step up to the largest bucket is served",
                    fix="raise the budget, or lower --cover",
                )
            self.most_graphs = min(self.most_graphs, fitting)

    def of(self, num_graphs: int, cover: int | None = None) -> tuple[int, ...]:
        """The best list of at most so many sizes."""
        return self._plans(cover).of(
            num_graphs,
            watch=lambda layers: self._bars.over(layers, f"planning {num_graphs} graphs", "graphs"),
        )

    def is_quick(self, num_graphs: int, cover: int) -> bool:
        """Whether a list of so many sizes takes no more than a few seconds."""
        return num_graphs * self._plans(cover).num_candidates <= _QUICK

    def _plans(self, cover: int | None) -> BucketPlans:
        cover = cover if cover is not None else self.cover
        if cover not in self._by_cover:
            steps = self.steps.smoothed(cover, share=self.smoothing)
            self._by_cover[cover] = BucketPlans(steps, cover=cover, cost=self.cost)
        return self._by_cover[cover]

    def chosen(self, rate: SlotRate | None) -> tuple[int, ...]:
        """The list for the file: as many graphs as are allowed, or as their memory is worth."""
        if rate is None:
            return self.of(self.most_graphs)
        return rate.best(self.steps, self.of, self.most_graphs)


def _slot_rate(arguments: argparse.Namespace, traffic: list[Requests]) -> SlotRate | None:
    if arguments.phase != "decode" or arguments.cache_bytes_per_token is None:
        return None
    tokens = arguments.cached_tokens or SlotRate.cached_tokens(traffic)
    if tokens is None or not arguments.bytes_per_graph or not arguments.cache_bytes_per_token:
        raise ConfigError(
            "--cache-bytes-per-token",
            expected="also --bytes-per-graph, and --cached-tokens where the traffic does not tell",
            got="not all of them above 0",
            rule="a graph's memory is weighed as the requests whose cache it displaces",
            fix="give them, or leave --cache-bytes-per-token out to plan by --max-graphs alone",
        )
    return SlotRate(arguments.bytes_per_graph, arguments.cache_bytes_per_token, tokens)


def _compared(
    planner: _Planner, settings: PiecewiseConfig, judged: Histogram, chosen: tuple[int, ...]
) -> Iterator[Comparison]:
    """The peers' grids, each with the plan of as many graphs over its range, and the plan itself."""

    def line(name: str, buckets: tuple[int, ...]) -> Comparison:
        outcome = evaluate(
            buckets,
            judged,
            cost=planner.cost,
            max_padding_ratio=settings.max_padding_ratio,
            memory=planner.memory,
        )
        return Comparison(name, buckets, outcome)

    grids = (
        {name: sizes(planner.cover) for name, sizes in DECODE_GRIDS.items()}
        if planner.is_decode
        else {name: Grid(name).sizes(planner.cover) for name in ENGINE_GRIDS}
    )
    for name, sizes in grids.items():
        if sizes:
            yield line(name, sizes)
            if planner.is_quick(len(sizes), sizes[-1]):
                yield line("  plan, as many", planner.of(len(sizes), sizes[-1]))
    yield line("plan", chosen)


def _notes(
    arguments: argparse.Namespace,
    settings: PiecewiseConfig,
    traffic: list[Requests],
    cost: StepCost,
    planner: _Planner,
    judged: Histogram,
    *,
    is_unseen: bool,
) -> Iterator[str]:
    for path, requests in zip(arguments.traffic, traffic, strict=True):
        what = "recorded sizes" if requests.counts is not None else "requests"
        extra = f", {requests.num_empty} empty ones left out" if requests.num_empty else ""
        if requests.num_cached_tokens:
            whole = int(requests.num_tokens.sum()) + requests.num_cached_tokens
            extra += f", {requests.num_cached_tokens / whole:.1%} of tokens in the prefix cache"
        yield f"{path}: {len(requests)} {what}{extra}"
    unit = _unit(arguments)
    role = "judged on unseen" if is_unseen else "planned on"
    yield f"{role} {judged.num_steps} steps, {judged.num_tokens} {unit}; buckets up to {planner.cover}"
    limit = step_limit(arguments, settings)
    if arguments.cover and limit.size is not None and arguments.cover > limit.size:
        yield f"--cover {arguments.cover} clamped to {limit.size} = {limit.reason}"
    largest = int(judged.sizes[-1])
    if largest > planner.cover:
        yield f"steps of more than {planner.cover} {unit} (up to {largest}) run eagerly under every list"
    if planner.most_graphs < arguments.max_graphs:
        yield f"the memory budget allows {planner.most_graphs} graphs"
    if planner.smoothing:
        yield f"smoothed: {planner.smoothing:.0%} of each step spread over sizes within 5 %"
    if isinstance(cost, MeasuredCost):
        size = cost.break_even()
        if size is None:
            yield f"graphs pay at the largest measured size, {int(cost.knots[-1])} tokens"
        elif size == int(cost.knots[0]):
            yield f"graphs pay at no measured size, from {size} tokens up"
        else:
            yield f"graphs no longer pay from {size} tokens on; --cover {max(size - 1, 1)} leaves those eager"


def _unit(arguments: argparse.Namespace) -> str:
    return "tokens" if arguments.phase == "prefill" else "requests"


def _shown(lines: list[Comparison], cost: StepCost, unit: str) -> str:
    mean = "ms/step" if cost.unit == "ms" else f"{unit}/step"
    rows = [("", "graphs", "up to", "padding", "worst", "steps graphed", f"{unit} graphed", mean, "memory")]
    for line in lines:
        found = line.outcome
        rows.append(
            (
                line.name,
                str(found.num_graphs),
                str(line.buckets[-1]),
                f"{found.padding:.3%}",
                f"{found.worst_padding:.2f}x",
                f"{found.graphed_steps:.1%}",
                f"{found.graphed_tokens:.1%}",
                f"{found.cost:.3f}" if cost.unit == "ms" else f"{found.cost:.1f}",
                shown_bytes(found.memory_bytes) if found.memory_bytes is not None else "-",
            )
        )
    return text_table(rows)


def _as_json(lines: list[Comparison], notes: list[str], cover: int, cost: StepCost) -> dict[str, Any]:
    compared = [
        {"name": line.name.strip(), "buckets": list(line.buckets), **dataclasses.asdict(line.outcome)}
        for line in lines
    ]
    return {"cover": cover, "cost_unit": cost.unit, "notes": notes, "compared": compared}


def _write(arguments: argparse.Namespace, chosen: tuple[int, ...]) -> None:
    name = "buckets" if arguments.phase == "prefill" else "decode_batch_sizes"
    path = Path(arguments.output)
    base = PiecewiseConfig.from_toml(path) if path.exists() else PiecewiseConfig()
    values: dict[str, Any] = {name: chosen}
    values |= {each: getattr(arguments, each) for each in _LIMITS if getattr(arguments, each) is not None}
    # Made as a whole first, so that a file which the new limits contradict is refused and stays.
    changed = dataclasses.replace(base, **values)
    with writing("--output", path):
        changed.to_toml(path, only=list(values))
    if arguments.format == "text":
        print(f"written to {path}")
