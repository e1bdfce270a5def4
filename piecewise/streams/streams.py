"""Decides which graph segments run on several streams, and at which buckets.

Each distinct program is scheduled once; at buckets of up to `MAX_ROWS` rows the schedule is what is warmed up
and captured. docs/DESIGN.md has the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from piecewise.ir.aten import NotTraceable
from piecewise.ir.graph_key import graph_key
from piecewise.ir.plan import Segment, SegmentPlan
from piecewise.report.segments import BucketStreams, LoweringReport, SegmentStreams, StreamReport
from piecewise.streams.stream_graph import ScheduledFunction
from runners.engine import Streams

MAX_ROWS = 512


@dataclasses.dataclass(slots=True)
class _Kind:
    """Holds what equal segments share: a schedule, or the reason against one, and the choice by bucket."""

    first: Segment
    reason: str
    num_alike: int = 0
    scheduled: ScheduledFunction | None = None
    chosen: dict[int, BucketStreams] = dataclasses.field(default_factory=dict)

    def report(self) -> SegmentStreams:
        if self.scheduled is None:
            return SegmentStreams(self.first.name, self.num_alike, reason=self.reason)
        buckets = tuple(self.chosen[bucket] for bucket in sorted(self.chosen, reverse=True))
        schedule = self.scheduled.schedule
        return SegmentStreams(
            self.first.name, self.num_alike, schedule.num_branches, schedule.num_streams, "", buckets
        )


class StreamSchedules:
    """Schedules a plan's graph segments, each distinct program once, but for those that Inductor compiles.
    Branches are weighed at `num_rows` rows; a `num_streams` of 1 schedules nothing."""

    def __init__(
        self, plan: SegmentPlan, lowering: LoweringReport, *, num_rows: int, num_streams: int
    ) -> None:
        self.num_streams = num_streams
        self._kinds: dict[tuple[Any, str], _Kind] = {}
        self._kind_of: dict[int, _Kind] = {}
        for segment in plan.computing_segments() if num_streams > 1 else ():
            reason = segment.keeps_own
            if not reason and lowering.compiles(segment.name):
                reason = "compiled by Inductor: one callable"
            key = graph_key(plan, segment), reason
            if key in self._kinds:
                self._kinds[key].num_alike += 1
            else:
                self._kinds[key] = _scheduled(plan, segment, reason, num_rows, num_streams)
            self._kind_of[segment.index] = self._kinds[key]

    def form_for(
        self, segment: Segment, bucket: int, streams: Streams
    ) -> Callable[..., Sequence[Any]] | None:
        """Returns the segment's function on several streams; None where it runs on one at this bucket."""
        kind = self._kind_of.get(segment.index)
        if kind is None or kind.scheduled is None:
            return None
        reason = ""
        if bucket > MAX_ROWS:
            reason = f"beyond {MAX_ROWS} rows one branch fills the device"
        elif not kind.scheduled.is_valid(bucket):
            reason = "what its trace assumed does not hold here"
        kind.chosen[bucket] = BucketStreams(bucket, not reason, reason)
        return None if reason else partial(kind.scheduled.run, streams)

    def report(self) -> StreamReport | None:
        if self.num_streams == 1:
            return None
        return StreamReport(self.num_streams, tuple(kind.report() for kind in self._kinds.values()))


def _scheduled(plan: SegmentPlan, segment: Segment, reason: str, num_rows: int, num_streams: int) -> _Kind:
    if not reason and num_rows < 2:
        reason = "it is captured at one token only"
    if reason:
        return _Kind(segment, reason)
    try:
        made = ScheduledFunction.of(segment, plan.values, num_rows=num_rows, num_streams=num_streams)
    except NotTraceable as error:
        return _Kind(segment, f"its ops cannot be traced: {error}")
    if not made.schedule.regions:
        return _Kind(segment, "no independent branches")
    return _Kind(segment, "", scheduled=made)
