"""Runs `piecewise buckets check` and `show`: prints a bucket file, and the part of it without effect."""

from __future__ import annotations

import argparse
from math import ceil

from piecewise.report.record import table
from piecewise.settings.config import PiecewiseConfig
from piecewise.settings.limits import Clipping
from piecewise.tools.exit_codes import ExitCode
from runners.buckets import TokenBuckets


def run_check(arguments: argparse.Namespace) -> ExitCode:
    """Prints the settings that cannot take effect, if any; an invalid file is a `ConfigError`."""
    path, config = arguments.file, PiecewiseConfig.from_toml(arguments.file)
    clipped = _clipped(config, arguments.tokens_per_request)
    found = [f"{path}: {name} {each}" for name, clipping in clipped.items() for each in clipping.clamped]
    if not found:
        counts = " and ".join(f"{len(clipping.sizes)} {name}s" for name, clipping in clipped.items())
        print(f"{path}: {counts}, all within reach")
        return ExitCode.RIGHT
    print("\n".join(found))
    print("These are never captured; remove them, or raise the limits.")
    return ExitCode.DIFFERENT


def run_show(arguments: argparse.Namespace) -> ExitCode:
    """Prints a row per bucket; an invalid file is a `ConfigError`."""
    config = PiecewiseConfig.from_toml(arguments.file)
    for name, clipping in _clipped(config, arguments.tokens_per_request).items():
        # The padding ratio applies to prefill calls only.
        ratio = config.max_padding_ratio if name == "bucket" else None
        print(table(_rows(name, clipping, ratio)))
        print(_above(clipping, "tokens" if name == "bucket" else "requests") + "\n")
    return ExitCode.RIGHT


def _clipped(config: PiecewiseConfig, tokens_per_request: int) -> dict[str, Clipping]:
    found = {"bucket": config.prefill_sizes()}
    decode = config.decode_sizes(tokens_per_request=tokens_per_request)
    if decode is not None:
        found["decode batch size"] = decode
    return found


def _rows(name: str, clipping: Clipping, ratio: float | None) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [(name, "serves", "worst padding", "reachable")]
    buckets = TokenBuckets(clipping.sizes)
    for size in buckets.sizes:
        low, high = buckets.range_for(size)
        within = low if ratio is None else max(low, ceil(size / ratio))
        reach = "yes"
        if within > low:
            reach = f"yes; {_span(low, within - 1)} eager: beyond max_padding_ratio {ratio:g}"
        rows.append((size, _span(within, high), f"{size / within:.2f}x", reach))
    for clamped in clipping.clamped:
        rows.append((clamped.size, "-", "-", f"no: {clamped}"))
    return rows


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _above(clipping: Clipping, unit: str) -> str:
    top, limit = clipping.sizes[-1], clipping.limit
    if limit.size is None:
        return f"more than {top} {unit}: eager, above the largest"
    if top == limit.size:
        return f"every step up to the limit of {top} {unit} ({limit.reason}) is served"
    return f"{_span(top + 1, limit.size)} {unit}: eager, above the largest ({limit.reason} = {limit.size})"
