"""Decides which graph segments run on several streams, and at which buckets.

Each distinct program is scheduled once; at buckets of up to `MAX_ROWS` rows the schedule is what is warmed up
and captured. docs/DESIGN.md has the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from piecewise import torch_api
from piecewise.ir.aten import NotTraceable, trace_aten
from piecewise.ir.graph_key import graph_key
from piecewise.ir.plan import Segment, SegmentPlan, ValueSpec
from piecewise.ir.tensors import tensors_in, written_arguments
from piecewise.passes.fakes import memory_of, value_of
from piecewise.report.segments import BucketStreams, LoweringReport, SegmentStreams, StreamReport
from piecewise.streams.branches import Fork, Join, OpFacts, StreamSchedule, schedule
from runners.engine import Streams


class ScheduledFunction(NamedTuple):
    """Holds a segment's function on several streams, `run(streams, num_rows, *inputs)`."""

    schedule: StreamSchedule
    run: Callable[..., tuple]
    is_valid: Callable[[int], bool]

    @classmethod
    def of(
        cls, segment: Segment, values: Sequence[ValueSpec], *, num_rows: int, num_streams: int
    ) -> ScheduledFunction:
        """Schedules a segment on at most `num_streams` streams, without computing; raises NotTraceable. The
        plan must be valid for `num_rows`, two or more, at which branches are weighed."""
        traced = trace_aten(segment, values, num_rows=num_rows)
        graph = traced.module.graph
        made = schedule(facts_of(graph, segment, values), num_streams)
        function = traced.function(_on_streams(graph, made))

        def run(streams: Streams, num_rows: int, *inputs: torch.Tensor) -> tuple:
            # Autocast's casts are in the graph.
            with torch_api.without_autocast(), streams.opened():
                return function(streams, num_rows, *inputs)

        return cls(made, run, traced.is_valid)


def facts_of(graph: fx.Graph, segment: Segment, values: Sequence[ValueSpec]) -> list[OpFacts]:
    """Lists what each op of a segment's aten graph takes, reads and writes, by schemas and the storages of
    fakes; inputs that share memory in the plan's `values` count as one."""
    inputs = zip(list(graph.find_nodes(op="placeholder"))[1:], segment.inputs, strict=True)
    shared = {memory_of(value_of(node)): -1 - values[index].memory for node, index in inputs}

    def memories(value: Any) -> set[int]:
        found = map(memory_of, tensors_in(value))
        return {shared.get(memory, memory) for memory in found if memory is not None}

    positions = {node: position for position, node in enumerate(_ops_of(graph))}
    return [_facts(node, positions, memories) for node in positions]


def _ops_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _facts(node: fx.Node, positions: Mapping[fx.Node, int], memories: Callable[[Any], set[int]]) -> OpFacts:
    takes = tuple(sorted(positions[each] for each in node.all_input_nodes if each in positions))
    given = [value_of(each) for each in node.all_input_nodes]
    held, made = memories(given), memories(value_of(node))
    if not isinstance(node.target, torch_api.OpOverload):
        # Constants, items of tuples and sizes are known; any other node may do anything.
        return OpFacts(takes, is_barrier=not (node.op == "get_attr" or made <= held))
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    written = memories(written_arguments(node.target, args, kwargs))
    if not written and made <= held:
        # A view or a size; an op that returns nothing is a check.
        return OpFacts(takes, is_barrier=not node.target._schema.returns)
    tensors = list(tensors_in([*given, value_of(node)]))
    weight = sum(torch_api.size_hint(tensor.numel()) * tensor.element_size() for tensor in tensors)
    return OpFacts(
        takes, frozenset(held), frozenset(written | (made - held)), float(weight), is_heavy(node.target),
        is_barrier=torch.Tag.nondeterministic_seeded in node.target.tags,
    )  # fmt: skip


def is_heavy(op: torch_api.OpOverload) -> bool:
    """Whether an op is worth a stream: torch has a formula for its FLOPs, or its name ends in "mm"."""
    name = op._schema.name.rpartition("::")[2]
    return op.overloadpacket in flop_registry or name.rstrip("_").endswith("mm")


def _on_streams(graph: fx.Graph, made: StreamSchedule) -> fx.Graph:
    """Returns the graph in the schedule's order, with forks and joins; its first input is the streams."""
    nodes, written = _ops_of(graph), fx.Graph()
    streams = written.placeholder("streams")
    copies = {node: written.node_copy(node) for node in graph.find_nodes(op="placeholder")}
    held: dict[fx.Node, None] = {}
    current = 0
    for command in made.commands():
        if isinstance(command, Fork):
            written.call_method("fork", (streams, command.num_streams))
            held = {}
        elif isinstance(command, Join):
            written.call_method("join", (streams, *(copies[node] for node in held)))
            current = 0
        else:
            node = nodes[command.op]
            if command.stream != current:
                written.call_method("enter", (streams, command.stream))
                current = command.stream
            copies[node] = written.node_copy(node, copies.__getitem__)
            held |= dict.fromkeys(filter(_has_memory, (*node.all_input_nodes, node)))
    written.output(fx.node.map_arg(graph.output_node().args[0], copies.__getitem__))
    return written


def _has_memory(node: fx.Node) -> bool:
    return any(True for _ in tensors_in(value_of(node)))


MAX_ROWS = 512


@dataclasses.dataclass(slots=True)
class _Kind:
    """Holds what equal segments share: a schedule, or the reason against one, and the choice by bucket."""

    first: Segment
    scheduled: ScheduledFunction | str
    num_alike: int = 0
    chosen: dict[int, BucketStreams] = dataclasses.field(default_factory=dict)

    def report(self) -> SegmentStreams:
        first = self.first.name, self.num_alike
        if isinstance(self.scheduled, str):
            return SegmentStreams(*first, reason=self.scheduled)
        buckets = tuple(self.chosen[bucket] for bucket in sorted(self.chosen, reverse=True))
        schedule = self.scheduled.schedule
        return SegmentStreams(*first, schedule.num_branches, schedule.num_streams, "", buckets)


class StreamSchedules:
    """Schedules a plan's graph segments, each distinct program once, but for those that Inductor compiles.
    Branches are weighed at `num_rows` rows; a `num_streams` of 1 schedules nothing."""

    def __init__(self, plan: SegmentPlan, report: LoweringReport, *, num_rows: int, num_streams: int) -> None:
        self.num_streams = num_streams
        self._kinds: dict[tuple[Any, str], _Kind] = {}
        self._kind_of: dict[int, _Kind] = {}
        for segment in plan.computing_segments() if num_streams > 1 else ():
            reason = segment.keeps_own
            if not reason and report.compiles(segment.name):
                reason = "compiled by Inductor: one callable"
            key = graph_key(plan, segment), reason
            if key in self._kinds:
                self._kinds[key].num_alike += 1
            else:
                scheduled = reason or _scheduled(plan, segment, num_rows, num_streams)
                self._kinds[key] = _Kind(segment, scheduled)
            self._kind_of[segment.index] = self._kinds[key]

    def form_for(self, segment: Segment, bucket: int, streams: Streams) -> Callable[..., Any] | None:
        """Returns the segment's function on several streams; None where it runs on one at this bucket."""
        kind = self._kind_of.get(segment.index)
        if kind is None or isinstance(kind.scheduled, str):
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


def _scheduled(plan: SegmentPlan, segment: Segment, rows: int, num_streams: int) -> ScheduledFunction | str:
    if rows < 2:
        return "it is captured at one token only"
    try:
        made = ScheduledFunction.of(segment, plan.values, num_rows=rows, num_streams=num_streams)
    except NotTraceable as error:
        return f"its ops cannot be traced: {error}"
    return made if made.schedule.regions else "no independent branches"
