"""Writes a comparison for the tools of a pipeline: JUnit XML, github-action-benchmark's JSON, and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import groupby
from typing import Any
from xml.etree import ElementTree

from piecewise.tools.buckets.plot import new_figure, save_figure
from piecewise.tools.gate.baseline import Baseline, run_of
from piecewise.tools.gate.compare import Comparison
from piecewise.tools.gate.quantities import quantities

_PLOTTED = ("over-floor", "over-graphed", "over-eager")
_MAX_PLOTS = 24


def junit(comparison: Comparison) -> str:
    """Formats JUnit XML: a suite for each kind, a case for each finding, a failure for each regression."""
    root = ElementTree.Element("testsuites", name=f"piecewise regress {comparison.spec}")
    findings = sorted(comparison.findings, key=lambda each: each.kind)
    for kind, alike in groupby(findings, key=lambda each: each.kind):
        cases = list(alike)
        counts = {word: sum(each.verdict == verdict for each in cases)
                  for word, verdict in (("failures", "regression"), ("skipped", "not compared"))}  # fmt: skip
        attributes = {"name": kind, "tests": str(len(cases)), "errors": "0"}
        attributes |= {word: str(count) for word, count in counts.items()}
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        for each in cases:
            case = ElementTree.SubElement(suite, "testcase", classname=f"piecewise.{kind}", name=each.name)
            if each.verdict == "regression":
                text = f"{each.base} → {each.current}"
                ElementTree.SubElement(case, "failure", message=each.cause or text).text = text
            elif each.verdict == "not compared":
                ElementTree.SubElement(case, "skipped", message=each.cause)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def benchmark_lines(record: Mapping[str, Any]) -> str:
    """Formats the array that github-action-benchmark reads with `tool: customSmallerIsBetter`."""
    environment = record["environment"]
    extra = f"{environment['device']}, torch {environment['torch']}"
    lines = [
        {"name": name, "value": each.value, "unit": each.unit or "ratio", "extra": extra,
         **({"range": f"{each.low:.4g} to {each.high:.4g}"} if each.high > each.low else {})}
        for name, each in quantities(record).items()
    ]  # fmt: skip
    return json.dumps(lines, indent=1) + "\n"


def plot_history(path: str | os.PathLike[str], baseline: Baseline, record: Mapping[str, Any]) -> None:
    """Draws each ratio with its interval over the baseline's runs and the current one, which comes last.

    Raises:
        NoMatplotlib, WrongPlot: the library is absent, or the image cannot be written.
    """
    runs = [*baseline.history, run_of(baseline.record), run_of(record)]
    names = [name for name, each in quantities(record).items() if each.kind in _PLOTTED][:_MAX_PLOTS]
    columns = min(3, max(len(names), 1))
    rows = -(-len(names) // columns) or 1
    figure = new_figure(figsize=(4.5 * columns, 2.4 * rows + 0.6), layout="constrained")
    environment = record["environment"]
    figure.suptitle(
        f"{record['spec']}, {environment['device']}, torch {environment['torch']}, {environment['date']}"
    )
    for axes, name in zip(figure.subplots(rows, columns, squeeze=False).flat, names, strict=False):
        points = [(x, *run["values"][name]) for x, run in enumerate(runs) if name in run["values"]]
        x, value, low, high = (list(column) for column in zip(*points, strict=True))
        gaps = [
            [v - a for v, a in zip(value, low, strict=True)],
            [b - v for v, b in zip(value, high, strict=True)],
        ]
        axes.errorbar(x, value, yerr=gaps, marker="o", linestyle="-", color="tab:blue", capsize=3)
        axes.plot(x[-1:], value[-1:], marker="D", color="tab:red", linestyle="none")
        axes.set_title(name, fontsize=9)
        axes.set_xticks(
            range(len(runs)), [str(run["commit"] or "?")[:7] for run in runs], rotation=90, fontsize=7
        )
        axes.grid(alpha=0.3)
    for axes in figure.axes[len(names) :]:
        axes.set_visible(False)
    save_figure(figure, path)
