"""A graph segment's function with its independent branches on parallel lanes: the same ops in another order.

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
    """A segment's function on lanes.

    Attributes:
        run: `run(lanes, num_rows, *inputs)`; None where there is nothing to run at the same time.
        is_valid: row count → whether it holds for it.
    """

    schedule: StreamSchedule
    run: Callable[..., tuple] | None
    is_valid: Callable[[int], bool]

    @classmethod
    def of(
        cls, segment: Segment, values: Sequence[ValueSpec], *, num_rows: int, num_streams: int
    ) -> ScheduledFunction:
        """Schedules a graph segment on at most `num_streams` lanes; nothing is computed.

        Args:
            values: the plan's.
            num_rows: a row count of two or more for which the plan is valid; branches are weighed at it.
        Raises:
            NotTraceable: as `trace_aten`.
        """
        traced = trace_aten(segment, values, num_rows=num_rows)
        nodes = [node for node in traced.module.graph.nodes if node.op not in ("placeholder", "output")]
        made = schedule(facts_of(traced.module.graph, nodes, segment, values), num_streams)
        if not made.regions:
            return cls(made, None, traced.is_valid)
        function = traced.function(_on_lanes(traced.module.graph, nodes, made))

        def run(lanes: Streams, num_rows: int, *inputs: torch.Tensor) -> tuple:
            # Casts of autocast are in the graph.
            with torch_api.without_autocast(), lanes.opened():
                return function(lanes, num_rows, *inputs)

        return cls(made, run, traced.is_valid)


def facts_of(
    graph: fx.Graph, nodes: Sequence[fx.Node], segment: Segment, values: Sequence[ValueSpec]
) -> list[OpFacts]:
    """What each of a segment's ops takes, reads and writes.

    Args:
        graph: the segment's aten graph, whose placeholders are the row count and the segment's inputs.
        nodes: its ops.
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

    positions = {node: position for position, node in enumerate(nodes)}
    return [_facts(node, positions, memories) for node in nodes]


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
    weight = float(_num_bytes([*given, value_of(node)]))
    return OpFacts(
        takes, frozenset(held), frozenset(written | (made - held)), weight, is_heavy(node.target),
        is_barrier=torch.Tag.nondeterministic_seeded in node.target.tags,
    )  # fmt: skip


def is_heavy(op: torch_api.OpOverload) -> bool:
    """Whether an op is worth a lane: torch has a formula for its FLOPs, or it is named as a matmul is."""
    name = op._schema.name.rpartition("::")[2]
    return op.overloadpacket in flop_registry or name.rstrip("_").endswith("mm")


def _num_bytes(values: Sequence[Any]) -> int:
    """Bytes of all tensors, at the row count of the trace."""
    return sum(torch_api.size_hint(tensor.numel()) * tensor.element_size() for tensor in tensors_in(values))


def _on_lanes(graph: fx.Graph, nodes: Sequence[fx.Node], made: StreamSchedule) -> fx.Graph:
    """The graph in the schedule's order, with its forks and joins; its first placeholder is the lanes."""
    written = fx.Graph()
    lanes = written.placeholder("lanes")
    copies: dict[fx.Node, fx.Node] = {}
    for placeholder in graph.find_nodes(op="placeholder"):
        copies[placeholder] = written.node_copy(placeholder)
    held: dict[fx.Node, None] = {}
    current = 0
    for command in made.commands():
        if isinstance(command, Fork):
            written.call_method("fork", (lanes, command.num_lanes))
            held = {}
        elif isinstance(command, Join):
            written.call_method("join", (lanes, *(copies[node] for node in held)))
            current = 0
        else:
            node = nodes[command.op]
            if command.lane != current:
                written.call_method("enter", (lanes, command.lane))
                current = command.lane
            copies[node] = written.node_copy(node, copies.__getitem__)
            held |= dict.fromkeys(each for each in (*node.all_input_nodes, node) if _has_memory(each))
    written.output(fx.node.map_arg(graph.output_node().args[0], copies.__getitem__))
    return written


def _has_memory(node: fx.Node) -> bool:
    return any(True for _ in tensors_in(value_of(node)))
