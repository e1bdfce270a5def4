"""Compares a benchmark record with a baseline and finds what is worse, better, or cannot be compared.

Numbers are compared against a threshold and against the measured spread: inside a run the bootstrap interval,
between runs the deviation of the baseline's history. What is no number (captured buckets, boundary ops,
fusions, what ran eagerly) is compared by name.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from piecewise.errors.gate import AnotherCase
from piecewise.report.record import Record, table
from piecewise.tools.gate.baseline import Baseline
from piecewise.tools.gate.quantities import RULES, Quantity, Threshold, captures, quantities, relative

# Versions and hardware that times depend on.
MACHINE = ("device", "driver", "python", "torch", "cuda", "triton")
# Quantiles of Student's t at 0.9995, by degrees of freedom: 999 of 1000 further runs lie inside of this many
# deviations. Below three runs the deviation is not known.
_T = {2: 31.6, 3: 12.9, 4: 8.61, 5: 6.87, 6: 5.96, 7: 5.41, 8: 5.04, 9: 4.78, 10: 4.59, 12: 4.32, 15: 4.07,
      19: 3.88, 23: 3.77, 27: 3.69}  # fmt: skip
# Few runs tell their own deviation so badly that alone they would let all but the largest changes pass. What
# a kind usually deviates by, a third of its threshold, counts as much as these many further runs.
_USUAL_RUNS = 8
VERDICTS = ("regression", "better", "within the spread", "same", "not compared")


@dataclass(frozen=True, slots=True)
class Finding:
    """Says how one quantity or fact compares.

    Attributes:
        kind: a key of `RULES`, or "buckets", "variants", "boundary ops", "eager ops", "fusions".
        verdict: one of `VERDICTS`.
        base, current: values as text.
        change: growth as a share of the baseline's value; None for what is no number.
        limit: the change from which on it counts: the threshold, or the measured spread where that is larger.
        cause: what happened, in words; empty if nothing did.
    """

    name: str
    kind: str
    verdict: str
    base: str
    current: str
    change: float | None = None
    limit: float | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """Holds the findings; `warnings` are about the records themselves."""

    derived: ClassVar[tuple[str, ...]] = ("regressed",)

    spec: str
    base_commit: str
    current_commit: str
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()

    @property
    def regressed(self) -> bool:
        return bool(self.of("regression"))

    def of(self, verdict: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == verdict]

    def __str__(self) -> str:
        return self._text(markdown=False)

    def to_markdown(self) -> str:
        mark = "❌" if self.regressed else "✅"
        return f"## {mark} piecewise regress: {self.spec}\n\n{self._text(markdown=True)}\n"

    def _text(self, *, markdown: bool) -> str:
        counts = ", ".join(f"{len(self.of(verdict))} {verdict}" for verdict in VERDICTS if self.of(verdict))
        lines = [f"{self.base_commit} → {self.current_commit}: {counts}"]
        shown = [each for each in self.findings if each.verdict not in ("same", "not compared")]
        if shown:
            rows: list[Sequence[object]] = [("", "what", "baseline", "now", "change", "counts beyond")]
            for each in sorted(shown, key=lambda each: VERDICTS.index(each.verdict)):
                shares = (_percent(each.change), _percent(each.limit, sign=""))
                rows.append((each.verdict, each.name, each.base, each.current, *shares))
            lines += ["", table(rows, markdown=markdown)]
        causes = [f"{each.name}: {each.cause}" for each in self.of("regression")]
        skipped = {each.cause for each in self.of("not compared")}
        notes = [*causes, *(f"not compared: {why}" for why in sorted(skipped)), *self.warnings]
        if notes:
            lines += ["", *(f"* {note}" for note in notes)]
        return "\n".join(lines)


def compare(
    baseline: Baseline, current: Mapping[str, Any], rules: Mapping[str, Threshold] = RULES
) -> Comparison:
    """Compares a record with the baseline.

    Args:
        current: a checked record.
        rules: thresholds by kind.

    Raises:
        AnotherCase: the two measured different specs or settings, or less was measured now.
    """
    base = baseline.record
    _require_same_case(base, current)
    differing = machine_differences(base, current)
    named = (("baseline", base), ("current record", current))
    dirty = [name for name, record in named if record["environment"].get("dirty")]
    findings = [*_compare_facts(base, current), *_compare_numbers(baseline, current, rules, differing)]
    if all(finding.verdict == "not compared" for finding in findings):
        raise AnotherCase(differing="no quantity that both measured")
    was, now = (str(record["environment"].get("commit") or "unknown")[:12] for record in (base, current))
    warnings = tuple(f"the {name} is of a tree with uncommitted changes" for name in dirty)
    return Comparison(str(current["spec"]), was, now, tuple(findings), warnings)


def machine_differences(base: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Lists hardware and versions that differ, so that times do not compare."""
    return [key for key in MACHINE if base["environment"].get(key) != current["environment"].get(key)]


def _require_same_case(base: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    pairs = {"spec": (base["spec"], current["spec"])}
    for name in sorted({*base["settings"], *current["settings"]}):
        pairs[name] = base["settings"].get(name), current["settings"].get(name)
    differing = [f"{name} {was!r}, now {now!r}" for name, (was, now) in pairs.items() if was != now]
    skipped = current["skipped"]
    differing += [
        f"{name} not asked for now" for name in _lost(base, current) if not _why_skipped(name, skipped)
    ]
    if differing:
        raise AnotherCase(differing="; ".join(differing))


def _lost(base: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Lists what the baseline measured and the current record did not, by variant and size."""
    was, now = (
        {f"{x['variant']}, {x['num_tokens']} tokens" for x in each["results"]} for each in (base, current)
    )
    return sorted(was - now)


def _why_skipped(name: str, skipped: Mapping[str, str]) -> str:
    return skipped.get(name) or skipped.get(name.split(",")[0], "")


def _compare_numbers(
    baseline: Baseline, current: Mapping[str, Any], rules: Mapping[str, Threshold], differing: Sequence[str]
) -> Iterator[Finding]:
    was, now = quantities(baseline.record), quantities(current)
    for name, present in now.items():
        rule, before = rules[present.kind], was.get(name)
        texts = (
            "–" if before is None else _shown(before.value, before.unit),
            _shown(present.value, present.unit),
        )
        if before is None:
            why = "the baseline lacks some quantities"
            yield Finding(name, present.kind, "not compared", *texts, cause=why)
        elif rule.is_timed and differing:
            why = f"times of another machine or version ({', '.join(differing)})"
            yield Finding(name, present.kind, "not compared", *texts, cause=why)
        else:
            yield judge(name, before, present, baseline.past(name), rule)
    for name in was.keys() - now.keys():
        # A skipped variant is a finding of its own.
        text, why = _shown(was[name].value, was[name].unit), "some quantities were not measured now"
        yield Finding(name, was[name].kind, "not compared", text, "–", cause=why)


def judge(name: str, before: Quantity, now: Quantity, past: Sequence[float], rule: Threshold) -> Finding:
    """Judges a number by its change from the median of the baseline's runs, `past` and `before`."""
    runs = [*past, before.value]
    base = statistics.median(runs)
    change = relative(base, now.value)
    share, spread = rule.share, 2 * math.hypot(before.spread, now.spread)
    if len(runs) <= min(_T):
        share *= 2  # what equal runs differ by is not known yet
    elif base:
        free, deviation = len(runs) - 1, _deviation(runs) / base
        squares = _USUAL_RUNS * (rule.share / 3) ** 2 + free * deviation**2
        alone, pooled = (
            _t(free) * deviation,
            _t(free + _USUAL_RUNS) * math.sqrt(squares / (free + _USUAL_RUNS)),
        )
        spread = max(spread, math.sqrt(1 + 1 / len(runs)) * min(alone, pooled))
    limit = max(share, spread)
    counts = abs(now.value - base) > rule.least
    if counts and abs(change) > limit:
        verdict = "regression" if change > 0 else "better"
    else:
        verdict = "within the spread" if counts and abs(change) > share else "same"
    texts = _shown(base, now.unit), _shown(now.value, now.unit)
    cause = f"{texts[0]} became {texts[1]}" if verdict == "regression" else ""
    return Finding(name, now.kind, verdict, *texts, change, limit, cause)


def _deviation(runs: Sequence[float]) -> float:
    """Estimates the standard deviation from one run to the next, so that a slow drift does not count as noise
    and is found: it leaves the median of the runs behind."""
    return math.sqrt(statistics.fmean((b - a) ** 2 / 2 for a, b in zip(runs, runs[1:], strict=False)))


def _t(free: int) -> float:
    return _T[max(each for each in _T if each <= free)]


def _compare_facts(base: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Finding]:
    """Compares what has names: variants and sizes, captured buckets, boundary ops, eager ops, fusions."""
    for name in _lost(base, current):
        why = _why_skipped(name, current["skipped"])
        yield Finding(name, "variants", "regression", "measured", "not measured", cause=why)
    then = dict(captures(base))
    for name, capture in captures(current):
        if name in then:
            yield from _compare_captures(name, then[name], capture)


def _compare_captures(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Finding]:
    outcome = {each["bucket"]: each for each in now["buckets"]}
    for bucket in sorted({*was["captured"], *now["captured"]}):
        title = f"{name}: bucket {bucket}"
        if bucket not in now["captured"]:
            there = outcome.get(bucket)
            why = f"it is {there['status']}: {there['reason']}" if there else "it is not listed any more"
            yield Finding(title, "buckets", "regression", "captured", "not captured", cause=why)
        else:
            is_new = bucket not in was["captured"]
            yield Finding(
                title, "buckets", "better" if is_new else "same", "–" if is_new else "captured", "captured"
            )
    parts = (
        ("boundary ops", was["plan"]["boundary_ops"], now["plan"]["boundary_ops"], -1,
         "{gone} fewer calls of {op} are boundaries: they are in a graph segment, or gone from the model"),
        ("eager ops", was["plan"]["eager_ops"], now["plan"]["eager_ops"], 1,
         "{more} more of {op} run outside of graphs"),
        ("fusions", _matches(was), _matches(now), -1, "the pass {op} matches {gone} fewer times{notes}"),
    )  # fmt: skip
    notes = "; ".join((now.get("fusions") or {}).get("notes", ()))
    for kind, before, after, worse, cause in parts:
        for op in sorted({*before, *after}):
            old, new = before.get(op, 0), after.get(op, 0)
            change = (new > old) - (new < old)
            verdict = {0: "same", worse: "regression"}.get(change, "better")
            words = {"op": op, "gone": old - new, "more": new - old, "notes": f" ({notes})" if notes else ""}
            text = cause.format(**words) if verdict == "regression" else ""
            yield Finding(f"{name}: {kind}, {op}", kind, verdict, str(old), str(new), cause=text)


def _matches(capture: Mapping[str, Any]) -> dict[str, int]:
    return dict((capture.get("fusions") or {}).get("matches", ()))


def _shown(value: float, unit: str) -> str:
    return f"{value:.4g} {unit}".rstrip() if unit != "bytes" else f"{value / 2**20:.1f} MiB"


def _percent(share: float | None, sign: str = "+") -> str:
    return "" if share is None else f"{share:{sign}.1%}"
