"""Enforces `min_coverage`: too few ops in graphs are an error, not just a slow model."""

from __future__ import annotations

from collections.abc import Sequence

from piecewise.errors.report import LowBucketCoverage, LowPlanCoverage
from piecewise.ir.plan import EagerReason, SegmentPlan
from piecewise.report.report import BucketReport

_MAX_LISTED = 8


def require_plan(plan: SegmentPlan, minimum: float | None) -> None:
    """Raises LowPlanCoverage, which names the ops outside of graphs, if a plan has less than `minimum`."""
    if minimum is None or plan.coverage >= minimum:
        return
    ops = [_described(reason) for segment in plan.segments for reason in segment.reasons]
    raise LowPlanCoverage(ops=_listed(ops), minimum=minimum, coverage=plan.coverage, num_eager=len(ops))


def require_buckets(reports: Sequence[BucketReport], minimum: float | None) -> None:
    """Raises LowBucketCoverage, which names each bucket with less than `minimum` of its ops in graphs."""
    lines = []
    for report in reports:
        if minimum is not None and report.coverage < minimum:
            why = f", {report.status}: {report.reason.splitlines()[0]}" if report.reason else ""
            lines.append(f"bucket {report.bucket}: {report.coverage:.1%}{why}")
    if lines:
        raise LowBucketCoverage(
            buckets=_listed(lines), minimum=minimum, num_buckets=len(reports), num_low=len(lines)
        )


def _described(reason: EagerReason) -> str:
    where = f" in {reason.module_path}" if reason.module_path else ""
    source = f" at {reason.source}" if reason.source else ""
    return f"{reason.op} ({reason.code}: {reason.detail}){where}{source}"


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    shown = "".join(f"\n  {line}" for line in [*lines[:_MAX_LISTED], *more])
    return f":{shown}\n " if shown else ""
