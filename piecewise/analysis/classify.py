"""Decides where each node of a normalized graph runs: in a CUDA graph, as a boundary op, or eagerly.

The verdict follows from what the op does to token rows, never from its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from piecewise import torch_api
from piecewise.analysis.rows.judge import Judge
from piecewise.analysis.rows.walk import RowsWalk
from piecewise.analysis.token_dim import TokenSymbol
from piecewise.ir.effects import Facts, NodeFacts, written_storages
from piecewise.ir.nodes import fakes_of, has_fakes, is_call, is_tuple_item, storages_of, target_name, value_of
from piecewise.ir.tensors import storage_of, tensors_in
from piecewise.trace.trace import Trace

REASONS: Mapping[str, str] = {
    "random": "draws random numbers, which a replay would repeat",
    "host_tensor": "makes a tensor from host values",
    "reads_back": "reads a value back to the host",
    "data_dependent": "its result's size or meaning depends on data",
    "control_flow": "is control flow over nested graphs",
    "collective": "exchanges values with other ranks, which may run this call at another size",
    "cpu": "lives on the CPU while the tokens do not",
    "other_dynamic_dim": "has a dynamic dim that is not the token count",
    "consumes_token_dim": "its result is made of all token rows, padded ones included",
    "token_count_as_value": "uses the token count as a value, which the padded count would change",
    "shared_with_eager": "writes memory that an eager op or the caller also holds",
    "mixes_tokens": "padded rows would reach real rows",
    "unknown_op": "nobody has said how token rows go through it",
    "not_recordable": "does something inside that a graph cannot repeat",
    "not_capture_safe": "is not declared capture_safe",
    "not_capturable": "this call of it cannot be captured",
    "view_for_boundary": "is a view of a tensor that graphs do not own",
}

# Namespaces of torch.distributed's ops.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})


class Verdict(NamedTuple):
    """Holds where a node runs: "graph", "boundary", "eager" or "scalar". An eager node, and a boundary op
    that might have been in a graph, also has a code of `REASONS` and a detail."""

    kind: str
    code: str = ""
    detail: str = ""

    @classmethod
    def of(cls, code: str, kind: str = "eager", detail: str = "") -> Verdict:
        """Makes the verdict for a code of `REASONS`; `detail` is appended to its text."""
        return cls(kind, code, ": ".join(filter(None, (REASONS[code], detail))))


Verdicts = dict[fx.Node, Verdict]


def kind_outside(fact: NodeFacts) -> str:
    return "eager" if fact.boundary is None else "boundary"


class Classifier:
    """Classifies the nodes of one graph; `rows` holds what is known of each value's rows."""

    def __init__(
        self, trace: Trace, facts: Facts, token: TokenSymbol, judge: Judge, forced: Verdicts, captures: bool
    ) -> None:
        self.trace, self.facts, self.token, self.judge = trace, facts, token, judge
        self.graph, self.captures_boundaries = trace.graph.graph, captures
        self.verdicts: Verdicts = {}
        self.rows = RowsWalk(judge, facts)
        self._device: torch.device = trace.example.leaves[token.anchor[0]].device
        self._forced = dict(forced)

    def run(self) -> Verdicts:
        """Returns one verdict per call node, and marks pinned views in `node.meta["pinned"]`."""
        while True:
            self.rows = RowsWalk(self.judge, self.facts)
            for node in self.graph.nodes:
                node.meta.pop("pinned", None)
                if is_call(node):
                    self.verdicts[node] = self._verdict(node, self.facts[node])
            found = self._shared_writes() or self._shared_copies() or self._pinned_views() or self._borders()
            if not found:
                return self.verdicts
            # An item of a tuple is made where the tuple is.
            self._forced |= {
                node.args[0] if is_tuple_item(node) else node: verdict  # type: ignore[misc]
                for node, verdict in found.items()
            }

    def _varies(self, size: Any) -> bool:
        """Whether a size or stride is not a constant: it follows the token count or another symbol."""
        known = self.judge.known.of(size)
        return known is None or known.constant is None

    def _verdict(self, node: fx.Node, fact: NodeFacts) -> Verdict:
        if fact.boundary is not None:
            found = self._forced.get(node) or self._boundary_verdict(node, fact)
            self.rows.boundary(node, in_graph=found.kind == "graph")
            return found
        if is_tuple_item(node):
            self.rows.item(node)
            return self.verdicts[node.args[0]]  # type: ignore[index]
        if (verdict := self._forced.get(node)) is None:
            code = self._unrecordable(node, fact, value_of(node))
            is_checked = fact.recording is not None and bool(fact.recording.calls)
            if not (code or fact.writes or is_checked or has_fakes(node)):
                return Verdict("scalar")  # it neither makes nor changes a tensor
            code = code or self._by_symbols(fact, value_of(node))
            verdict = Verdict.of(code) if code else self._by_rows(node, fact)
        if verdict.kind != "graph":
            self.rows.eager(node)
        return verdict

    def _by_rows(self, node: fx.Node, fact: NodeFacts) -> Verdict:
        if (mixes := self.rows.in_graph(node)) is None:
            return Verdict("graph")
        if mixes.code == "unknown_op":
            return Verdict("eager", *mixes)
        made = fact.writes or [node]
        reads, makes = (
            any(self._varies(size) for fake in fakes_of(nodes) for size in fake.shape)
            for nodes in (fact.reads, made)
        )
        is_gone = mixes.code == "mixes_tokens" and reads and not makes
        return Verdict.of("consumes_token_dim" if is_gone else mixes.code, detail=mixes.detail)

    def _boundary_verdict(self, node: fx.Node, fact: NodeFacts) -> Verdict:
        """Returns "graph" where capturing was asked for and is possible; the op may write any state."""
        if not self.captures_boundaries or fact.boundary is None:
            return Verdict("boundary")
        if "kept_out" in node.meta:
            return Verdict("boundary", "not_capturable", node.meta["kept_out"])
        code = "" if fact.boundary.capture_safe else "not_capture_safe"
        code = code or self._unrecordable(node, fact, None) or self._by_symbols(fact, None)
        if not code and self._uses_count(node):
            code = "token_count_as_value"
        if not code and not all(map(self.rows.is_prefix, fact.reads)):
            code = "mixes_tokens"
        return Verdict.of(code, "boundary") if code else Verdict("graph")

    def _unrecordable(self, node: fx.Node, fact: NodeFacts, value: Any) -> str:
        if target_name(node).partition("::")[0] in _COLLECTIVES:
            return "collective"
        values = [value, *map(value_of, node.all_input_nodes)]
        sizes = [*values, *(size for tensor in tensors_in(values) for size in tensor.shape)]
        # Simplifying is slow, and few expressions have such a symbol.
        numbers = [size for size in sizes if isinstance(size, torch_api.SYMBOLIC)]
        by_data = [number for number in numbers if torch_api.is_unbacked(number.node.expr)]
        left = torch_api.free_symbols(by_data, self.trace.shape_env)
        return fact.unrecordable or ("data_dependent" if any(map(torch_api.is_unbacked, left)) else "")

    def _by_symbols(self, fact: NodeFacts, value: Any) -> str:
        tensors = [*tensors_in(value), *fakes_of(fact.reads)]
        # 0-dim tensors too: kernels take a CPU scalar's value at launch, and a graph would keep it.
        if self._device.type != "cpu" and any(tensor.device.type == "cpu" for tensor in tensors):
            return "cpu"
        is_other = any(self.judge.sizes(tensor.shape) is None for tensor in tensors)
        return "other_dynamic_dim" if is_other else ""

    def _uses_count(self, node: fx.Node) -> bool:
        leaves: list[Any] = []
        fx.node.map_aggregate((node.args, dict(node.kwargs)), leaves.append)
        values = [value_of(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        sizes = [size for value in values for size in (value if isinstance(value, torch.Size) else (value,))]
        numbers = [size for size in sizes if isinstance(size, torch_api.SYMBOLIC)]
        return bool(torch_api.free_symbols(numbers, self.trace.shape_env))

    def _shared_writes(self) -> Verdicts:
        """Finds graph ops that write memory which an eager op also holds; these ops become eager."""
        held = storages_of(each.node for each in self.trace.placeholders if each.kind == "input")
        for node, verdict in self.verdicts.items():
            if verdict.kind == "eager" and not self.facts[node].writes:
                held |= self.facts[node].storages
        return {
            node: Verdict.of("shared_with_eager", kind_outside(self.facts[node]))
            for node, verdict in self.verdicts.items()
            if verdict.kind == "graph" and written_storages([self.facts[node]]) & held
        }

    def _shared_copies(self) -> Verdicts:
        """Finds values with padding between their rows, of which eager ops get separate dense copies: such a
        value is made eagerly where an eager op writes its memory and another op, or view, reads it."""
        written: set[int] = set()
        viewed: dict[int, set[fx.Node]] = {}
        for node, verdict in self.verdicts.items():
            fact = self.facts[node]
            if verdict.kind in ("eager", "boundary"):
                written |= written_storages([fact])
                for taken in (*fact.reads, *([node] if fact.is_view else [])):
                    for memory in storages_of([taken]):
                        viewed.setdefault(memory, set()).add(taken)
        shared = {memory for memory in written if len(viewed.get(memory, ())) > 1}
        return {
            node: Verdict.of("shared_with_eager")
            for node, verdict in self.verdicts.items()
            if verdict.kind == "graph" and not (self.facts[node].is_view or self.facts[node].writes)
            for tensor in fakes_of([node])
            if storage_of(tensor) in shared and any(map(self._varies, tensor.stride()))
        }

    def is_floating(self, node: fx.Node) -> bool:
        """Whether a node is a view that each consumer makes for itself: it crosses no segment border."""
        is_pinned = bool(node.meta.get("pinned"))
        return self._is_in_graph(node) and self.facts[node].is_view and not is_pinned

    def view_chain(self, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """Returns the base from which each segment makes a view, and the views from the base on, in order. A
        getitem on a tuple of views (`split`, `chunk`) counts as a view. An eager view is made once, of real
        rows, and is its own base, as is any node that is no view."""
        chain: list[fx.Node] = []
        memory = self.facts[node].storages if node in self.facts else frozenset()
        while self._is_in_graph(node) and self.facts[node].is_view:
            chain.append(node)
            # Any operand that shares the memory leads to the base: `broadcast_tensors(x, x[:, :1])`.
            reads = self.facts[node].reads
            node = next(read for read in reads if not memory.isdisjoint(storages_of([read])))
        return node, tuple(reversed(chain))

    def _taken_by(self, *kinds: str) -> Iterable[fx.Node]:
        takers = [node for node, verdict in self.verdicts.items() if verdict.kind in kinds]
        taken = (taken for taker in (*takers, self.graph.output_node()) for taken in taker.all_input_nodes)
        return dict.fromkeys(node for node in taken if node in self.verdicts)

    def _is_in_graph(self, node: fx.Node) -> bool:
        return node in self.verdicts and self.verdicts[node].kind == "graph"

    def _pinned_views(self) -> Verdicts:
        """Pins views that a boundary op or the caller takes: each is made once, beside its base, and so
        eagerly where graphs do not own that base."""
        found = {}
        for taken in filter(self.is_floating, self._taken_by("boundary")):
            base, _ = self.view_chain(taken)
            taken.meta["pinned"] = True
            if not self._is_in_graph(base):
                found[taken] = Verdict.of("view_for_boundary")
        return found

    def _borders(self) -> Verdicts:
        """Finds values that leave a graph though real rows do not lead; their origin runs eagerly [I1]."""
        verdict = Verdict.of("mixes_tokens", detail="its real rows do not lead where it leaves the graph")
        found = {}
        for taken in self._taken_by("eager", "boundary"):
            base = self.view_chain(taken)[0] if self.is_floating(taken) else taken
            if self._is_in_graph(base) and self.facts[base].storages and not self.rows.is_prefix(base):
                found[self.rows.origin(base)] = verdict
        return found
