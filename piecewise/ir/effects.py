"""Finds what each node of a traced graph reads, writes and shares memory with, and its aten ops.

Dynamo-level nodes are Python callables (`F.dropout`, `x.view`, `operator.iadd`) without a schema, so each is
run once more on its fake inputs under a dispatch mode, which sees the aten ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from boundary_ops.declare.boundary_op import BoundaryOp
from boundary_ops.declare.registry import lookup
from piecewise import torch_api
from piecewise.ir.graph_key import node_key
from piecewise.ir.nodes import (
    fakes_of,
    has_fakes,
    is_call,
    is_tuple_item,
    run_on_fakes,
    storages_of,
    target_name,
)
from piecewise.ir.recording import OpRecorder, Recording
from piecewise.ir.tensors import written_arguments

_HOST_FACTORIES = frozenset({"tensor", "as_tensor", "from_numpy", "asarray", "scalar_tensor"})
_READ_BACK_METHODS = frozenset({"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "is_nonzero"})


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFacts:
    """Holds the effects of one node.

    Attributes:
        reads: argument nodes that hold tensors, each once, in order.
        writes: the argument nodes whose memory it writes.
        storages: memory of its result tensors.
        is_view: whether its result is another view of an argument's memory, without any write.
        unrecordable: why it cannot be recorded, a code of `classify.REASONS`; empty if it can.
        recording: its aten ops, on `reads` in their order; None if not recorded.
        boundary: the registered op that it calls.
    """

    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    storages: frozenset[int]
    is_view: bool = False
    unrecordable: str = ""
    recording: Recording | None = None
    boundary: BoundaryOp | None = None

    @property
    def calls_op_of_others(self) -> bool:
        """Whether the node calls a kernel that is not torch's own."""
        calls = self.recording.calls if self.recording is not None else ()
        return any(call.op.namespace not in ("aten", "prim", "prims") for call in calls)


def written_storages(facts: Iterable[NodeFacts]) -> set[int]:
    """Collects all memory that nodes with these facts write."""
    return storages_of(node for fact in facts for node in fact.writes)


def find_facts(graph: fx.Graph, *, enabled: frozenset[str] | None = None) -> dict[fx.Node, NodeFacts]:
    """Finds the facts of every call node, in graph order; `enabled` names the boundary ops, None for all."""
    fake_mode = torch_api.fake_mode_of(list(fakes_of(graph.nodes)))
    memo: dict[Any, tuple[tuple[int, ...], str, Recording | None]] = {}
    facts: dict[fx.Node, NodeFacts] = {}
    for node in filter(is_call, graph.nodes):
        reads = tuple(filter(has_fakes, node.all_input_nodes))
        storages = frozenset(storages_of([node]))
        boundary = lookup(node.target) if node.op == "call_function" else None
        if boundary is not None and (enabled is None or boundary.name in enabled):
            written: dict[fx.Node, None] = {}
            fx.node.map_arg(written_arguments(boundary.overload, node.args, node.kwargs), written.setdefault)
            facts[node] = NodeFacts(reads, tuple(written), storages, boundary=boundary)
            continue
        key = node_key(node)
        if key not in memo:
            memo[key] = _run_on_fakes(node, reads, fake_mode)
        places, unrecordable, recording = memo[key]
        writes = tuple(reads[index] for index in places)
        is_view = bool(storages) and not writes and storages <= storages_of(reads)
        if is_tuple_item(node):
            # An item is its producer's tensor, unless the producer makes views (split).
            is_view = facts[node.args[0]].is_view  # type: ignore[index]
        facts[node] = NodeFacts(reads, writes, storages, is_view, unrecordable, recording)
    return facts


def _run_on_fakes(
    node: fx.Node, reads: Sequence[fx.Node], fake_mode: Any
) -> tuple[tuple[int, ...], str, Recording | None]:
    """Finds the positions of the reads that a node writes, why it cannot be recorded, and its recording."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    reads_back = bool(reads) and name in _READ_BACK_METHODS
    from_host = "host_tensor" if not reads and name in _HOST_FACTORIES else ""
    if isinstance(node.target, torch_api.HigherOrderOperator):
        return (), "control_flow", None
    if reads_back or not has_fakes(node, *reads):
        return (), "reads_back" if reads_back else from_host, None
    recorder = OpRecorder(list(fakes_of(reads)))
    recording = recorder.recording(*run_on_fakes(node, fake_mode, recorder))
    written = tuple(index for index, read in enumerate(reads) if recorder.written & storages_of([read]))
    if torch.Tag.nondeterministic_seeded in recorder.tags or _has_dropout(node):
        return written, "random", recording
    codes = {torch.Tag.data_dependent_output: "reads_back", torch.Tag.dynamic_output_shape: "data_dependent"}
    tagged = next((code for tag, code in codes.items() if tag in recorder.tags), "")
    return written, from_host or tagged, recording


def _has_dropout(node: fx.Node) -> bool:
    """Whether a node draws dropout, which attention kernels hide behind a deterministic schema."""
    if "attention" not in target_name(node):
        return False
    probability = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    return isinstance(probability, float) and probability > 0.0


def remove_dead_nodes(graph: fx.Graph, facts: dict[fx.Node, NodeFacts]) -> None:
    """Erases nodes without users, writes, random numbers or checks; torch's pass would drop `add_`."""
    for node in reversed(list(graph.nodes)):
        if node.users or not (is_call(node) or node.op == "get_attr"):
            continue
        fact = facts.get(node)
        if fact is not None:
            name = target_name(node)
            is_check = bool(fact.reads) and ("assert" in name or name == "_check")
            if fact.writes or fact.unrecordable == "random" or fact.boundary or is_check:
                continue
            del facts[node]
        graph.erase_node(node)
