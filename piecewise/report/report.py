"""Reports what was planned, captured and served, as text, JSON and Markdown."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from piecewise.ir.plan import FusionReport, SegmentPlan
from piecewise.report.folding import SegmentReport, segment_rows
from piecewise.report.record import Record, shown_bytes, table
from piecewise.report.segments import LoweringReport, StreamReport
from piecewise.report.startup_times import LayerReuse, StartupTimes
from runners.stats import CallStats


@dataclasses.dataclass(frozen=True, slots=True)
class BucketReport:
    """Describes how the capture of one bucket went.

    Attributes:
        status: "captured"; "eager" (the model or its trace excludes the bucket); "failed" (its capture did);
            "suspended"; "waiting" (no call needed it yet); "left out" (the limits exclude it); or "disabled".
        reason: why the bucket is not captured, in words.
        code: the reason for programs: a `FallbackReason`, or "left_out"; empty if captured.
        coverage: share of the model's ops in the bucket's graphs.
        grown_bytes: growth of the shared pool at the bucket's capture.
        device_bytes: loss of free device memory at its capture: pool, static buffers and the driver's share;
            equal to `grown_bytes` without a device.
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
    code: str = ""


_MAX_PART_LINES = 6
_KINDS = {
    "graph": "ops that are captured once for each bucket, and then replayed together",
    "boundary": "an op that runs between graphs on the call's own tokens, as attention over a KV cache does",
    "eager": "ops that run between graphs one by one, for the reason that stands beside them",
}


@dataclasses.dataclass(frozen=True, slots=True)
class PlanReport(Record):
    """Describes a cut plan: segments, share of ops in graphs, fusions, lowering and streams.

    `fills` counts, by reason, uninitialized memory that is filled with zeros.
    """

    derived: ClassVar[tuple[str, ...]] = ("eager_shares",)

    token_dim: str
    segments: tuple[SegmentReport, ...]
    coverage: float
    fusions: FusionReport | None = None
    lowering: LoweringReport | None = None
    fills: Mapping[str, int] = dataclasses.field(default_factory=dict)
    streams: StreamReport | None = None

    @classmethod
    def of(
        cls,
        plan: SegmentPlan,
        input_names: Mapping[int, str],
        lowering: LoweringReport | None = None,
        streams: StreamReport | None = None,
    ) -> PlanReport:
        carried = ", ".join(
            f"{input_names.get(rule.leaf, rule.leaf)} dim {', '.join(map(str, rule.dims))}"
            for rule in plan.token_dim.inputs
        )
        segments = SegmentReport.all_of(plan.segments)
        return cls(carried, segments, plan.coverage, plan.fusions, lowering, plan.fills, streams)

    def count(self, kind: str) -> int:
        return sum(segment.kind == kind for segment in self.segments)

    def summary(self) -> dict[str, dict[str, int]]:
        """Counts the plan's segments by kind, boundary ops by name, and ops outside of graphs by reason."""
        boundary = (segment.ops[0] for segment in self.segments if segment.kind == "boundary")
        captured = sum(segment.captured_ops for segment in self.segments)
        return {
            "segments": Counter(segment.kind for segment in self.segments),
            "boundary_ops": Counter(boundary) + Counter({"captured": captured}),
            "eager_ops": Counter(
                f"{r.op} ({r.code})" for s in self.segments if s.kind == "eager" for r in s.reasons
            ),
        }

    def reasons(self) -> Counter[str]:
        return Counter(reason.code for segment in self.segments for reason in segment.reasons)

    def shares(self) -> dict[str, float]:
        """Returns the share of eager ops by reason code; with `coverage` the shares add up to 1."""
        total = sum(segment.num_ops for segment in self.segments if segment.kind != "boundary")
        found: dict[str, float] = {}
        for segment in self.segments:
            for reason in segment.reasons if segment.kind == "eager" else ():
                part = segment.num_ops / len(segment.reasons) / total
                found[reason.code] = found.get(reason.code, 0.0) + part
        return found

    @property
    def eager_shares(self) -> dict[str, float]:
        return self.shares()

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, full: bool = False) -> str:
        """Formats the plan with a line for all segments that are alike or, if `full`, a line for each."""
        rows = segment_rows(self.segments, full=full)
        kinds = [f"{kind}: {text}" for kind, text in _KINDS.items() if self.count(kind)]
        eager = "".join(f"; {share:.1%} eager: {code}" for code, share in sorted(self.shares().items()))
        summary = (
            f"{self.count('graph')} graph, {self.count('boundary')} boundary and {self.count('eager')} eager "
            f"segments; {self.coverage:.1%} of ops in graphs{eager}\n"
            f"the number of tokens is the size of {self.token_dim}"
        )
        hint = (
            f"{len(self.segments)} segments in {len(rows) - 1} lines; --full or to_text(full=True) lists each"
        )
        folded = [hint] if len(rows) <= len(self.segments) else []
        return "\n".join([table(rows), summary, *kinds, *self._parts(full=full), *folded])

    def _parts(self, *, full: bool = True) -> list[str]:
        counts = ", ".join(
            f"{count} {'' if why == 'needless' else 'kept: '}{why}"
            for why, count in self.fills.items()
            if full or why != "needless"  # nothing that a reader would have to know
        )
        why = "zeros keep an op from using what padded rows happen to hold"
        fills = f"zero-fills of empty memory: {counts} ({why})" if counts else None
        parts = [str(part) for part in (fills, self.fusions, self.lowering, self.streams) if part is not None]
        return parts if full else list(map(_cut, parts))

    def to_markdown(self) -> str:
        eager = "".join(f" {share:.1%} eager: `{code}`." for code, share in sorted(self.shares().items()))
        lines = [
            table(segment_rows(self.segments, full=True), markdown=True),
            "",
            f"{self.coverage:.1%} of ops in graphs.{eager}",
        ]
        parts = (f"* {line.strip()}" for part in self._parts() for line in part.splitlines())
        return "\n".join([*lines, *parts])


def _cut(text: str) -> str:
    """Cuts what has a line for each segment or layer to what fits on a screen."""
    lines = text.splitlines()
    left_out = len(lines) - _MAX_PART_LINES
    return "\n".join([*lines[:_MAX_PART_LINES], f"  and {left_out} more lines"]) if left_out > 1 else text


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureReport(Record):
    """Describes the state of each listed bucket for one signature, largest first.

    Attributes:
        lowerings: how the segments were lowered, once per trace.
        times: seconds spent on this signature.
        fusions: rewrites of the graph segments; None if the settings ask for none.
        streams: which segments run on several streams, once per trace; none if not asked for.
        one_token: why calls of one token run eagerly; empty if they replay.
        layers: how many layers of equal structure were traced; None if no two layers are equal.
        adapters: the model's active adapters, in words; empty for a model without adapters.
        other_state: how the state of the model that these graphs are of differs from the present one; the
            graphs wait for its return.
    """

    derived: ClassVar[tuple[str, ...]] = ("captured", "ok")

    buckets: tuple[BucketReport, ...]
    serves_one_token: bool
    pool_bytes: int
    buffer_bytes: int
    device_bytes: int = 0
    lowerings: tuple[LoweringReport, ...] = ()
    times: StartupTimes = dataclasses.field(default_factory=StartupTimes)
    fusions: FusionReport | None = None
    one_token: str = ""
    streams: tuple[StreamReport, ...] = ()
    layers: LayerReuse | None = None
    adapters: str = ""
    other_state: str = ""

    @property
    def captured(self) -> tuple[int, ...]:
        return tuple(sorted(report.bucket for report in self.buckets if report.status == "captured"))

    @property
    def ok(self) -> bool:
        """Whether every bucket that was asked for has graphs."""
        return all(report.status not in ("eager", "failed", "suspended") for report in self.buckets)

    def state(self) -> str:
        """Returns the state of the model that the graphs are of, if known, to follow a title."""
        waits = f"kept for its return: {self.other_state}" if self.other_state else ""
        told = "; ".join(filter(None, (self.adapters, waits)))
        return f" ({told})" if told else ""

    def __str__(self) -> str:
        heads = "bucket", "status", "graphs", "ops", "in graphs", "ms", "pool grew", "device", "reason"
        rows: list[tuple[object, ...]] = [heads]
        for each in self.buckets:
            sizes = shown_bytes(each.grown_bytes), shown_bytes(each.device_bytes)
            shares = f"{each.coverage:.1%}", f"{each.capture_ms:.0f}"
            reason = each.reason.splitlines()[0] if each.reason else ""
            rows.append((each.bucket, each.status, each.num_graphs, each.num_ops, *shares, *sizes, reason))
        one = "replay" if self.serves_one_token else f"run eagerly: {self.one_token}"
        memory = f"pool {shown_bytes(self.pool_bytes)}, buffers {shown_bytes(self.buffer_bytes)}"
        memory += f", {shown_bytes(self.device_bytes)} of the device in all"
        layers = f"; {self.layers}" if self.layers is not None else ""
        parts = (self.fusions, *self.lowerings, *self.streams, f"start-up took {self.times}{layers}")
        lines = [table(rows), f"{memory}; calls of one token {one}"]
        return "\n".join([*lines, *(str(part) for part in parts if part is not None)])


@dataclasses.dataclass(frozen=True, slots=True)
class Report(Record):
    """Reports the plans, captures and calls of one graphed model.

    Attributes:
        left_out: listed sizes that no signature captures, each with its reason.
        state: "captured", "not captured", "suspended", "released" or "disabled".
    """

    derived: ClassVar[tuple[str, ...]] = ("coverage",)

    plans: tuple[PlanReport, ...]
    captures: tuple[CaptureReport, ...]
    stats: CallStats
    unseen: Mapping[str, int]
    changes: tuple[str, ...]
    engine: str
    left_out: tuple[str, ...] = ()
    state: str = "captured"

    @property
    def coverage(self) -> float:
        """The share of the first plan's ops that are in graphs."""
        return self.plans[0].coverage if self.plans else 0.0

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, full: bool = False) -> str:
        """Formats the report; `full` gives each segment of the plans a line, as in `PlanReport.to_text`."""
        what = ", which plays recorded ops back one by one, without a GPU" if self.engine == "tape" else ""
        parts = ["\n".join([f"engine: {self.engine}{what}; {self._state()[0]}", *self._state()[1:]])]
        for index, (plan, capture) in enumerate(zip(self.plans, self.captures, strict=True)):
            title = f"signature {index}{capture.state()}"
            parts += [title, plan.to_text(full=full), str(capture)]
        parts.append(self._calls())
        return "\n\n".join(parts)

    @property
    def replayed(self) -> float:
        """The share of calls that were replayed; 0 without calls."""
        total = self.stats.replays + self.stats.eager_calls
        return self.stats.replays / total if total else 0.0

    def calls_by_bucket(self) -> list[dict[str, Any]]:
        """Returns, for each bucket with calls, counts, shares of all calls, and why calls ran eagerly.

        `op_coverage` is the largest share of ops in the bucket's graphs of any signature.
        """
        total = max(self.stats.replays + self.stats.eager_calls, 1)
        reports = [report for capture in self.captures for report in capture.buckets]
        found = []
        for bucket in sorted({*self.stats.calls_by_bucket, *self.stats.eager_by_bucket}):
            replayed = self.stats.calls_by_bucket.get(bucket, 0)
            reasons = self.stats.eager_by_bucket.get(bucket, Counter())
            eager = sum(reasons.values())
            found.append({
                "bucket": bucket, "replayed": replayed, "eager": eager,
                "share_of_calls": (replayed + eager) / total,
                "share_replayed": replayed / max(replayed + eager, 1),
                "op_coverage": max((r.coverage for r in reports if r.bucket == bucket), default=0.0),
                "reasons": {str(code): count for code, count in sorted(reasons.items())},
            })  # fmt: skip
        return found

    def shares_of_calls(self) -> dict[str, float]:
        """Returns the share of eager calls by reason code; with `replayed` the shares add up to 1."""
        total = self.stats.replays + self.stats.eager_calls
        return {str(code): count / total for code, count in sorted(self.stats.reasons.items())}

    def _state(self) -> list[str]:
        told = {
            "suspended": "suspended: the graphs' memory was given back until resume()",
            "released": "released: the graphs were given back until the next capture()",
            "disabled": "disabled: graphs are switched off by PIECEWISE_DISABLE or disable=True",
        }
        return [told.get(self.state, self.state), *(f"left out: {text}" for text in self.left_out)]

    def _calls(self) -> str:
        total = self.stats.replays + self.stats.eager_calls
        share = f" ({self.replayed:.1%})" if total else ""
        lines = [f"calls: {self.stats.replays} replayed of {total}{share}"]
        for row in self.calls_by_bucket():
            eager = ", ".join(f"{code} {count}" for code, count in row["reasons"].items())
            lines.append(
                f"  bucket {row['bucket']}: {row['replayed']} replayed, {row['eager']} eager"
                f"{f' ({eager})' if eager else ''}; {row['share_of_calls']:.1%} of calls, "
                f"{row['share_replayed']:.1%} of them replayed with {row['op_coverage']:.1%} of ops in graphs"
            )
        for code, count in self.stats.reasons.most_common():
            part = self.shares_of_calls()[code.value]
            lines.append(f"  eager, {code.value}: {count} ({part:.1%}). {code.told()}")
        lines += [f"  unseen signature, {count} calls: {text}" for text, count in self.unseen.items()]
        lines += [f"  changed since capture: {text}" for text in self.changes]
        return "\n".join(lines)

    def asdict(self) -> dict[str, Any]:
        found = Record.asdict(self)  # super() is not for dataclasses with slots
        found["unseen_signatures"] = found.pop("unseen")
        found["calls"] = {
            **self.stats.asdict(),
            "share_replayed": self.replayed,
            "shares_by_reason": self.shares_of_calls(),
            "buckets": self.calls_by_bucket(),
        }
        del found["stats"]
        return found

    def to_markdown(self) -> str:
        parts = ["# Graphed prefill report", "", *(f"* {text}" for text in self._state())]
        for index, (plan, capture) in enumerate(zip(self.plans, self.captures, strict=True)):
            parts += [f"## Signature {index}{capture.state()}", "", plan.to_markdown(), ""]
            parts += ["```", str(capture), "```", ""]
        return "\n".join([*parts, "## Calls", "", "```", self._calls(), "```", ""])
