"""Lowers graph segments to callables: torch's own kernels, or Inductor's, compiled once per distinct segment.

Each is compiled for any row count, and again for single counts that `compile_sizes` names or that the first
compile excluded. One that cannot be compiled keeps eager kernels, alone, with its reason. Compiled functions
are kept for the next capture of the same model, and across processes by Inductor's cache on disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.errors.lowering import SegmentNotLowered
from piecewise.ir.aten import AtenGraph
from piecewise.ir.graph_key import graph_key
from piecewise.ir.plan import Segment, SegmentPlan
from piecewise.lowering.layout import SegmentLayout, Unlowerable
from piecewise.report.progress import progress_bar
from piecewise.report.segments import KeptEager, LoweringReport
from piecewise.settings.config import PiecewiseConfig
from runners.engines import native_engine
from runners.errors import one_line
from runners.mode import capturing
from runners.opaque_call import OpaqueCall
from runners.row_views import place_of


class AtenSegment(NamedTuple):
    """Holds a segment as the functional graph of aten ops that a compiler takes, with fakes in
    ``meta["val"]``.

    Its `arguments` are the row count `rows`, where that is a symbol, and tensors that share no memory,
    weights included; it returns what it makes. Autocast and sizes are resolved: aten and custom ops on
    tensors, and numbers computed from the row count, are left. Each write into an argument is one
    `aten.copy_` at the end.
    """

    module: fx.GraphModule
    rows: Any
    arguments: tuple[Any, ...]
    fake_mode: Any

    @classmethod
    def of(cls, segment: Segment, layout: SegmentLayout, *, rows: int, is_dynamic: bool) -> AtenSegment:
        """Traces the segment for `rows` rows, or for any count with that hint; may raise any error."""
        fake_mode = torch_api.new_fake_mode()
        count = torch_api.symbolic_count(fake_mode, "num_rows", rows) if is_dynamic else rows
        tensors = []
        with fake_mode:
            for value in layout.inputs:
                sizes, strides, _ = place_of(value, count)
                tensors.append(torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device))

        def program(*arguments: Any) -> tuple[torch.Tensor, ...]:
            own_rows, *given = arguments if is_dynamic else (rows, *arguments)
            outputs = segment.function(own_rows, *given)
            return tuple(outputs[position] for position in layout.made)

        placeholders = (count, *tensors) if is_dynamic else tuple(tensors)
        module = torch_api.functional_aten_graph(program, placeholders, fake_mode)
        return cls(module, count, placeholders, fake_mode)

    @classmethod
    def of_graph(cls, graph: AtenGraph, layout: SegmentLayout) -> AtenSegment | None:
        """Reuses the graph of a segment's function; None where it writes, which only a trace resolves."""
        if not all(map(_is_functional, graph.module.graph.nodes)):
            return None
        copied = fx.Graph()
        outputs: Any = copied.graph_copy(graph.module.graph, {})
        copied.output(tuple(outputs[position] for position in layout.made))
        copied.eliminate_dead_code()
        placeholders = tuple(node.meta["val"] for node in copied.find_nodes(op="placeholder"))
        return cls(fx.GraphModule(nn.Module(), copied), graph.rows, placeholders, graph.fake_mode)

    def compiled(self) -> Callable[..., Any]:
        """Compiles the graph to `function(rows, *tensors)`, consuming it; may raise any error."""
        function = torch_api.compile_aten_graph(self.module, self.arguments, self.fake_mode)
        return (lambda rows, *tensors: function(*tensors)) if isinstance(self.rows, int) else function


def _is_functional(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(node.target, torch_api.OpOverload):
        return not node.target._schema.is_mutable
    # Arithmetic on sizes and items of tuples.
    return node.target is operator.getitem or getattr(node.target, "__module__", "") in ("_operator", "math")


# Settings on which a segment's code depends, but for those that its key holds through the row count or the
# fused program.
FIELDS_IN_KEY = frozenset({"lowering"})


@dataclasses.dataclass(slots=True, eq=False)
class LoweredSegment:
    """Calls a segment's compiled functions, and makes its results from what they return.

    A kernel may still fail at its first run, as where it needs more shared memory than there is. In a warm-up
    such a row count falls back to the segment's own function (`failed` has the reason), unless the segment
    writes memory.
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
            with torch_api.without_autocast():
                made = self.by_rows[num_rows](num_rows, *inputs)
                return self.layout.results_of(num_rows, inputs, made)
        except Exception as error:
            if self.strict or self.segment.writes or capturing() is not None:
                raise
            self.failed[num_rows] = one_line(error)
        return self.segment.function(num_rows, *inputs)


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredPlan:
    """Holds the functions `(num_rows, *inputs)` of one plan's graph segments, by index; `lowered` are the
    compiled ones, without the wrapper that records their calls."""

    functions: Mapping[int, Callable[..., Sequence[torch.Tensor]]]
    lowered: tuple[LoweredSegment, ...]
    at_first: LoweringReport

    def report(self) -> LoweringReport:
        runs = ((each.segment.name, *why) for each in self.lowered for why in sorted(each.failed.items()))
        failed = [KeptEager(name, f"at {rows} rows, when it ran: {reason}") for name, rows, reason in runs]
        return dataclasses.replace(self.at_first, kept_eager=(*self.at_first.kept_eager, *failed))


class _Compiled(NamedTuple):
    function: Callable[..., Any]
    holds_for: Callable[[int], bool]


class Lowering:
    """Lowers the plans of one graphed model, and keeps the compiled functions."""

    def __init__(self, config: PiecewiseConfig) -> None:
        self.config = config
        self._compiled: dict[str, _Compiled | Unlowerable] = {}

    def lower(
        self, plan: SegmentPlan, buckets: Sequence[int], graphs: Mapping[Callable[..., tuple], AtenGraph] = {}
    ) -> LoweredPlan:
        """Lowers a plan's graph segments for these buckets; functions that are in `graphs` need no trace.

        Raises:
            CaptureError: with `strict`, a segment cannot be lowered.
        """
        functions: dict[int, Any] = {segment.index: segment.function for segment in plan.graph_segments()}
        job = _Job(self.config, self._compiled, plan, tuple(sorted(buckets)), graphs)
        began = time.perf_counter()
        lowered, kept_eager = [], []
        segments = plan.computing_segments() if buckets and self.config.lowering != "eager" else ()
        with closing(progress_bar(len(segments), enabled=self.config.progress)) as bar:
            bar.set_description("lowering segments")
            for segment in segments:
                try:
                    lowered.append(job.lower(segment))
                    functions[segment.index] = OpaqueCall(lowered[-1])
                except Unlowerable as reason:
                    kept_eager.append(KeptEager(segment.name, str(reason)))
                    if self.config.strict:
                        name, how = segment.name, self.config.lowering
                        raise SegmentNotLowered(segment=name, lowering=how, reason=reason) from reason
                bar.update(1)
        report = dataclasses.replace(
            self._planned(plan), num_compiled=job.num_compiled, num_from_disk=job.num_from_disk,
            num_reused=job.num_reused, seconds=time.perf_counter() - began, kept_eager=tuple(kept_eager),
            is_done=True,
        )  # fmt: skip
        return LoweredPlan(functions, tuple(lowered), report)

    def preview(self, plan: SegmentPlan, buckets: Sequence[int]) -> LoweringReport:
        """Reports what is known before anything is compiled."""
        kept = []
        for segment in plan.computing_segments() if self.config.lowering != "eager" else ():
            try:
                SegmentLayout.of(plan, segment, buckets)
            except Unlowerable as reason:
                kept.append(KeptEager(segment.name, str(reason)))
        return dataclasses.replace(self._planned(plan), kept_eager=tuple(kept))

    def _planned(self, plan: SegmentPlan) -> LoweringReport:
        segments = plan.computing_segments()
        num_distinct = len({graph_key(plan, segment) for segment in segments})
        return LoweringReport(self.config.lowering, len(segments), num_distinct, is_done=False)


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    config: PiecewiseConfig
    compiled: dict[str, _Compiled | Unlowerable]
    plan: SegmentPlan
    buckets: tuple[int, ...]
    graphs: Mapping[Callable[..., tuple], AtenGraph]
    num_compiled: int = 0
    num_from_disk: int = 0
    num_reused: int = 0
    used: set[str] = dataclasses.field(default_factory=set)

    def lower(self, segment: Segment) -> LoweredSegment:
        """Compiles one function for all buckets, and others where it does not hold; raises `Unlowerable`."""
        layout = SegmentLayout.of(self.plan, segment, self.buckets)
        largest = self.buckets[-1]
        # A symbolic size of torch is never 1.
        dynamic = self._compiled(segment, layout, largest, is_dynamic=True) if largest > 1 else None
        by_rows = {}
        for rows in self.buckets:
            compiled = dynamic
            if compiled is None or rows in self.config.compile_sizes or not compiled.holds_for(rows):
                compiled = self._compiled(segment, layout, rows, is_dynamic=False)
            by_rows[rows] = compiled.function
        return LoweredSegment(segment, layout, by_rows, self.config.strict)

    def _compiled(self, segment: Segment, layout: SegmentLayout, rows: int, *, is_dynamic: bool) -> _Compiled:
        """Returns the function, compiled or known, for `rows` rows or any count with `rows` as the hint."""
        device = next((v.device for v in (*layout.outputs, *layout.inputs) if v.device), torch.device("cpu"))
        settings = ", ".join(f"{name}={getattr(self.config, name)!r}" for name in sorted(FIELDS_IN_KEY))
        count = f"any count such as {rows}" if is_dynamic else f"{rows} rows"
        program = graph_key(self.plan, segment)
        parts = settings, torch_api.numeric_settings(device), count, program, layout.made
        key = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
        if key not in self.compiled:
            before = torch_api.inductor_cache_counts()
            with native_engine(device).fork_random_state(device):
                self.compiled[key] = self._compile(segment, layout, rows, is_dynamic=is_dynamic)
            found, missed = map(int.__sub__, torch_api.inductor_cache_counts(), before)
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
            function = aten.compiled()
        except Exception as error:  # a compiler may raise anything; eager kernels still run
            return Unlowerable(one_line(error))
        # The condition holds what tracing and compiling assumed about the row count.
        return _Compiled(function, torch_api.row_condition(aten.fake_mode, aten.rows))
