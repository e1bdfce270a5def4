"""Refuses captures with too few graphs: a model that runs without them is slow for no visible reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import indent

from piecewise.errors.report import LowBucketCoverage, LowPlanCoverage, NothingCaptured
from piecewise.ir.plan import SegmentPlan
from piecewise.report.caller_warning import warn_caller
from piecewise.report.report import BucketReport, CaptureReport
from runners.stats import FallbackWarning

_MAX_LISTED = 8


def require_plan(plan: SegmentPlan, minimum: float | None) -> None:
    """Raises LowPlanCoverage, which names the ops outside of graphs, if a plan has less than `minimum`."""
    if minimum is None or plan.coverage >= minimum:
        return
    num_eager = sum(len(segment.reasons) for segment in plan.segments)
    raise LowPlanCoverage(
        ops=eager_ops(plan) + "\n ", minimum=minimum, coverage=plan.coverage, num_eager=num_eager
    )


def eager_ops(plan: SegmentPlan) -> str:
    """Lists the ops that run outside of graphs, each with its reason and source line, to follow a title."""
    return _listed([str(reason) for segment in plan.segments for reason in segment.reasons])


def require_graphs(report: CaptureReport | None, *, allow_eager: bool) -> None:
    """Warns of buckets without graphs; raises NothingCaptured if no bucket has any, unless `allow_eager`."""
    reports = [] if report is None else report.buckets
    lost = [each for each in reports if each.status in ("failed", "eager")]
    if not lost:
        return
    alike: dict[str, list[BucketReport]] = {}
    for each in lost:
        alike.setdefault(re.sub(rf"\b{each.bucket}\b", "n", each.reason), []).append(each)
    lines = [f"{_named(some)}: {indent(some[0].reason, '    ').strip()}" for some in alike.values()]
    if not allow_eager and len(lost) == len([each for each in reports if each.status != "left out"]):
        raise NothingCaptured(reasons=_listed(lines) + "\n ")
    have = "has" if len(lost) == 1 else "have"
    warn_caller(
        f"piecewise: {_named(lost)} {have} no graphs; such calls run eagerly{_listed(lines)}", FallbackWarning
    )


def _named(reports: Sequence[BucketReport]) -> str:
    sizes = [str(report.bucket) for report in reports]
    more = [f"{len(sizes) - _MAX_LISTED} more"] if len(sizes) > _MAX_LISTED else []
    *first, last = [*sizes[:_MAX_LISTED], *more]
    return f"buckets {', '.join(first)} and {last}" if first else f"bucket {last}"


def require_buckets(reports: Sequence[BucketReport], minimum: float | None) -> None:
    """Raises LowBucketCoverage, which names each bucket with less than `minimum` of its ops in graphs."""
    lines = []
    for report in reports:
        if minimum is not None and report.coverage < minimum:
            why = f", {report.status}: {report.reason.splitlines()[0]}" if report.reason else ""
            lines.append(f"bucket {report.bucket}: {report.coverage:.1%}{why}")
    if lines:
        raise LowBucketCoverage(
            buckets=_listed(lines) + "\n ", minimum=minimum, num_buckets=len(reports), num_low=len(lines)
        )


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    shown = "".join(f"\n  {line}" for line in [*lines[:_MAX_LISTED], *more])
    return f":{shown}" if shown else ""
