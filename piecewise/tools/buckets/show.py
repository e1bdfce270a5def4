"""Runs `piecewise buckets check` and `show`: prints a bucket file, and the part of it without effect."""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left
from collections.abc import Iterator
from typing import TypeAlias

from piecewise.report.record import table
from piecewise.settings.config import PiecewiseConfig
from piecewise.settings.limits import Clipping
from piecewise.tools.exit_codes import ExitCode
from runners.buckets import TokenBuckets

# Both ends of a range of steps' sizes, included; None is no end.
_Range: TypeAlias = "tuple[int, int | None]"
# A size (None: above all), the steps that it serves, its worst padding, the steps that run eagerly, and why.
_Row: TypeAlias = "tuple[int | None, _Range | None, float | None, _Range | None, str | None]"
_COLUMNS = ("size", "serves", "worst_padding", "eager", "why")

# The lists of a file, and what one of their sizes is called.
_SIZES = {"buckets": "bucket", "decode_batch_sizes": "decode batch size"}
_NO_DECODE = "This version captures no decode steps; it checks and plans their batch sizes."


def run_check(arguments: argparse.Namespace) -> ExitCode:
    """Prints the sizes that cannot take effect, if any; an invalid file is a `ConfigError`."""
    path, clipped = arguments.file, _clipped(PiecewiseConfig.from_toml(arguments.file), arguments)
    found = [(name, clamped) for name, each in clipped.items() for clamped in each.clamped]
    counts = {name: len(each.sizes) for name, each in clipped.items()}
    if arguments.json:
        listed = [{"setting": name, **clamped._asdict()} for name, clamped in found]
        print(json.dumps({"file": path, "within_reach": counts, "out_of_reach": listed}, indent=1))
        return ExitCode.DIFFERENT if found else ExitCode.RIGHT
    for name, clamped in found:
        print(f"{path}: {_SIZES[name]} {clamped}")
    if found:
        print("These are never captured; remove them, or raise the limits.")
    else:
        words = (f"{count} {_SIZES[name]}{'s' if count > 1 else ''}" for name, count in counts.items())
        print(f"{path}: {' and '.join(words)}, all within reach")
    if "decode_batch_sizes" in clipped:
        print(_NO_DECODE)
    return ExitCode.DIFFERENT if found else ExitCode.RIGHT


def run_show(arguments: argparse.Namespace) -> ExitCode:
    """Prints a row per size, and one for larger steps; an invalid file is a `ConfigError`."""
    config = PiecewiseConfig.from_toml(arguments.file)
    # The padding ratio applies to prefill calls only.
    ratios = {"buckets": config.max_padding_ratio}
    found = {name: list(_rows(each, ratios.get(name))) for name, each in _clipped(config, arguments).items()}
    if arguments.json:
        described = {
            name: [dict(zip(_COLUMNS, row, strict=True)) for row in rows] for name, rows in found.items()
        }
        print(json.dumps({"file": arguments.file, **described}, indent=1))
        return ExitCode.RIGHT
    for name, rows in found.items():
        if name == "decode_batch_sizes":
            print(f"\n{_NO_DECODE}")
        texts: list[tuple[object, ...]] = [(_SIZES[name], "serves", "worst padding", "runs eagerly", "why")]
        for size, serves, padding, eager, why in rows:
            worst = f"{padding:.2f}x" if padding is not None else "-"
            texts.append((size or "larger", _span(serves), worst, _span(eager), why or ""))
        print(table(texts))
    return ExitCode.RIGHT


def _clipped(config: PiecewiseConfig, arguments: argparse.Namespace) -> dict[str, Clipping]:
    decode = config.decode_sizes(tokens_per_request=arguments.tokens_per_request)
    return {"buckets": config.prefill_sizes()} | ({} if decode is None else {"decode_batch_sizes": decode})


def _rows(clipping: Clipping, max_padding_ratio: float | None) -> Iterator[_Row]:
    """Yields what becomes of steps by size, and at last of those above all sizes that are captured."""
    buckets, limit = TokenBuckets(clipping.sizes), clipping.limit
    for size in buckets.sizes:
        low, high = buckets.range_for(size)
        ratio = max_padding_ratio or size
        # As calls are compared, since the quotient of the two is rounded otherwise.
        first = low + bisect_left(range(low, high), True, key=lambda n: size <= ratio * n)
        eager, why = None, None
        if first > low:
            eager, why = (low, first - 1), f"padded by more than max_padding_ratio {ratio:g}"
        yield size, (first, high), size / first, eager, why
    for clamped in clipping.clamped:
        yield clamped.size, None, None, None, f"never captured: {clamped}"
    above = None if limit.size == buckets.max else (buckets.max + 1, limit.size)
    whys = ["above the largest size that is captured"] if above else []
    whys += [] if limit.size is None else [f"no step is larger than {limit.size} = {limit.reason}"]
    yield None, None, None, above, "; ".join(whys)


def _span(ends: _Range | None) -> str:
    if ends is None:
        return "-"
    low, high = ends
    return f"{low} and more" if high is None else str(low) if low == high else f"{low}-{high}"
