"""`min_coverage`: a plan, or a bucket, with too few of its ops in graphs is an error and not a slow model."""

from __future__ import annotations

from collections.abc import Sequence

from piecewise.ir.plan import EagerReason, SegmentPlan
from piecewise.report.report import BucketReport
from runners.errors import CaptureError

_MAX_LISTED = 8


class CoverageError(CaptureError):
    """Fewer of the model's ops are in graphs than `min_coverage` asks for."""


def require_plan(plan: SegmentPlan, minimum: float | None) -> None:
    """Raises CoverageError, naming the ops outside of graphs, where a plan has less than `minimum`."""
    if minimum is None or plan.coverage >= minimum:
        return
    reasons = [reason for segment in plan.segments for reason in segment.reasons]
    raise CoverageError(
        "coverage of the plan" + _listed(list(map(_described, reasons))),
        expected=f"at least {minimum:.1%} of ops in graphs (min_coverage)",
        got=f"{plan.coverage:.1%}; {len(reasons)} ops run eagerly",
        rule="a model that silently runs outside of graphs is slow for no visible reason",
        fix="rewrite the ops listed here so that each row depends on its own row alone, make one of them a "
        "boundary op, or lower min_coverage",
    )


def require_buckets(reports: Sequence[BucketReport], minimum: float | None) -> None:
    """Raises CoverageError, naming each bucket of these that has less than `minimum` of its ops in graphs."""
    low = [report for report in reports if minimum is not None and report.coverage < minimum]
    if not low or minimum is None:
        return
    lines = []
    for report in low:
        why = f", {report.status}: {report.reason.splitlines()[0]}" if report.reason else ""
        lines.append(f"bucket {report.bucket}: {report.coverage:.1%}{why}")
    raise CoverageError(
        "coverage of the captured buckets" + _listed(lines),
        expected=f"at least {minimum:.1%} of ops in graphs (min_coverage) in each of {len(reports)} buckets",
        got=f"less in {len(low)}; nothing of this capture was kept",
        rule="a bucket that silently runs eagerly is slow for no visible reason",
        fix="remove the cause named for the bucket, leave the bucket out, or lower min_coverage",
    )


def _described(reason: EagerReason) -> str:
    where = " in ".join(filter(None, ("", reason.module_path)))
    source = f" at {reason.source}" if reason.source else ""
    return f"{reason.op} ({reason.code}: {reason.detail}){where}{source}"


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    shown = "".join(f"\n  {line}" for line in [*lines[:_MAX_LISTED], *more])
    return f":{shown}\n " if shown else ""
