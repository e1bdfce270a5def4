"""Graph segments on several streams: which could be, and which were measured to be faster for it.

Per distinct segment its function is scheduled on lanes once (`stream_graph.py`). At each bucket both forms
are warmed up; then, with the first of the equal segments, both are captured and replayed in turns, and where
the one on lanes takes less time by a margin, it is what the graphs of all of them hold. Both trial graphs are
captured over the same pool memory, and are reset as soon as the one that serves is captured.

A tape replays nothing at the same time. There the form on lanes serves unmeasured: it runs the branches in
another order than the model does, so that a dependency which the schedule misses gives wrong results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from piecewise.aten_graph import NotTraceable
from piecewise.lowering import COMPILED, segment_text
from piecewise.lowering_report import LoweringReport
from piecewise.plan import Segment, SegmentPlan
from piecewise.stream_graph import ScheduledFunction
from piecewise.stream_report import BucketStreams, SegmentStreams, StreamReport
from runners.engine import CapturedGraph, GraphEngine, GraphPool
from runners.errors import told

# Below this share of the time on one stream, several are kept.
_WORTH_IT = 0.97

Function = Callable[..., Sequence[Any]]


@dataclasses.dataclass(slots=True)
class _Kind:
    """Equal segments: scheduled, or with the reason why not; and what was found, by bucket."""

    first: Segment
    num_alike: int = 0
    scheduled: ScheduledFunction | None = None
    reason: str = ""
    found: dict[int, BucketStreams] = dataclasses.field(default_factory=dict)

    def report(self) -> SegmentStreams:
        made = self.scheduled
        buckets = tuple(self.found[bucket] for bucket in sorted(self.found, reverse=True))
        if made is None:
            return SegmentStreams(self.first.name, self.num_alike, reason=self.reason)
        return SegmentStreams(
            self.first.name, self.num_alike, made.schedule.num_branches, made.schedule.num_lanes, "", buckets
        )


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
        self.kind_of: dict[int, _Kind] = {}
        kinds: dict[tuple[str, str], _Kind] = {}
        for segment in plan.graph_segments() if num_streams > 1 else ():
            if segment.views_only:
                continue
            reason = segment.keeps_own or one_callable.get(segment.index, "")
            key = segment_text(plan, segment), reason
            if key in kinds:
                kinds[key].num_alike += 1
            else:
                kinds[key] = _Kind(segment, reason=reason)
                self._schedule(kinds[key], num_rows)
            self.kind_of[segment.index] = kinds[key]
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


class StreamForms:
    """What is warmed up and captured of one plan's graph segments beside their own functions.

    Args:
        functions: the segments' own, by index.
        engine: its `measure` decides what is kept; where it is None, all is.
        strict: whether a form on lanes that cannot be captured is an error.
    """

    def __init__(
        self,
        schedules: StreamSchedules,
        *,
        functions: Mapping[int, Function],
        engine: GraphEngine,
        pool: GraphPool,
        strict: bool,
    ) -> None:
        self.schedules, self.functions = schedules, functions
        self._engine, self._pool, self._strict = engine, pool, strict

    def form_for(self, segment: Segment, bucket: int) -> Function | None:
        """The segment's function on lanes, where it is to be warmed up for this bucket."""
        kind = self.schedules.kind_of.get(segment.index)
        if kind is None or kind.scheduled is None or kind.scheduled.run is None:
            return None
        known = kind.found.get(bucket) or self._without_measuring(kind, bucket)
        if known is not None:
            kind.found[bucket] = known
        return partial(kind.scheduled.run, self._pool.lanes) if known is None or known.kept else None

    def _without_measuring(self, kind: _Kind, bucket: int) -> BucketStreams | None:
        """What needs no measurement, decided."""
        assert kind.scheduled is not None
        plan = self.schedules.plan
        given = {plan.values[index].memory for index in kind.first.inputs}
        if not kind.scheduled.is_valid(bucket):
            return BucketStreams(bucket, False, reason="what its trace assumed does not hold here")
        if self._engine.measure is None:
            return BucketStreams(bucket, True, reason="not measured on the tape")
        # Captured boundary ops write nothing while the step that is loaded has no sequences.
        if given & (set(kind.first.writes) - plan.step_memory):
            return BucketStreams(bucket, False, reason="not measured: it writes its inputs")
        return None

    @contextmanager
    def chosen(
        self, segment: Segment, bucket: int, arguments: Sequence[torch.Tensor], needed: Sequence[torch.Tensor]
    ) -> Iterator[Function | None]:
        """A block in which the segment is captured: the form to capture, or None for its own function.

        Args:
            arguments: what it will read; those that are no state of the model are overwritten where it is
                measured.
            needed: static memory that segments before this one have made and that is read later.
        """
        form = self.form_for(segment, bucket)
        kind = self.schedules.kind_of.get(segment.index)
        trials: list[CapturedGraph] = []
        try:
            if form is not None and kind is not None and bucket not in kind.found:
                forms = self.functions[segment.index], form
                found = self._tried(segment, bucket, arguments, forms, trials, needed)
                kind.found[bucket] = found
                form = form if found.kept else None
            yield form
        finally:
            # Not before: the pool's memory goes with its last graph.
            for graph in trials:
                graph.reset()

    def _tried(
        self,
        segment: Segment,
        bucket: int,
        arguments: Sequence[torch.Tensor],
        forms: Sequence[Function],
        trials: list[CapturedGraph],
        needed: Sequence[torch.Tensor],
    ) -> BucketStreams:
        assert self._engine.measure is not None
        try:
            for form in forms:
                run = partial(form, bucket, *arguments)
                trials.append(self._engine.capture(run, pool=self._pool, segment=segment.name))
                # The next one may lie on the results of this one: they never replay at the same time.
                self._pool.keep_only(needed)
            self._overwrite(segment, arguments)
            one, several = self._engine.measure(trials)
        except Exception as error:
            if self._strict:
                raise
            return BucketStreams(bucket, False, reason=f"not measured: {told(error)}")
        if several < _WORTH_IT * one:
            return BucketStreams(bucket, True, one, several)
        reason = "slower" if several > one else f"less than {1 - _WORTH_IT:.0%} faster"
        return BucketStreams(bucket, False, one, several, reason)

    def _overwrite(self, segment: Segment, arguments: Sequence[torch.Tensor]) -> None:
        """Zeros in static memory: while graphs are being captured nothing has run, and what lies there may be
        no valid index."""
        values = self.schedules.plan.values
        state = {value.memory for value in values if value.origin == "state"}
        for index, tensor in zip(segment.inputs, arguments, strict=True):
            if values[index].memory not in state:
                tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).zero_()
