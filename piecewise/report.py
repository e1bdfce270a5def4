"""What was planned, captured and served, as text, JSON and Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from piecewise.lowering_report import LoweringReport
from piecewise.plan import EagerReason, FusionReport, SegmentPlan
from piecewise.startup_times import StartupTimes
from runners.stats import CallStats


@dataclasses.dataclass(frozen=True, slots=True)
class BucketReport:
    """How the capture of one bucket went.

    Attributes:
        status: "captured", "eager" (the trace excludes it) or "failed".
        reason: why it is not captured.
        grown_bytes: by how much the shared pool grew for it.
        device_bytes: by how much the device's free memory shrank for it: pool, static buffers and the
            driver's share. The same as `grown_bytes` where there is no device to ask.
    """

    bucket: int
    status: str
    reason: str
    num_graphs: int = 0
    num_ops: int = 0
    grown_bytes: int = 0
    device_bytes: int = 0
    capture_ms: float = 0.0
    coverage: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentReport:
    """One segment of the plan as a reader sees it."""

    index: int
    kind: str
    num_ops: int
    module_path: str
    ops: tuple[str, ...]
    reasons: tuple[EagerReason, ...]
    captured_ops: int = 0

    def notes(self, quote: str = "") -> list[str]:
        """Why each op is not in a graph, or what is special about the graph; ops between `quote` marks."""
        if self.kind == "boundary":
            why = f", not captured: {self.reasons[0].detail}" if self.reasons else ""
            return [f"{quote}{self.ops[0]}{quote}: a registered boundary op{why}"]
        if self.captured_ops:
            return [f"{self.captured_ops} boundary ops captured"]
        return [f"{quote}{reason.op}{quote}: {reason.detail}" for reason in self.reasons]


@dataclasses.dataclass(frozen=True, slots=True)
class PlanReport:
    """A cut plan: its segments, the share of ops in graphs, and what was fused in them."""

    token_dim: str
    segments: tuple[SegmentReport, ...]
    coverage: float
    num_dead_ops: int
    fusions: FusionReport | None = None

    @classmethod
    def of(cls, plan: SegmentPlan, input_names: Mapping[int, str]) -> PlanReport:
        segments = tuple(
            SegmentReport(s.index, s.kind, s.num_ops, s.module_path, s.op_names, s.reasons, s.captured_ops)
            for s in plan.segments
        )
        carried = ", ".join(
            f"{input_names.get(rule.leaf, rule.leaf)} dim {', '.join(map(str, rule.dims))}"
            for rule in plan.token_dim.inputs
        )
        return cls(carried, segments, plan.coverage, plan.num_dead_ops, plan.fusions)

    def count(self, kind: str) -> int:
        return sum(segment.kind == kind for segment in self.segments)

    def reasons(self) -> Counter[str]:
        return Counter(reason.code for segment in self.segments for reason in segment.reasons)

    def __str__(self) -> str:
        rows = [("segment", "kind", "ops", "module path", "reason")]
        for segment in self.segments:
            notes = segment.notes()
            more = f" (+{len(notes) - 1})" if len(notes) > 1 else ""
            source = segment.reasons[0].source if segment.reasons and segment.kind == "eager" else ""
            where = f" at {source}" if source else ""
            rows.append(
                (
                    str(segment.index),
                    segment.kind,
                    str(segment.num_ops),
                    segment.module_path,
                    (notes[0] if notes else "") + more + where,
                )
            )
        summary = (
            f"{self.count('graph')} graph, {self.count('boundary')} boundary and {self.count('eager')} eager "
            f"segments; {self.coverage:.1%} of ops in graphs; tokens in {self.token_dim}; "
            f"{self.num_dead_ops} dead ops removed"
        )
        fused = [str(self.fusions)] if self.fusions is not None else []
        return "\n".join([text_table(rows), summary, *fused])

    def to_markdown(self) -> str:
        lines = ["| segment | kind | ops | module path | reason |", "|---|---|---|---|---|"]
        for segment in self.segments:
            reason = "; ".join(segment.notes("`"))
            lines.append(
                f"| {segment.index} | {segment.kind} | {segment.num_ops} | {segment.module_path} | {reason} |"
            )
        fused = [f"* {line.strip()}" for line in str(self.fusions).splitlines()] if self.fusions else []
        return "\n".join([*lines, "", f"{self.coverage:.1%} of ops in graphs.", *fused])

    def to_json(self) -> str:
        return json.dumps(self.asdict(), indent=2)

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureReport:
    """What one `capture()` or `refresh()` did, bucket by bucket, largest first.

    Attributes:
        lowerings: how the segments were lowered, once per trace; `times`: seconds spent on this signature.
        fusions: what was rewritten in the graph segments, None where nothing was to be.
    """

    buckets: tuple[BucketReport, ...]
    serves_one_token: bool
    pool_bytes: int
    buffer_bytes: int
    device_bytes: int = 0
    lowerings: tuple[LoweringReport, ...] = ()
    times: StartupTimes = dataclasses.field(default_factory=StartupTimes)
    fusions: FusionReport | None = None

    @property
    def captured(self) -> tuple[int, ...]:
        return tuple(sorted(report.bucket for report in self.buckets if report.status == "captured"))

    @property
    def ok(self) -> bool:
        """Whether every bucket that was asked for has graphs."""
        return all(report.status == "captured" for report in self.buckets)

    def __str__(self) -> str:
        rows = [("bucket", "status", "graphs", "ops", "ms", "pool grew", "device", "reason")]
        for report in self.buckets:
            rows.append(
                (
                    str(report.bucket),
                    report.status,
                    str(report.num_graphs),
                    str(report.num_ops),
                    f"{report.capture_ms:.0f}",
                    shown_bytes(report.grown_bytes),
                    shown_bytes(report.device_bytes),
                    report.reason.splitlines()[0] if report.reason else "",
                )  # fmt: skip
            )
        one = "replay" if self.serves_one_token else "run eagerly, as another program"
        sizes = f"pool {shown_bytes(self.pool_bytes)}, buffers {shown_bytes(self.buffer_bytes)}"
        sizes += f", {shown_bytes(self.device_bytes)} of the device in all"
        fused = [str(self.fusions)] if self.fusions is not None else []
        lines = [text_table(rows), f"{sizes}; calls of one token {one}", *fused]
        return "\n".join([*lines, *map(str, self.lowerings), f"start-up took {self.times}"])

    def asdict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "captured": list(self.captured), "ok": self.ok}

    def to_json(self) -> str:
        return json.dumps(self.asdict(), indent=2)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Plans, captures and calls of one graphed model.

    Attributes:
        left_out: listed sizes that are not captured for any signature, each with its reason.
    """

    plans: tuple[PlanReport, ...]
    captures: tuple[CaptureReport, ...]
    stats: CallStats
    unseen: Mapping[str, int]
    changes: tuple[str, ...]
    engine: str
    left_out: tuple[str, ...] = ()

    @property
    def coverage(self) -> float:
        """Share of the first plan's ops that are in graphs."""
        return self.plans[0].coverage if self.plans else 0.0

    def __str__(self) -> str:
        parts = ["\n".join([f"engine: {self.engine}", *(f"left out: {text}" for text in self.left_out)])]
        for index, (plan, capture) in enumerate(zip(self.plans, self.captures, strict=True)):
            parts += [f"signature {index}", str(plan), str(capture)]
        parts.append(self._calls())
        return "\n\n".join(parts)

    def _calls(self) -> str:
        total = self.stats.replays + self.stats.eager_calls
        share = f" ({self.stats.replays / total:.1%})" if total else ""
        lines = [f"calls: {self.stats.replays} replayed of {total}{share}"]
        for bucket, count in sorted(self.stats.calls_by_bucket.items()):
            lines.append(f"  bucket {bucket}: {count}")
        for code, count in self.stats.reasons.most_common():
            lines.append(f"  eager, {code.value}: {count}. {code.explanation} {code.fix}")
        lines += [f"  unseen signature, {count} calls: {text}" for text, count in self.unseen.items()]
        lines += [f"  changed since capture: {text}" for text in self.changes]
        return "\n".join(lines)

    def asdict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "left_out": list(self.left_out),
            "coverage": self.coverage,
            "plans": [plan.asdict() for plan in self.plans],
            "captures": [capture.asdict() for capture in self.captures],
            "calls": self.stats.asdict(),
            "unseen_signatures": dict(self.unseen),
            "changes": list(self.changes),
        }

    def to_json(self) -> str:
        return json.dumps(self.asdict(), indent=2)

    def to_markdown(self) -> str:
        parts = ["# Graphed prefill report", "", *(f"* left out: {text}" for text in self.left_out)]
        for index, (plan, capture) in enumerate(zip(self.plans, self.captures, strict=True)):
            parts += [f"## Signature {index}", "", plan.to_markdown(), "", "```", str(capture), "```", ""]
        return "\n".join([*parts, "## Calls", "", "```", self._calls(), "```", ""])


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def shown_bytes(count: int) -> str:
    """A size for readers, in binary units."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
