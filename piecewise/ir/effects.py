"""What each node of a traced graph reads, writes and shares memory with, and the aten ops behind it.

Dynamo-level nodes are Python callables (`F.dropout`, `x.view`, `operator.iadd`) whose effects no schema
tells. Each is therefore run once more on its fake inputs under a dispatch mode, which sees the aten ops.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx

from boundary_ops.declare.boundary_op import BoundaryOp
from boundary_ops.declare.registry import lookup
from piecewise import torch_api as internals
from piecewise.analysis.rows.recording import OpRecorder, Recording
from piecewise.ir.tensors import storage_of, tensors_in, written_arguments

_HOST_FACTORIES = frozenset({"tensor", "as_tensor", "from_numpy", "asarray", "scalar_tensor"})
_READ_BACK_METHODS = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "is_nonzero", "cpu"}
)


def fakes_of(nodes: Iterable[fx.Node]) -> Iterator[torch.Tensor]:
    """The fakes of nodes' tensors."""
    return (tensor for node in nodes for tensor in tensors_in(node.meta.get("example_value")))


def written_storages(facts: Iterable[NodeFacts]) -> set[int]:
    """All memory that nodes with these facts write."""
    return {storage_of(tensor) for fact in facts for tensor in fakes_of(fact.writes)}


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFacts:
    """Effects of one node.

    Attributes:
        reads: argument nodes whose value is a tensor or holds some, each once, in order.
        writes: the argument nodes whose memory it writes.
        storages: memory that its result tensors live in.
        is_view: its result is another look at an argument's memory, and nothing is written.
        random, reads_back, data_dependent, from_host: why it cannot be recorded.
        recording: the aten ops that it comes to, on `reads` in their order; None where nobody looked.
        boundary: the registered op that it calls.
    """

    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    storages: frozenset[int]
    is_view: bool
    random: bool = False
    reads_back: bool = False
    data_dependent: bool = False
    from_host: bool = False
    recording: Recording | None = None
    boundary: BoundaryOp | None = None

    @property
    def calls_op_of_others(self) -> bool:
        """Whether it calls a kernel that is not torch's own."""
        calls = self.recording.calls if self.recording is not None else ()
        return any(call.op.namespace not in ("aten", "prim", "prims") for call in calls)


# Positions of the arguments that a node writes, and the fields of `NodeFacts` that say why it cannot be
# recorded, and what it comes to.
_Footprint = tuple[tuple[int, ...], dict[str, Any]]


def find_facts(graph: fx.Graph, *, enabled: frozenset[str] | None = None) -> dict[fx.Node, NodeFacts]:
    """Facts of every call and get_attr node, in graph order.

    Args:
        enabled: names of the boundary ops to cut at, None for all that are registered.
    """
    fakes = [node.meta.get("example_value") for node in graph.nodes]
    fake_mode = internals.fake_mode_of(fakes)
    memo: dict[Any, _Footprint] = {}
    facts: dict[fx.Node, NodeFacts] = {}
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        reads = tuple(n for n in node.all_input_nodes if any(True for _ in fakes_of([n])))
        storages = frozenset(map(storage_of, fakes_of([node])))
        boundary = lookup(node.target) if node.op == "call_function" else None
        if boundary is not None and enabled is not None and boundary.name not in enabled:
            boundary = None
        if boundary is not None:
            written: dict[fx.Node, None] = {}
            fx.node.map_arg(written_arguments(boundary.overload, node.args, node.kwargs), written.setdefault)
            writes = tuple(written)
            facts[node] = NodeFacts(reads, writes, storages, False, boundary=boundary)
            continue
        key = node_key(node)
        if key not in memo:
            memo[key] = _run_on_fakes(node, reads, fake_mode)
        places, found = memo[key]
        writes = tuple(reads[index] for index in places)
        is_view = bool(storages) and not writes and storages <= set(map(storage_of, fakes_of(reads)))
        if is_tuple_item(node):
            # An item is the tensor that its producer made, unless that makes views (split).
            is_view = facts[node.args[0]].is_view  # type: ignore[index]
        facts[node] = NodeFacts(reads, writes, storages, is_view, **found)
    return facts


def node_key(node: fx.Node) -> Any:
    """Equal for nodes that do the same on tensors of the same kind: layers of a model repeat them."""

    places = {argument: place for place, argument in enumerate(node.all_input_nodes)}

    def plain(sizes: Any) -> tuple[Any, ...]:
        # An expression is hashed in a fraction of the time that its text takes.
        return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)

    def describe(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return places[value], describe(value.meta.get("example_value"))
        if isinstance(value, torch.Tensor):
            return ("t", plain(value.shape), plain(value.stride()), value.dtype, value.device)
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(describe, value))
        if isinstance(value, torch.SymInt):
            return ("s", value.node.expr)
        if isinstance(value, dict):
            return tuple((name, describe(item)) for name, item in sorted(value.items()))
        if isinstance(value, slice):
            return ("slice", describe(value.start), describe(value.stop), describe(value.step))
        return repr(value)

    # Two arguments that are the same node, or share memory, must not be mistaken for two that do not.
    order: dict[int, int] = {}
    pattern = tuple(order.setdefault(storage_of(fake), len(order)) for fake in fakes_of(node.all_input_nodes))
    regions = node.meta.get("autocast", ())
    return (node.op, str(node.target), describe(node.args), describe(dict(node.kwargs)), pattern, regions)


def _run_on_fakes(node: fx.Node, reads: Sequence[fx.Node], fake_mode: Any) -> _Footprint:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    reads_back = bool(reads) and name in _READ_BACK_METHODS - {"cpu"}
    from_host = not reads and name in _HOST_FACTORIES
    value = node.meta.get("example_value")
    if reads_back or not (reads or any(True for _ in tensors_in(value))):
        return (), dict(reads_back=reads_back, data_dependent=reads_back, from_host=from_host)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        # Control flow reads its predicate back.
        return (), dict(reads_back=True, data_dependent=True, from_host=from_host)

    mode = OpRecorder([*fakes_of(reads)])
    made, asked = _called(node, fake_mode, mode)
    written = tuple(
        index
        for index, argument in enumerate(reads)
        if mode.written & set(map(storage_of, fakes_of([argument])))
    )
    dynamic = torch.Tag.dynamic_output_shape in mode.tags
    item = torch.Tag.data_dependent_output in mode.tags
    random = torch.Tag.nondeterministic_seeded in mode.tags or _has_dropout(node)
    return written, dict(
        random=random, reads_back=item, data_dependent=dynamic or item, from_host=from_host,
        recording=mode.recording(made, asked),
    )  # fmt: skip


def call_on_fakes(node: fx.Node, fake_mode: Any) -> Any:
    """The node's result on its arguments' fakes; no guard or symbol is left behind."""
    return _called(node, fake_mode, nullcontext())[0]


def _called(node: fx.Node, fake_mode: Any, mode: Any) -> tuple[Any, set[sympy.Basic]]:
    """The node's result on fakes, and what was asked of sizes."""

    def fake(argument: fx.Node) -> Any:
        return argument.meta.get("example_value")

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), fake)
    with (
        autocast_of(node),
        internals.asked_of_sizes(getattr(fake_mode, "shape_env", None)) as asked,
        internals.python_dispatcher(),
        torch.inference_mode(False),
        torch.no_grad(),
        fake_mode if fake_mode is not None else nullcontext(),
        mode,
    ):
        call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        return call(*(args[1:] if node.op == "call_method" else args), **kwargs), asked


@contextmanager
def autocast_of(node: fx.Node) -> Iterator[None]:
    """The autocast regions that a normalized node lies in; casts of weights are made anew, so that they are
    seen."""
    before = torch.is_autocast_cache_enabled()
    with ExitStack() as regions:
        for arguments in node.meta.get("autocast", ()):
            regions.enter_context(torch.autocast(*arguments))
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(before)


def _has_dropout(node: fx.Node) -> bool:
    """Attention kernels hide their dropout behind a deterministic schema."""
    name = getattr(node.target, "__name__", str(node.target))
    if "attention" not in name:
        return False
    probability = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    return isinstance(probability, float) and probability > 0.0


def is_dead(node: fx.Node, facts: Mapping[fx.Node, NodeFacts]) -> bool:
    """Whether nothing can tell that the node is missing: no users, no writes, no random numbers drawn, no
    check."""
    if node.users or not node.op.startswith(("call", "get_attr")):
        return False
    fact = facts.get(node)
    if fact is None:
        return True
    name = getattr(node.target, "__name__", str(node.target))
    is_check = bool(fact.reads) and ("assert" in name or name == "_check")
    return not (fact.writes or fact.random or fact.boundary or is_check)


def remove_dead_nodes(graph: fx.Graph, facts: dict[fx.Node, NodeFacts]) -> None:
    """Erases dead nodes, last first. torch's own pass would drop `add_` without users."""
    for node in reversed(list(graph.nodes)):
        if is_dead(node, facts):
            facts.pop(node, None)
            graph.erase_node(node)


def view_chain(
    node: fx.Node, facts: Mapping[fx.Node, NodeFacts], *, is_link: Callable[[fx.Node], bool]
) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The base that a view looks at, and the view nodes from it to `node`, in order.

    A getitem on a tuple of views (`split`, `chunk`) is part of the chain. A node that is no view, or for
    which `is_link` is false (an eager view: made once, of real rows), is its own base.
    """
    chain: list[fx.Node] = []
    current = node
    memory = facts[node].storages if node in facts else frozenset()
    while True:
        fact = facts.get(current)
        if fact is None or not fact.is_view or not is_link(current):
            return current, tuple(reversed(chain))
        chain.append(current)
        # Of several operands that share the memory any one leads to it: `broadcast_tensors(x, x[:, :1])`.
        current = next(
            read for read in fact.reads if not memory.isdisjoint(map(storage_of, fakes_of([read])))
        )


def is_tuple_item(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[0].meta.get("example_value"), (tuple, list))
    )
