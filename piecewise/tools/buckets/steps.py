"""From the options of `piecewise buckets plan` to the steps that a server makes of its traffic."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from piecewise.report.progress import DelayedBars
from piecewise.settings.config import PiecewiseConfig
from piecewise.settings.limits import Limit
from piecewise.tools.buckets.batching import chunked, decode_batches, packed
from piecewise.tools.buckets.step_cost import StepCost
from piecewise.tools.buckets.traffic import Histogram, Requests, read_requests
from runners.errors import ConfigError

_DEFAULT_STEP_MS = 25.0


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that another one leaves without effect.

    Raises:
        ConfigError: names the first such option.
    """
    is_decode = arguments.phase == "decode"
    weighs_cache = arguments.cache_bytes_per_token is not None
    for option, is_set, works, where in (
        ("--chunk", arguments.chunk, not is_decode, "--phase prefill"),
        ("--batching", arguments.batching, not is_decode, "--phase prefill"),
        ("--step-ms", arguments.step_ms is not None, is_decode or arguments.batching, "--batching"),
        ("--cost", arguments.cost, not is_decode, "--phase prefill"),
        ("--tokens-per-request", arguments.tokens_per_request != 1, is_decode, "--phase decode"),
        ("--cache-bytes-per-token", weighs_cache, is_decode, "--phase decode"),
        ("--cached-tokens", arguments.cached_tokens, weighs_cache, "--cache-bytes-per-token"),
    ):
        if is_set and not works:
            raise ConfigError(
                option,
                expected=f"to be used with {where}",
                got="not so",
                rule="an option that has no effect is a mistake",
                fix=f"add {where}, or leave {option} out",
            )


def read_traffic(arguments: argparse.Namespace, path: str, bars: DelayedBars) -> Requests:
    """One file of --traffic; a recorder's is refused where requests are needed."""
    requests = read_requests(
        path,
        format=arguments.traffic_format,
        column=arguments.column,
        watch=lambda rows: iter(bars.over(rows, f"reading {Path(path).name}", "requests")),
    )
    are_steps = requests.counts is not None
    for option, is_set in (
        ("--batching", arguments.batching),
        ("--chunk", arguments.chunk is not None),
        ("--step-ms", arguments.step_ms is not None),
        ("--holdout", arguments.holdout is not None),
    ):
        if are_steps and is_set:
            raise ConfigError(
                f"{option} with {path}",
                expected="requests in order of arrival",
                got="a recorder's histogram of steps",
                rule="recorded steps were made by a scheduler already, and have no order",
                fix=f"leave {option} out, or give the requests themselves",
            )
    return requests


def split_traffic(
    arguments: argparse.Namespace, traffic: list[Requests]
) -> tuple[list[Requests], list[Requests]]:
    """What the plan may see, and what it is judged on; the latter is empty without --holdout."""
    if arguments.holdout is None:
        return traffic, []
    cuts = [len(requests) - round(len(requests) * arguments.holdout) for requests in traffic]
    if not all(0 < cut < len(requests) for cut, requests in zip(cuts, traffic, strict=True)):
        raise ConfigError(
            f"--holdout {arguments.holdout:g}",
            expected="at least one request on either side, in each file",
            got=f"files of {', '.join(str(len(requests)) for requests in traffic)} requests",
            rule="the plan is judged on traffic that it has not seen",
            fix="give more traffic, or another share",
        )
    pairs = list(zip(traffic, cuts, strict=True))
    return [each.part(0, cut) for each, cut in pairs], [each.part(cut, len(each)) for each, cut in pairs]


def steps_of(
    arguments: argparse.Namespace,
    settings: PiecewiseConfig,
    requests: Requests,
    cost: StepCost,
    bars: DelayedBars,
) -> Histogram:
    """The steps that a server makes of one file's requests, under the options and limits."""
    if requests.counts is not None:
        return Histogram.of(requests.num_tokens, requests.counts)
    if arguments.phase == "decode":
        return _decode_steps(arguments, settings, requests)
    if arguments.batching:
        most = settings.max_num_tokens or arguments.chunk
        if most is None:
            raise ConfigError(
                "--batching",
                expected="the most tokens of one step",
                got="none",
                rule="a scheduler fills a step up to a limit",
                fix="give --max-num-tokens, or --chunk",
            )
        step_s = _step_seconds(arguments.step_ms, cost)
        with bars.counting(len(requests), "batching", "requests") as count:
            steps = packed(requests, most, max_num_seqs=settings.max_num_seqs, step_s=step_s, watch=count)
        return Histogram.of(steps)
    if arguments.chunk:
        return Histogram.of(chunked(requests.num_tokens, arguments.chunk))
    return Histogram.of(requests.num_tokens)


def _step_seconds(step_ms: float | None, cost: StepCost) -> Callable[[int], float] | None:
    """Seconds of a step by its tokens; None where all requests wait from the start."""
    if step_ms == 0:
        return None
    if step_ms is None and cost.unit == "ms":
        return lambda num_tokens: float(cost.graphed(np.array([num_tokens]))[0]) / 1000
    seconds = (step_ms if step_ms is not None else _DEFAULT_STEP_MS) / 1000
    return lambda num_tokens: seconds


def _decode_steps(arguments: argparse.Namespace, settings: PiecewiseConfig, requests: Requests) -> Histogram:
    if requests.arrival_s is None and arguments.step_ms is None:
        return Histogram.of(requests.num_tokens)  # batch sizes, one per step
    step_ms = arguments.step_ms or _DEFAULT_STEP_MS
    return Histogram.of(
        decode_batches(requests, step_s=step_ms / 1000, max_num_seqs=step_limit(arguments, settings).size)
    )


def step_limit(arguments: argparse.Namespace, settings: PiecewiseConfig) -> Limit:
    """The largest step of this phase under the settings."""
    if arguments.phase == "prefill":
        return settings.prefill_limit()
    return settings.decode_limit(tokens_per_request=arguments.tokens_per_request)
