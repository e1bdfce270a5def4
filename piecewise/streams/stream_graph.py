"""Schedules a graph segment's function on parallel streams: the same ops in another order.

What an op touches is read from its schema and from the storages of its fakes; two inputs of the segment that
share memory are one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from piecewise import torch_api
from piecewise.ir.aten import trace_aten
from piecewise.ir.plan import Segment, ValueSpec
from piecewise.ir.tensors import tensors_in, written_arguments
from piecewise.passes.fakes import memory_of, value_of
from piecewise.streams.branches import Fork, Join, OpFacts, StreamSchedule, schedule
from runners.engine import Streams


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledFunction:
    """Holds a segment's function on several streams.

    Attributes:
        run: `run(streams, num_rows, *inputs)`.
        is_valid: row count → whether it holds for it.
    """

    schedule: StreamSchedule
    run: Callable[..., tuple]
    is_valid: Callable[[int], bool]

    @classmethod
    def of(
        cls, segment: Segment, values: Sequence[ValueSpec], *, num_rows: int, num_streams: int
    ) -> ScheduledFunction:
        """Schedules a graph segment on at most `num_streams` streams; nothing is computed.

        Args:
            values: the plan's.
            num_rows: a row count of two or more for which the plan is valid; branches are weighed at it.
        Raises:
            NotTraceable: as `trace_aten`.
        """
        traced = trace_aten(segment, values, num_rows=num_rows)
        graph = traced.module.graph
        made = schedule(facts_of(graph, segment, values), num_streams)
        function = traced.function(_on_streams(graph, made))

        def run(streams: Streams, num_rows: int, *inputs: torch.Tensor) -> tuple:
            # Casts of autocast are in the graph.
            with torch_api.without_autocast(), streams.opened():
                return function(streams, num_rows, *inputs)

        return cls(made, run, traced.is_valid)


def facts_of(graph: fx.Graph, segment: Segment, values: Sequence[ValueSpec]) -> list[OpFacts]:
    """Lists what each of a segment's ops takes, reads and writes.

    Args:
        graph: the segment's aten graph, whose placeholders are the row count and the segment's inputs.
        values: the plan's.
    """
    # Each input has a fake of its own; which of them are one memory, the plan knows.
    shared: dict[int | None, int] = {}
    placeholders = list(graph.find_nodes(op="placeholder"))[1:]
    for placeholder, index in zip(placeholders, segment.inputs, strict=True):
        shared[memory_of(value_of(placeholder))] = -1 - values[index].memory

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
        # Constants, items of tuples and sizes; whatever else there is may do anything.
        is_known = node.op == "get_attr" or made <= held
        return OpFacts(takes, is_barrier=not is_known)
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    written = memories(written_arguments(node.target, args, kwargs))
    if not written and made <= held:
        # A view or a size; or, where it returns nothing, a check.
        return OpFacts(takes, is_barrier=not node.target._schema.returns)
    tensors = list(tensors_in([*given, value_of(node)]))
    weight = sum(torch_api.size_hint(tensor.numel()) * tensor.element_size() for tensor in tensors)
    return OpFacts(
        takes, frozenset(held), frozenset(written | (made - held)), float(weight), is_heavy(node.target),
        is_barrier=torch.Tag.nondeterministic_seeded in node.target.tags,
    )  # fmt: skip


def is_heavy(op: torch_api.OpOverload) -> bool:
    """Whether an op is worth a stream: torch has a formula for its FLOPs, or it is named as a matmul is."""
    name = op._schema.name.rpartition("::")[2]
    return op.overloadpacket in flop_registry or name.rstrip("_").endswith("mm")


def _on_streams(graph: fx.Graph, made: StreamSchedule) -> fx.Graph:
    """The graph in the schedule's order, with its forks and joins; its first placeholder is the streams."""
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
