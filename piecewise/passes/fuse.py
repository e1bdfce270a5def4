"""The plan's graph segments rewritten by the passes, once per distinct segment, weights packed on the way.

A segment that cannot be traced, or whose rewritten graph would hand out other memory than its own function,
keeps that one. docs/DESIGN.md says why this runs between the cut and the first look at addresses.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecewise import torch_api
from piecewise.ir.aten import AtenGraph, NotTraceable, trace_aten
from piecewise.ir.graph_key import graph_key
from piecewise.ir.plan import FusionReport, Segment, SegmentPlan
from piecewise.passes.fakes import memory_of
from piecewise.passes.pack_linears import LinearGroup, find_groups
from piecewise.passes.packed_weights import pack_, why_not_packable
from piecewise.passes.pipeline import GraphPass, passes_for, passes_named, run_passes
from piecewise.passes.results import keep_geometry
from runners.errors import one_line
from runners.state.state_check import StateRef

# By function of a segment.
FusedGraphs = Mapping[Callable[..., tuple], AtenGraph]


def fuse(
    plan: SegmentPlan, fusions: Sequence[str], *, lowering: str, num_rows: int, move_weights: bool
) -> tuple[SegmentPlan, FusedGraphs]:
    """Rewrites a plan's graph segments; returns the new plan, and the graphs of their functions.

    Args:
        fusions, lowering: as the settings have them.
        num_rows: a row count of two or more for which the plan is valid.
        move_weights: lay out the weights of packed linears in one storage now. Without it the plan is for
            reading only.
    """
    names = passes_for(fusions, lowering)
    fusing = _Fusing(plan, names, num_rows=num_rows, move_weights=move_weights)
    return fusing.run(), fusing.graphs


@dataclasses.dataclass(frozen=True, slots=True)
class _Fused:
    key: str
    function: Callable[..., tuple]
    matches: Counter[str]
    expected: dict[str, str]


class _Fusing:
    def __init__(self, plan: SegmentPlan, names: Sequence[str], *, num_rows: int, move_weights: bool) -> None:
        self.plan, self.names, self.num_rows, self.move_weights = plan, tuple(names), num_rows, move_weights
        self._groups: dict[Any, tuple[LinearGroup, ...] | NotTraceable] = {}
        self._ready: dict[Any, tuple[AtenGraph, Counter[str]]] = {}
        self._fused: dict[Any, _Fused | NotTraceable] = {}
        self._notes: dict[str, None] = {}
        self.graphs: dict[Callable[..., tuple], AtenGraph] = {}

    def run(self) -> SegmentPlan:
        matches: Counter[str] = Counter()
        expected: dict[str, str] = {}
        segments = []
        for segment in self.plan.segments:
            fused = self._fused_for(segment) if segment.kind == "graph" and not segment.views_only else None
            if fused is not None:
                matches += fused.matches
                expected |= fused.expected
                segment = dataclasses.replace(segment, function=fused.function, lowering_key=fused.key)
            segments.append(segment)
        for name, op in expected.items():
            if not matches[name]:
                self._notes[f"{name} matched nothing, although there are {op}"] = None
        counts = tuple((each.name, matches[each.name]) for each in passes_named(self.names))
        report = FusionReport(counts, tuple(self._notes))
        return dataclasses.replace(self.plan, segments=tuple(segments), fusions=report)

    def _fused_for(self, segment: Segment) -> _Fused | None:
        try:
            if segment.keeps_own:
                raise NotTraceable(segment.keeps_own)
            kind = graph_key(self.plan, segment, what="inputs")
            if kind not in self._groups:
                self._groups[kind] = self._find_groups(segment, kind)
            groups = self._groups[kind]
            if isinstance(groups, NotTraceable):
                raise groups
            packed = tuple(group for group in groups if self._pack(segment, group))
            if (kind, packed) not in self._fused:
                self._fused[kind, packed] = self._rewrite(segment, kind, packed)
            fused = self._fused[kind, packed]
            if isinstance(fused, NotTraceable):
                raise fused
        except NotTraceable as reason:
            self._notes[f"{segment.name} keeps its own ops: {reason}"] = None
            return None
        return fused

    def _free_results(self, segment: Segment) -> tuple[int, ...]:
        """Positions of the results that may have any strides."""
        made = enumerate(segment.outputs)
        return tuple(position for position, index in made if self.plan.values[index].any_strides)

    def _trace(self, segment: Segment) -> tuple[AtenGraph, Counter[str]]:
        """The segment's aten graph, cleaned up."""
        traced = trace_aten(segment, self.plan.values, num_rows=self.num_rows)
        return traced, _rewritten(traced, passes_named(()))

    def _find_groups(self, segment: Segment, kind: Any) -> tuple[LinearGroup, ...] | NotTraceable:
        if "pack_linears" not in self.names:
            return ()
        # The row count is placeholder 0.
        read_only = {
            position + 1
            for position, index in enumerate(segment.inputs)
            if self.plan.values[index].origin == "state"
            and self.plan.values[index].memory not in segment.writes
        }
        try:
            self._ready[kind] = self._trace(segment)
        except NotTraceable as reason:
            return reason
        return tuple(find_groups(self._ready[kind][0].module.graph, read_only))

    def _pack(self, segment: Segment, group: LinearGroup) -> bool:
        """Packs the weights of a group, where all of them may be moved."""
        sets = [self._places(segment, kind) for kind in group.parameters]
        for places in sets:
            reason = why_not_packable(places) if places else None
            if reason is not None:
                self._notes[f"pack_linears left linears of one input alone: {reason}"] = None
                return False
        for places in sets:
            if places and self.move_weights:
                pack_(places)
        return True

    def _places(self, segment: Segment, positions: Sequence[int]) -> list[StateRef]:
        values = [self.plan.values[segment.inputs[position - 1]] for position in positions]
        return [value.state for value in values if value.state is not None]

    def _rewrite(self, segment: Segment, kind: Any, groups: Sequence[LinearGroup]) -> _Fused | NotTraceable:
        passes = passes_named(self.names, groups=groups)
        try:
            traced, matches = self._ready.pop(kind) if kind in self._ready else self._trace(segment)
            module = traced.module
            expected = {each.name: op for each in passes if (op := each.trigger(module.graph)) is not None}
            before = _results(module.graph)
            matches += _rewritten(traced, passes)
        except NotTraceable as reason:
            return reason
        free = self._free_results(segment)
        keep_geometry(module.graph, [value for value, _ in before], traced.fake_mode, free=free)
        if [memory for _, memory in _results(module.graph)] != [memory for _, memory in before]:
            return NotTraceable("the rewritten graph's results would share memory in another way")
        # Nothing in it differs from process to process.
        packed = [each.parameters for each in groups]
        key = f"{segment.lowering_key}, {self.names}, {packed}, {free}"
        function = _where_valid(traced.is_valid, traced.function(), segment.function)
        self.graphs[function] = traced
        return _Fused(key, function, matches, expected)


def _rewritten(traced: AtenGraph, passes: Sequence[GraphPass]) -> Counter[str]:
    """Matches per pass; a fault of a pass is no reason to be without graphs."""
    try:
        return run_passes(traced.module, passes, traced.fake_mode)
    except Exception as error:
        raise NotTraceable(f"a pass failed: {one_line(error)}") from error


def _where_valid(
    is_valid: Callable[[int], bool], fused: Callable[..., tuple], own: Callable[..., tuple]
) -> Callable[..., tuple]:
    """The fused function for row counts that its graph holds for, the segment's own for others."""

    def run(num_rows: int, *inputs: torch.Tensor) -> tuple:
        if not is_valid(num_rows):
            return own(num_rows, *inputs)
        # Its casts are in the graph.
        with torch_api.without_autocast():
            return fused(num_rows, *inputs)

    return run


def _results(graph: fx.Graph) -> list[tuple[Any, int]]:
    """Each result's fake, and the first placeholder or result in whose memory it lies."""
    known: dict[int | None, int] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        known.setdefault(memory_of(node.meta["val"]), -1 - position)
    found = []
    for position, node in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type, union-attr]
        value = node.meta["val"]
        found.append((value, known.setdefault(memory_of(value), position)))
    return found
