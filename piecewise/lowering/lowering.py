"""Graph segment → callable: torch's own kernels, or Inductor's, compiled once per distinct segment.

Each is compiled for any row count, and again for single counts that `compile_sizes` names or that the first
compile excluded. One that cannot be compiled keeps eager kernels, alone, with its reason. What was compiled
is kept for the next capture of the same model; over processes Inductor's own cache on disk does that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from piecewise import torch_api as internals
from piecewise.ir.aten import AtenGraph
from piecewise.ir.plan import Segment, SegmentPlan, ValueSpec
from piecewise.lowering.aten_segment import AtenSegment
from piecewise.lowering.layout import SegmentLayout, Unlowerable
from piecewise.report.progress import progress_bar
from piecewise.report.segments import KeptEager, LoweringReport
from piecewise.settings.config import PiecewiseConfig
from runners.engines import native_engine
from runners.errors import CaptureError, one_line
from runners.mode import capturing
from runners.opaque_call import OpaqueCall

# Settings on which the code of a segment depends, and which are not in its key in another way: the row count
# that something was compiled for, and the program that fusions have made, are.
FIELDS_IN_KEY = frozenset({"lowering"})

COMPILED = "compiled by Inductor: one callable"


@dataclasses.dataclass(slots=True, eq=False)
class LoweredSegment:
    """A segment's function, put together from compiled ones.

    What a compiler has made may still fail where it first runs, as a kernel that needs more shared memory
    than there is. A warm-up that sees that goes on with the segment's own function, for that row count,
    unless memory was written by then.

    Attributes:
        by_rows: row count → `function(num_rows, *arguments)`.
        failed: row count → why its function is not used.
    """

    segment: Segment
    layout: SegmentLayout
    by_rows: Mapping[int, Callable[..., Any]]
    strict: bool
    failed: dict[int, str] = dataclasses.field(default_factory=dict)

    def __call__(self, num_rows: int, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        if num_rows in self.failed:
            return self.segment.function(num_rows, *inputs)
        try:
            with internals.without_autocast():
                made = self.by_rows[num_rows](num_rows, *inputs)
                return self.layout.results_of(num_rows, inputs, made)
        except Exception as error:
            if self.strict or self.segment.writes or capturing() is not None:
                raise
            self.failed[num_rows] = one_line(error)
        return self.segment.function(num_rows, *inputs)


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredPlan:
    """The functions of one plan's graph segments.

    Attributes:
        functions: segment index → `function(num_rows, *inputs)`.
        lowered: those among them that were compiled, without what records them.
    """

    functions: Mapping[int, Callable[..., Sequence[torch.Tensor]]]
    lowered: tuple[LoweredSegment, ...]
    at_first: LoweringReport

    @property
    def one_callable(self) -> dict[int, str]:
        """Segment index → why its function is not made of ops that others can look at."""
        return {lowered.segment.index: COMPILED for lowered in self.lowered}

    def report(self) -> LoweringReport:
        """How it went, the first runs included."""
        failed = [
            KeptEager(lowered.segment.name, f"at {rows} rows, when it ran: {reason}")
            for lowered in self.lowered
            for rows, reason in sorted(lowered.failed.items())
        ]
        return dataclasses.replace(self.at_first, kept_eager=(*self.at_first.kept_eager, *failed))


@dataclasses.dataclass(frozen=True, slots=True)
class _Compiled:
    """`function(num_rows, *arguments)`, and for which row counts it holds."""

    function: Callable[..., Any]
    holds_for: Callable[[int], bool]


class Lowering:
    """Lowers the plans of one graphed model, and keeps what it compiled.

    Args:
        config: of which `lowering`, `compile_sizes`, `strict` and `progress` count here.
    """

    def __init__(self, config: PiecewiseConfig) -> None:
        self.config = config
        self._compiled: dict[str, _Compiled | Unlowerable] = {}

    def lower(
        self,
        plan: SegmentPlan,
        buckets: Sequence[int],
        graphs: Mapping[Callable[..., tuple], AtenGraph] = {},
    ) -> LoweredPlan:
        """The functions of a plan's graph segments at these buckets.

        Args:
            graphs: functions of segments that are there as graphs, too, and need no trace.
        Raises:
            CaptureError: with `strict`, a segment cannot be lowered.
        """
        segments = _computing(plan)
        functions: dict[int, Any] = {segment.index: segment.function for segment in plan.graph_segments()}
        job = _Job(self.config, self._compiled, plan, tuple(sorted(buckets)), graphs)
        began = time.perf_counter()
        if buckets and self.config.lowering != "eager":
            with closing(progress_bar(len(segments), enabled=self.config.progress)) as bar:
                bar.set_description("lowering segments")
                for segment in segments:
                    functions[segment.index] = job.lowered(segment)
                    bar.update(1)
        report = LoweringReport(
            self.config.lowering, len(segments), len({segment_text(plan, segment) for segment in segments}),
            job.num_compiled, job.num_from_disk, job.num_reused, time.perf_counter() - began,
            tuple(job.kept_eager),
        )  # fmt: skip
        return LoweredPlan(functions, tuple(job.lowered_segments), report)

    def foresee(self, plan: SegmentPlan, buckets: Sequence[int]) -> LoweringReport:
        """What can be said before anything is compiled."""
        kept = []
        for segment in _computing(plan) if self.config.lowering != "eager" else ():
            try:
                SegmentLayout.of(plan, segment, buckets)
            except Unlowerable as reason:
                kept.append(KeptEager(segment.name, str(reason)))
        texts = {segment_text(plan, segment) for segment in _computing(plan)}
        return LoweringReport(
            self.config.lowering, len(_computing(plan)), len(texts), kept_eager=tuple(kept), is_done=False
        )


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """One plan being lowered; `compiled` outlives it."""

    config: PiecewiseConfig
    compiled: dict[str, _Compiled | Unlowerable]
    plan: SegmentPlan
    buckets: tuple[int, ...]
    graphs: Mapping[Callable[..., tuple], AtenGraph]
    num_compiled: int = 0
    num_from_disk: int = 0
    num_reused: int = 0
    kept_eager: list[KeptEager] = dataclasses.field(default_factory=list)
    lowered_segments: list[LoweredSegment] = dataclasses.field(default_factory=list)
    used: set[str] = dataclasses.field(default_factory=set)

    def lowered(self, segment: Segment) -> Callable[..., Sequence[torch.Tensor]]:
        """The segment's function; its own eager one where it cannot be lowered, which is noted.

        Raises:
            CaptureError: with `strict`, it cannot be lowered.
        """
        try:
            if segment.keeps_own:
                raise Unlowerable(segment.keeps_own)
            if segment.captured_ops:
                # Functional graphs copy what an op writes, and that would be whole KV pools.
                raise Unlowerable(
                    "it holds captured boundary ops, which write memory that must not be copied"
                )
            layout = SegmentLayout.of(self.plan, segment, self.buckets)
            by_rows = self._functions(segment, layout)
        except Unlowerable as reason:
            self.kept_eager.append(KeptEager(segment.name, str(reason)))
            if self.config.strict:
                raise CaptureError(
                    segment.name,
                    expected=f"a segment that lowering={self.config.lowering!r} can compile",
                    got=str(reason),
                    rule="with strict=True no segment silently keeps eager kernels",
                    fix="use lowering='eager', or strict=False",
                ) from reason
            return segment.function
        function = LoweredSegment(segment, layout, by_rows, self.config.strict)
        self.lowered_segments.append(function)
        return OpaqueCall(function)

    def _functions(self, segment: Segment, layout: SegmentLayout) -> dict[int, Callable[..., Any]]:
        """Bucket → the function that serves it: one for all, where that holds."""
        largest = self.buckets[-1]
        # torch knows no symbol that may be 1.
        dynamic = self._function(segment, layout, largest, is_dynamic=True) if largest > 1 else None
        found = {}
        for rows in self.buckets:
            compiled = dynamic
            if compiled is None or rows in self.config.compile_sizes or not compiled.holds_for(rows):
                compiled = self._function(segment, layout, rows, is_dynamic=False)
            found[rows] = compiled.function
        return found

    def _function(self, segment: Segment, layout: SegmentLayout, rows: int, *, is_dynamic: bool) -> _Compiled:
        """The function for `rows` rows, or for any count of which `rows` is the likeliest."""
        device = next((v.device for v in (*layout.outputs, *layout.inputs) if v.device), torch.device("cpu"))
        settings = ", ".join(f"{name}={getattr(self.config, name)!r}" for name in sorted(FIELDS_IN_KEY))
        count = f"any count such as {rows}" if is_dynamic else f"{rows} rows"
        parts = (
            settings,
            internals.numeric_settings(device),
            count,
            segment_text(self.plan, segment),
            layout.made,
        )
        key = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
        if key not in self.compiled:
            before = internals.inductor_cache_counts()
            with native_engine(device).fork_random_state(device):
                self.compiled[key] = self._compile(segment, layout, rows, is_dynamic=is_dynamic)
            found, missed = map(int.__sub__, internals.inductor_cache_counts(), before)
            if isinstance(self.compiled[key], _Compiled):
                self.num_compiled += 1
                self.num_from_disk += bool(found and not missed)
        elif key not in self.used:
            self.num_reused += 1
        self.used.add(key)
        compiled = self.compiled[key]
        if isinstance(compiled, Unlowerable):
            raise Unlowerable(str(compiled))
        return compiled

    def _compile(
        self, segment: Segment, layout: SegmentLayout, rows: int, *, is_dynamic: bool
    ) -> _Compiled | Unlowerable:
        try:
            graph, aten = self.graphs.get(segment.function), None
            if graph is not None and is_dynamic and graph.num_rows == rows:
                aten = AtenSegment.of_graph(graph, layout)
            if aten is None:
                aten = AtenSegment.of(segment, layout, rows=rows, is_dynamic=is_dynamic)
            function = internals.compile_aten_graph(aten.module, aten.arguments, aten.fake_mode)
        except Exception as error:  # whatever it is, the segment's own kernels do without
            return Unlowerable(one_line(error))
        # Of what was assumed about the row count while tracing and compiling.
        return _Compiled(aten.with_rows(function), internals.row_condition(aten.fake_mode, aten.rows))


def _computing(plan: SegmentPlan) -> list[Segment]:
    """Graph segments that do more than make views."""
    return [segment for segment in plan.graph_segments() if not segment.views_only]


def segment_text(plan: SegmentPlan, segment: Segment) -> str:
    """What a segment computes and on what, without the tensors themselves: equal in every process."""
    numbers: dict[int, int] = {}

    def described(value: ValueSpec) -> str:
        memory = numbers.setdefault(value.memory, len(numbers))
        return f"{value.dtype} {value.device} {value.geometry} memory {memory}"

    inputs = [described(plan.values[index]) for index in segment.inputs]
    outputs = [described(plan.values[index]) for index in segment.outputs]
    written = sorted(numbers[memory] for memory in segment.writes if memory in numbers)
    return "\n".join([segment.lowering_key, *inputs, "->", *outputs, f"writes {written}"])
