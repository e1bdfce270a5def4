"""Writes a comparison for the tools of a pipeline: JUnit XML, github-action-benchmark's JSON, and a plot."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any
from xml.etree import ElementTree

from piecewise.tools.gate.baseline import Baseline, run_of
from piecewise.tools.gate.compare import Comparison
from piecewise.tools.gate.quantities import quantities
from piecewise.tools.plot import add_legend, line_style, new_panels

# Control characters of a name or a reason, escaped or not, which no XML file may hold.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLOTTED = ("over-floor", "over-graphed", "over-eager")


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
    text = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
    return _NOT_IN_XML.sub("\ufffd", text) + "\n"


def benchmark_lines(record: Mapping[str, Any]) -> str:
    """Formats the array that github-action-benchmark reads with `tool: customSmallerIsBetter`."""
    environment = record["environment"]
    extra = f"{environment['device']}, torch {environment['torch']}"
    lines = [
        {"name": name, "value": each.value, "unit": each.unit or "ratio", "extra": extra,
         **({"range": f"{each.low:.4g} to {each.high:.4g}"} if each.high > each.low else {})}
        for name, each in quantities(record).items() if math.isfinite(each.value)
    ]  # fmt: skip
    return json.dumps(lines, indent=1) + "\n"


def history_figure(baseline: Baseline, record: Mapping[str, Any]) -> Any:
    """Draws each ratio with its interval over the baseline's runs and the current one, which comes last.

    Raises:
        NoMatplotlib: it is not installed.
    """
    runs = [*baseline.history, run_of(baseline.record), run_of(record)]
    names = [name for name, each in quantities(record).items() if each.kind in _PLOTTED]
    pairs: dict[str, list[str]] = {}
    for name in names:
        pairs.setdefault(name.rpartition(",")[0], []).append(name)
    environment = record["environment"]
    versions = f"torch {environment['torch']}, {environment['date']}"
    figure, panels = new_panels(
        f"{record['spec']}\n{environment['device']}, {versions}", [1.5] * len(pairs) or [1]
    )
    for panel, (pair, alike) in zip(panels, pairs.items(), strict=False):
        for index, name in enumerate(alike):
            points = [(x, *run["values"][name]) for x, run in enumerate(runs) if name in run["values"]]
            x, value, low, high = (list(column) for column in zip(*points, strict=True))
            gaps = [[max(v - each, 0) for v, each in zip(value, low, strict=True)],
                    [max(each - v, 0) for v, each in zip(value, high, strict=True)]]  # fmt: skip
            panel.errorbar(
                x, value, yerr=gaps, capsize=3, label=name.rpartition(", ")[2], **line_style(index)
            )
        panel.set_ylabel(pair)
        add_legend(panel)
    commits = [str(run["commit"] or "?")[:7] for run in runs]
    panels[-1].set_xticks(range(len(runs)), [*commits[:-1], f"{commits[-1]}, now"], rotation=90)
    panels[-1].set_xlabel("commit of the run")
    return figure
