"""Rewrites a plan's graph segments by the passes, each distinct segment once, and packs weights for them.

A segment keeps its own function where it cannot be traced, or where the rewritten graph's results would share
memory in another way. docs/DESIGN.md says why fusing runs between the cut and the first use of addresses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

import piecewise.passes.fusions  # noqa: F401  (they declare themselves)
from piecewise import torch_api
from piecewise.ir.aten import AtenGraph, NotTraceable, trace_aten
from piecewise.ir.graph_key import graph_key
from piecewise.ir.plan import FusionReport, Segment, SegmentPlan
from piecewise.ir.sizes import size_node
from piecewise.passes import clean_up, pack_linears
from piecewise.passes.fakes import aten, geometry, memory_of, propagate, value_of
from piecewise.passes.fusion_pass import FUSIONS
from piecewise.passes.pack_linears import LinearGroup, find_groups, pack_, why_not_packable
from runners.errors import one_line

# A pass that finds work this often does not converge.
_MAX_SWEEPS = 100


class GraphPass(NamedTuple):
    """Describes one rewrite; `sweep` and `trigger` are as in `FusionPass`."""

    name: str
    sweep: Callable[[fx.GraphModule], int]
    trigger: Callable[[fx.Graph], str | None]


def passes_for(fusions: Sequence[str], lowering: str) -> tuple[str, ...]:
    """Lists the passes for the settings `fusions` and `lowering`."""
    if tuple(fusions) != ("auto",):
        return tuple(fusions)
    return ("clean_up", "pack_linears", *(each for each in sorted(FUSIONS) if lowering in FUSIONS[each].auto))


def passes_named(names: Sequence[str], *, groups: Sequence[pack_linears.LinearGroup] = ()) -> list[GraphPass]:
    """Returns `clean_up`, the passes of these names and those that they need, in order.

    Patterns are written for graphs without no-ops, and dead code must go before a write could become an op's
    only effect. `pack_linears` comes before the passes that read results of linears, which become slices.
    """
    found = {"clean_up": GraphPass("clean_up", clean_up.sweep, lambda graph: None)}
    if "pack_linears" in names:
        sweep = functools.partial(pack_linears.sweep, groups=groups)
        found["pack_linears"] = GraphPass(
            "pack_linears", sweep, lambda graph: "linears of one input" if find_groups(graph) else None
        )

    def add(name: str) -> None:
        for need in FUSIONS[name].needs:
            add(need)
        found.setdefault(name, GraphPass(name, FUSIONS[name].sweep, FUSIONS[name].trigger))

    for name in sorted(set(names) & set(FUSIONS)):
        add(name)
    return list(found.values())


def run_passes(module: fx.GraphModule, passes: Sequence[GraphPass], fake_mode: Any) -> Counter[str]:
    """Rewrites an aten graph in place, fakes included: runs each pass until it finds nothing, then all again
    until none matches. Returns matches per pass."""
    found: Counter[str] = Counter()
    while True:
        before = found.total()
        for each in passes:
            for _ in range(_MAX_SWEEPS):
                count = each.sweep(module)
                found[each.name] += count
                if not count:
                    break
                clean_up.remove_dead_nodes(module.graph)
                propagate(module.graph, fake_mode)
            else:
                raise AssertionError(f"pass {each.name} still matches after {_MAX_SWEEPS} sweeps")
        if found.total() == before:
            module.recompile()
            return found


# Segment function → the graph it runs.
FusedGraphs = Mapping[Callable[..., tuple], AtenGraph]


def fuse(
    plan: SegmentPlan, fusions: Sequence[str], *, lowering: str, num_rows: int, move_weights: bool
) -> tuple[SegmentPlan, FusedGraphs]:
    """Rewrites a plan's graph segments; returns the new plan, and the graphs of their functions.

    Args:
        num_rows: a row count of two or more for which the plan is valid.
        move_weights: pack weights into one storage now; without it the plan is for reading only.
    """
    names = passes_for(fusions, lowering)
    fusing = _Fusing(plan, names, num_rows=num_rows, move_weights=move_weights)
    return fusing.run(), fusing.graphs


# A lowering key, a function, matches per pass, and per pass what one would expect it to match.
_Fused = tuple[str, Callable[..., tuple], Counter[str], dict[str, str]]


class _Fusing:
    def __init__(self, plan: SegmentPlan, names: Sequence[str], *, num_rows: int, move_weights: bool) -> None:
        self.plan, self.names, self.num_rows, self.move_weights = plan, tuple(names), num_rows, move_weights
        self._known: dict[Any, Any] = {}
        self._ready: dict[Any, tuple[AtenGraph, Counter[str]]] = {}
        self._notes: dict[str, None] = {}
        self.graphs: dict[Callable[..., tuple], AtenGraph] = {}

    def run(self) -> SegmentPlan:
        matches: Counter[str] = Counter()
        expected: dict[str, str] = {}
        segments = list(self.plan.segments)
        for segment in self.plan.computing_segments():
            try:
                if segment.keeps_own:
                    raise NotTraceable(segment.keeps_own)
                kind = graph_key(self.plan, segment, what="inputs")
                groups = self._once(kind, functools.partial(self._find_groups, segment, kind))
                packed = tuple(group for group in groups if self._pack(segment, group))
                rewrite = functools.partial(self._rewrite, segment, kind, packed)
                key, function, found, hoped = self._once((kind, packed), rewrite)
            except NotTraceable as reason:
                self._notes[f"{segment.name} keeps its own ops: {reason}"] = None
                continue
            matches += found
            expected |= hoped
            segments[segment.index] = dataclasses.replace(segment, function=function, lowering_key=key)
        for name, op in expected.items():
            if not matches[name]:
                self._notes[f"{name} matched nothing, although there are {op}"] = None
        counts = tuple((each.name, matches[each.name]) for each in passes_named(self.names))
        report = FusionReport(counts, tuple(self._notes))
        return dataclasses.replace(self.plan, segments=tuple(segments), fusions=report)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned, or raises the NotTraceable it raised, at the key's first use."""
        if key not in self._known:
            try:
                self._known[key] = make()
            except NotTraceable as reason:
                self._known[key] = reason
        if isinstance(self._known[key], NotTraceable):
            raise self._known[key]
        return self._known[key]

    def _trace(self, segment: Segment) -> tuple[AtenGraph, Counter[str]]:
        traced = trace_aten(segment, self.plan.values, num_rows=self.num_rows)
        return traced, _rewritten(traced, passes_named(()))

    def _find_groups(self, segment: Segment, kind: Any) -> tuple[LinearGroup, ...]:
        if "pack_linears" not in self.names:
            return ()
        values = [self.plan.values[index] for index in segment.inputs]
        read_only = {
            position  # the row count is placeholder 0
            for position, value in enumerate(values, start=1)
            if value.origin == "state" and value.memory not in segment.writes
        }
        self._ready[kind] = self._trace(segment)
        return tuple(find_groups(self._ready[kind][0].module.graph, read_only))

    def _pack(self, segment: Segment, group: LinearGroup) -> bool:
        """Packs a group's weights; returns false where one of them may not be moved."""
        sets = []
        for positions in group:
            values = (self.plan.values[segment.inputs[position - 1]] for position in positions)
            sets.append([value.state for value in values if value.state is not None])
        for places in sets:
            reason = why_not_packable(places) if places else None
            if reason is not None:
                self._notes[f"pack_linears left linears of one input alone: {reason}"] = None
                return False
        for places in sets:
            if places and self.move_weights:
                pack_(places)
        return True

    def _rewrite(self, segment: Segment, kind: Any, groups: Sequence[LinearGroup]) -> _Fused:
        passes = passes_named(self.names, groups=groups)
        traced, matches = self._ready.pop(kind) if kind in self._ready else self._trace(segment)
        graph = traced.module.graph
        expected = {each.name: op for each in passes if (op := each.trigger(graph)) is not None}
        before = _results(graph)
        matches += _rewritten(traced, passes)
        made = enumerate(segment.outputs)
        free = tuple(position for position, index in made if self.plan.values[index].any_strides)
        keep_geometry(graph, [value for value, _ in before], traced.fake_mode, free=free)
        if [memory for _, memory in _results(graph)] != [memory for _, memory in before]:
            raise NotTraceable("the rewritten graph's results would share memory in another way")
        # A lowering key is the same in every process.
        key = f"{segment.lowering_key}, {self.names}, {list(groups)}, {free}"
        function = _where_valid(traced.is_valid, traced.function(), segment.function)
        self.graphs[function] = traced
        return key, function, matches, expected


def _rewritten(traced: AtenGraph, passes: Sequence[GraphPass]) -> Counter[str]:
    """Runs the passes; an error in one leaves the segment unfused (NotTraceable), not without a graph."""
    try:
        return run_passes(traced.module, passes, traced.fake_mode)
    except Exception as error:
        raise NotTraceable(f"a pass failed: {one_line(error)}") from error


def _where_valid(
    is_valid: Callable[[int], bool], fused: Callable[..., tuple], own: Callable[..., tuple]
) -> Callable[..., tuple]:
    """Dispatches to the segment's own function at row counts for which the fused graph does not hold."""

    def run(num_rows: int, *inputs: torch.Tensor) -> tuple:
        if not is_valid(num_rows):
            return own(num_rows, *inputs)
        # Autocast's casts are in the graph.
        with torch_api.without_autocast():
            return fused(num_rows, *inputs)

    return run


def _results(graph: fx.Graph) -> list[tuple[Any, int]]:
    """Returns each result's fake, and the first placeholder or result that lies in the same memory."""
    known: dict[int | None, int] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        known.setdefault(memory_of(node.meta["val"]), -1 - position)
    found = []
    for position, node in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type, union-attr]
        found.append((node.meta["val"], known.setdefault(memory_of(node.meta["val"]), position)))
    return found


def keep_geometry(graph: fx.Graph, wanted: list[Any], fake_mode: Any, *, free: Collection[int] = ()) -> None:
    """Copies results whose strides a rewrite changed from those of `wanted`: a segment's readers may rely on
    them. Readers of the results at positions in `free` need only that the last stride is 1."""
    output, (rows, *placeholders) = graph.output_node(), graph.find_nodes(op="placeholder")
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for position, (node, fake) in enumerate(zip(results, wanted, strict=True)):
        if not isinstance(node, fx.Node) or geometry(value_of(node)) == geometry(fake):
            continue
        # A result that is returned twice is in the list twice.
        memories = [memory_of(value_of(other)) for other in (*placeholders, *results)]
        is_alone = memories.count(memory_of(value_of(node))) == 1
        if position in free and value_of(node).stride()[-1] == 1 and is_alone:
            continue
        with graph.inserting_before(output):
            symbols = {value_of(rows).node.expr: rows}
            exprs: Any = [
                [torch_api.expression(n, None) for n in each] for each in (fake.shape, fake.stride())
            ]
            sizes, strides = ([size_node(graph, expr, symbols) for expr in each] for each in exprs)
            dense = graph.call_function(aten.new_empty_strided.default, (node, sizes, strides))
            results[position] = graph.call_function(aten.copy_.default, (dense, node))
    output.args = (tuple(results),)
    propagate(graph, fake_mode)
