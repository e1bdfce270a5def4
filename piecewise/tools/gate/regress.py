"""Runs `piecewise regress BASELINE CURRENT`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from piecewise.errors.gate import AnotherCase, DirtyBaseline, WrongThreshold
from piecewise.settings.sources import environment
from piecewise.tools.command_output import OutputFile
from piecewise.tools.exit_codes import ExitCode
from piecewise.tools.gate.baseline import Baseline, read_baseline, read_record
from piecewise.tools.gate.compare import Comparison, compare, machine_differences
from piecewise.tools.gate.outputs import benchmark_lines, history_figure, junit
from piecewise.tools.gate.quantities import RULES, Threshold
from piecewise.tools.plot import save_figure


def run(arguments: argparse.Namespace) -> ExitCode:
    """Compares, prints and writes what was asked for; --update then accepts the current record."""
    target = OutputFile("BASELINE", arguments.baseline)
    if arguments.update:
        target.check()
    rules, current = _rules(arguments.threshold), read_record(arguments.current)
    baseline = None
    if not arguments.update or Path(arguments.baseline).exists():
        baseline = read_baseline(arguments.baseline)
    # With --update the new baseline is judged: an old one can be replaced.
    judged = current if arguments.update or baseline is None else baseline.record
    if arguments.strict and judged["environment"].get("dirty"):
        raise DirtyBaseline(path=arguments.current if arguments.update else arguments.baseline)
    comparison = _compared(baseline, current, rules, may_differ=arguments.update)
    if comparison is not None:
        print(comparison)
        _write(comparison, current, arguments)
    if arguments.plot is not None:
        save_figure(history_figure(baseline or Baseline(current), current), arguments.plot)
    if arguments.update:
        following = Baseline(current)
        if (
            baseline is not None
            and comparison is not None
            and not machine_differences(baseline.record, current)
        ):
            changed = [*comparison.of("regression"), *comparison.of("better")]
            following = baseline.followed_by(current, {finding.name for finding in changed})
        target.write(following.to_json())
        runs = f"after {len(following.history)} earlier runs"
        print(f"baseline {arguments.baseline} now holds {arguments.current}, {runs}")
        return ExitCode.RIGHT
    return ExitCode.DIFFERENT if comparison is not None and comparison.regressed else ExitCode.RIGHT


def _compared(
    baseline: Baseline | None, current: dict[str, object], rules: dict[str, Threshold], *, may_differ: bool
) -> Comparison | None:
    if baseline is None:
        return None
    try:
        return compare(baseline, current, rules)
    except AnotherCase as error:
        if not may_differ:
            raise
        print(f"piecewise: the baseline is of something else and begins anew: {error.got}", file=sys.stderr)
        return None


def _write(comparison: Comparison, current: dict[str, object], arguments: argparse.Namespace) -> None:
    summary = environment().get("GITHUB_STEP_SUMMARY")
    if summary:
        with (
            OutputFile("GITHUB_STEP_SUMMARY", summary).writing(),
            open(summary, "a", encoding="utf-8") as file,
        ):
            file.write(comparison.to_markdown() + "\n")
    if arguments.json is not None:
        arguments.json.write(comparison.to_json() + "\n")
    if arguments.junit is not None:
        arguments.junit.write(junit(comparison))
    if arguments.benchmark is not None:
        arguments.benchmark.write(benchmark_lines(current))


def _rules(given: Sequence[str]) -> dict[str, Threshold]:
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
