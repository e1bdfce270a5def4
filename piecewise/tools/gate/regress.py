"""Runs `piecewise regress BASELINE CURRENT`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from piecewise.errors.gate import AnotherCase, DirtyBaseline, NothingInCommon, WrongThreshold
from piecewise.settings.toml_file import replace_text
from piecewise.tools.command_output import check_writable, writing
from piecewise.tools.exit_codes import ExitCode
from piecewise.tools.gate.baseline import Baseline, read_baseline, read_record
from piecewise.tools.gate.compare import MACHINE, Comparison, compare
from piecewise.tools.gate.outputs import plot_history, write_benchmark, write_junit
from piecewise.tools.gate.quantities import RULES, Rule


def run(arguments: argparse.Namespace) -> ExitCode:
    """Compares, prints and writes what was asked for; --update then accepts the current record."""
    outputs = {option: getattr(arguments, option) for option in ("json", "junit", "benchmark", "plot")}
    for option, path in outputs.items():
        check_writable(f"--{option}", path)
    if arguments.update:
        check_writable("BASELINE", arguments.baseline)
    rules, current = _rules(arguments.threshold), read_record(arguments.current)
    baseline = None
    if not arguments.update or Path(arguments.baseline).exists():
        baseline = read_baseline(arguments.baseline)
        if arguments.strict and baseline.record["environment"].get("dirty"):
            raise DirtyBaseline(path=arguments.baseline)
    comparison = _compared(baseline, current, rules, may_differ=arguments.update)
    if comparison is not None:
        print(comparison)
        _write(comparison, baseline or Baseline(current), current, outputs)
    if arguments.update:
        is_same = comparison is not None and all(
            baseline.record["environment"].get(key) == current["environment"].get(key) for key in MACHINE
        ) if baseline is not None else False  # fmt: skip
        following = (baseline or Baseline(current)).followed_by(current, is_same_case=is_same)
        with writing("BASELINE", arguments.baseline):
            following.write(Path(arguments.baseline))
        print(
            f"baseline {arguments.baseline} now holds {arguments.current},"
            f" after {len(following.history)} earlier runs"
        )
        return ExitCode.RIGHT
    return ExitCode.DIFFERENT if comparison is not None and comparison.regressed else ExitCode.RIGHT


def _compared(
    baseline: Baseline | None, current: dict[str, object], rules: dict[str, Rule], *, may_differ: bool
) -> Comparison | None:
    if baseline is None:
        return None
    try:
        return compare(baseline, current, rules)
    except (AnotherCase, NothingInCommon) as error:
        if not may_differ:
            raise
        print(f"piecewise: the baseline is of something else and begins anew: {error.got}", file=sys.stderr)
        return None


def _write(
    comparison: Comparison, baseline: Baseline, current: dict[str, object], outputs: dict[str, str | None]
) -> None:
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with writing("GITHUB_STEP_SUMMARY", summary), open(summary, "a", encoding="utf-8") as file:
            file.write(comparison.to_markdown() + "\n")
    writers = {
        "json": lambda path: replace_text(path, comparison.to_json() + "\n"),
        "junit": lambda path: write_junit(path, comparison),
        "benchmark": lambda path: write_benchmark(path, current),
        "plot": lambda path: plot_history(path, baseline, current),
    }
    for option, path in outputs.items():
        if path is not None:
            with writing(f"--{option}", path):
                writers[option](Path(path))


def _rules(given: Sequence[str]) -> dict[str, Rule]:
    rules = dict(RULES)
    for text in given:
        kind, _, share = text.partition("=")
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if kind not in rules or not 0 < value < 100:
            raise WrongThreshold(given=text, kinds=", ".join(RULES))
        rules[kind] = rules[kind]._replace(share=value)
    return rules
