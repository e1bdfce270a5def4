"""Graph segments on several streams: which have independent branches, and at which buckets these run at once.

Per distinct segment its function is scheduled on lanes once (`stream_graph.py`); at buckets of up to
`MAX_ROWS` rows that form is what is warmed up and captured. docs/DESIGN.md has the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from piecewise.ir.aten import NotTraceable
from piecewise.ir.graph_key import graph_key
from piecewise.ir.plan import Segment, SegmentPlan
from piecewise.report.segments import COMPILED, BucketStreams, LoweringReport, SegmentStreams, StreamReport
from piecewise.streams.stream_graph import ScheduledFunction
from runners.engine import Streams

MAX_ROWS = 512


@dataclasses.dataclass(slots=True)
class _Kind:
    """Equal segments: scheduled, or with the reason why not; and what was chosen, by bucket."""

    first: Segment
    num_alike: int = 0
    scheduled: ScheduledFunction | None = None
    reason: str = ""
    chosen: dict[int, BucketStreams] = dataclasses.field(default_factory=dict)

    def choice(self, bucket: int) -> BucketStreams:
        """How it runs at a bucket, where it is scheduled."""
        assert self.scheduled is not None
        reason = ""
        if bucket > MAX_ROWS:
            reason = f"beyond {MAX_ROWS} rows one branch fills the device"
        elif not self.scheduled.is_valid(bucket):
            reason = "what its trace assumed does not hold here"
        return BucketStreams(bucket, not reason, reason)

    def report(self) -> SegmentStreams:
        made = self.scheduled
        if made is None:
            return SegmentStreams(self.first.name, self.num_alike, reason=self.reason)
        buckets = tuple(self.chosen[bucket] for bucket in sorted(self.chosen, reverse=True))
        branches, num_streams = made.schedule.num_branches, made.schedule.num_lanes
        return SegmentStreams(self.first.name, self.num_alike, branches, num_streams, "", buckets)


class StreamSchedules:
    """The graph segments of one plan as kinds, each scheduled or with the reason why not.

    Args:
        one_callable: segment index → why its function has no ops that could be scheduled.
        num_rows: a row count for which the plan is valid, at which branches are weighed.
        num_streams: at most so many at the same time; with 1 nothing is looked at.
    """

    def __init__(
        self, plan: SegmentPlan, *, one_callable: Mapping[int, str], num_rows: int, num_streams: int
    ) -> None:
        self.plan, self.num_streams = plan, num_streams
        self._kind_of: dict[int, _Kind] = {}
        kinds: dict[tuple[Any, str], _Kind] = {}
        for segment in plan.graph_segments() if num_streams > 1 else ():
            if segment.views_only:
                continue
            reason = segment.keeps_own or one_callable.get(segment.index, "")
            key = graph_key(plan, segment), reason
            if key in kinds:
                kinds[key].num_alike += 1
            else:
                kinds[key] = _Kind(segment, reason=reason)
                self._schedule(kinds[key], num_rows)
            self._kind_of[segment.index] = kinds[key]
        self._kinds = tuple(kinds.values())

    def _schedule(self, kind: _Kind, num_rows: int) -> None:
        if not kind.reason and num_rows < 2:
            kind.reason = "it is captured at one token only"
        if kind.reason:
            return
        try:
            made = ScheduledFunction.of(
                kind.first, self.plan.values, num_rows=num_rows, num_streams=self.num_streams
            )
        except NotTraceable as error:
            kind.reason = f"its ops cannot be traced: {error}"
            return
        if made.run is None:
            kind.reason = "no independent branches"
        else:
            kind.scheduled = made

    def form_for(self, segment: Segment, bucket: int, lanes: Streams) -> Callable[..., Sequence[Any]] | None:
        """The segment's function on lanes, where it is to run at this bucket; None for its own."""
        kind = self._kind_of.get(segment.index)
        if kind is None or kind.scheduled is None:
            return None
        chosen = kind.chosen[bucket] = kind.choice(bucket)
        return partial(kind.scheduled.run, lanes) if chosen.kept and kind.scheduled.run is not None else None

    def report(self) -> StreamReport | None:
        """None where several streams were not asked for."""
        if self.num_streams == 1:
            return None
        return StreamReport(self.num_streams, tuple(kind.report() for kind in self._kinds))


def foresee(
    plan: SegmentPlan, lowering: LoweringReport, *, num_rows: int, num_streams: int
) -> StreamReport | None:
    """What can be said before anything is captured; None where several streams are not asked for.

    Args:
        lowering: which segments will be compiled.
        num_rows: a row count of two or more for which the plan is valid.
    """
    kept = {each.segment for each in lowering.kept_eager}
    compiled = [segment for segment in plan.graph_segments() if segment.name not in kept]
    one_callable = {segment.index: COMPILED for segment in compiled if lowering.lowering != "eager"}
    return StreamSchedules(
        plan, one_callable=one_callable, num_rows=num_rows, num_streams=num_streams
    ).report()
