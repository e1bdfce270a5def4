"""Finds what each node of a traced graph reads, writes and shares memory with, and its aten ops.

Dynamo-level nodes are Python callables (`F.dropout`, `x.view`, `operator.iadd`) without a schema, so each is
run once more on its fake inputs under a dispatch mode, which sees the aten ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from boundary_ops.declare.boundary_op import BoundaryOp
from boundary_ops.declare.registry import lookup
from piecewise import torch_api
from piecewise.ir import nodes
from piecewise.ir.graph_key import node_key
from piecewise.ir.nodes import fakes_of, has_fakes, is_call, is_tuple_item, storages_of, target_name
from piecewise.ir.tensors import bound_arguments, map_tensors, storage_of, tensors_in, written_arguments


class Ref(NamedTuple):
    """Refers to a tensor of a recording by its position."""

    position: int


class TensorInfo(NamedTuple):
    """Describes a recorded tensor; sizes are ints or symbolic ints; tensors of one `memory` share it."""

    sizes: tuple[Any, ...]
    dtype: torch.dtype
    memory: int


class AtenCall(NamedTuple):
    """Holds one op, with `Ref`s for tensors, and the positions of those that it reads, returns and writes."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    results: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def made(self) -> tuple[int, ...]:
        """Lists what the op writes, then its other results."""
        return tuple(dict.fromkeys((*self.writes, *self.results)))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Holds the ops of a node.

    Attributes:
        tensors: the node's operands first, `num_given` of them.
        results: positions of the tensors in its value; one that no op made comes last among all.
        asked: what its code asked of sizes, answered as for the example.
    """

    tensors: tuple[TensorInfo, ...]
    num_given: int
    calls: tuple[AtenCall, ...]
    results: tuple[int, ...]
    asked: frozenset[sympy.Basic] = frozenset()


# Ops that read only metadata.
_IGNORED = "prim::device aten::size aten::sym_size aten::stride aten::_assert_tensor_metadata".split()


class OpRecorder(torch_api.TorchDispatchMode):
    """Records the ops of its block, on the tensors `given`, with tags and written storages."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.tags: set[torch.Tag] = set()
        self._tensors: list[TensorInfo] = []
        self._kept: list[torch.Tensor] = []  # alive, so that no other gets its id
        self._positions: dict[int, int] = {}
        self._memory: dict[int, int] = {}
        self._calls: list[AtenCall] = []
        self._num_given = len(given)
        for tensor in given:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in _IGNORED:
            return func(*args, **kwargs)
        if torch_api.is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        self.tags |= _tags(func, args, kwargs)
        written = list(tensors_in(written_arguments(func, args, kwargs)))
        reads = tuple(map(self._position_of, tensors_in([*args, *kwargs.values()])))
        noted = map_tensors((tuple(args), dict(kwargs)), lambda tensor: Ref(self._position_of(tensor)))
        writes = tuple(map(self._position_of, written))
        result = func(*args, **kwargs)
        is_view = torch.Tag.inplace_view in func.tags
        for tensor, position in zip(written, writes, strict=True):
            if is_view or tuple(tensor.shape) != self._tensors[position].sizes:
                self._add(tensor)  # from here on it is another tensor
        results = tuple(map(self._position_of, tensors_in(result)))
        if is_view and all(position >= self._num_given for position in writes):
            written, writes = [], ()  # it views its memory in another way
        self.written |= set(map(storage_of, written))
        self._calls.append(AtenCall(func, noted[0], noted[1], reads, results, writes))
        return result

    def recording(self, value: Any, asked: Collection[sympy.Basic] = ()) -> Recording:
        """Makes the recording of a block with this value."""
        results = tuple(map(self._position_of, tensors_in(value)))
        return Recording(tuple(self._tensors), self._num_given, tuple(self._calls), results, frozenset(asked))

    def _position_of(self, tensor: torch.Tensor) -> int:
        known = self._positions.get(id(tensor))
        return self._add(tensor) if known is None else known

    def _add(self, tensor: torch.Tensor) -> int:
        memory = self._memory.setdefault(storage_of(tensor), len(self._memory))
        self._tensors.append(TensorInfo(tuple(tensor.shape), tensor.dtype, memory))
        self._kept.append(tensor)
        position = self._positions[id(tensor)] = len(self._tensors) - 1
        return position


def _tags(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.Tag]:
    """Finds the tags of this call: not each index is a mask, and no dropout draws no random numbers."""
    tags = set(func.tags)
    if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_"):
        tags.discard(torch.Tag.dynamic_output_shape)
        if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(list(args[1]))):
            tags.add(torch.Tag.dynamic_output_shape)
    if torch.Tag.nondeterministic_seeded in tags:
        if bound_arguments(func, args, kwargs).get("dropout_p") == 0.0:
            tags.discard(torch.Tag.nondeterministic_seeded)
    return tags


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


Facts = Mapping[fx.Node, NodeFacts]
_Effects = tuple[tuple[int, ...], str, Recording | None]


def written_storages(facts: Iterable[NodeFacts]) -> set[int]:
    """Collects all memory that nodes with these facts write."""
    return storages_of(node for fact in facts for node in fact.writes)


def find_facts(graph: fx.Graph, *, enabled: frozenset[str] | None = None) -> dict[fx.Node, NodeFacts]:
    """Finds the facts of every call node, in graph order; `enabled` names the boundary ops, None for all."""
    fake_mode = torch_api.fake_mode_of(list(fakes_of(graph.nodes)))
    memo: dict[Any, _Effects] = {}
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


def _run_on_fakes(node: fx.Node, reads: Sequence[fx.Node], fake_mode: Any) -> _Effects:
    """Finds the positions of the reads that a node writes, why it cannot be recorded, and its recording."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    reads_back = bool(reads) and name in _READ_BACK_METHODS
    from_host = "host_tensor" if not reads and name in _HOST_FACTORIES else ""
    if isinstance(node.target, torch_api.HigherOrderOperator):
        return (), "control_flow", None
    if reads_back or not has_fakes(node, *reads):
        return (), "reads_back" if reads_back else from_host, None
    recorder = OpRecorder(list(fakes_of(reads)))
    recording = recorder.recording(*nodes.run_on_fakes(node, fake_mode, recorder))
    written = tuple(index for index, read in enumerate(reads) if recorder.written & storages_of([read]))
    # Attention kernels hide dropout behind a deterministic schema.
    dropout = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    has_dropout = "attention" in target_name(node) and isinstance(dropout, float) and dropout > 0.0
    if torch.Tag.nondeterministic_seeded in recorder.tags or has_dropout:
        return written, "random", recording
    codes = {torch.Tag.data_dependent_output: "reads_back", torch.Tag.dynamic_output_shape: "data_dependent"}
    tagged = next((code for tag, code in codes.items() if tag in recorder.tags), "")
    return written, from_host or tagged, recording


def remove_dead_nodes(graph: fx.Graph, facts: dict[fx.Node, NodeFacts]) -> None:
    """Erases nodes without users, writes, random numbers or checks; torch's pass would drop `add_`."""
    for node in reversed(list(graph.nodes)):
        if node.users or not (is_call(node) or node.op == "get_attr"):
            continue
        if (fact := facts.get(node)) is not None:
            name = target_name(node)
            is_check = bool(fact.reads) and ("assert" in name or name == "_check")
            if fact.writes or fact.unrecordable == "random" or fact.boundary or is_check:
                continue
            del facts[node]
        graph.erase_node(node)
