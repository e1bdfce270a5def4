"""Where each node of a normalized graph runs: in a graph, as the boundary, or eagerly with a reason.

The rule that TensorRT-LLM applies by name ("after the first `index` or `cumsum` everything is eager") is
replaced by what
each op does to the token dim, read from the symbols: rows-only work stays in graphs whatever it is called.
What symbols cannot tell (a flip, a sort, a softmax over tokens keep the shape) the probes find; they come
back here as `forced`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecewise import torch_internals as internals
from piecewise.aliases import NodeFacts, is_tuple_item, storage_of, tensors_in, view_chain
from piecewise.normalize import target_name
from piecewise.torch_internals import SYMBOLIC

REASONS: Mapping[str, str] = {
    "random": "draws random numbers, which a replay would repeat",
    "host_tensor": "makes a tensor from host values",
    "reads_back": "reads a value back to the host",
    "data_dependent": "its result's size or meaning depends on data",
    "control_flow": "is control flow over nested graphs",
    "collective": "exchanges values with other ranks, which may run this call at another size [I11]",
    "cpu": "lives on the CPU while the tokens do not",
    "other_dynamic_dim": "has a dynamic dim that is not the token count",
    "consumes_token_dim": "its result has lost the token dim, so padded rows would reach it [I3]",
    "token_count_as_value": "uses the token count as a value, which the padded count would change [I3]",
    "shared_with_eager": "writes memory that an eager op or the caller also holds",
    "mixes_tokens": "padded rows or the padded count reach real rows; found by the probes [I3]",
    "not_recordable": "does something inside that a graph cannot repeat; found by the probes",
    "not_capture_safe": "is not declared capture_safe",
    "not_capturable": "this call of it cannot be captured",
    "view_for_boundary": "is a view of a tensor that graphs do not own",
}

# Ops for which a number in an argument is a size of the result. The probes check that rows keep their place.
_TAKES_SIZES = frozenset(
    "view reshape expand repeat unflatten zeros ones empty new_zeros new_ones new_empty narrow split "
    "split_with_sizes getitem arange as_strided empty_strided slice view_as expand_as broadcast_to tile "
    "chunk tensor_split".split()
)
_TAKES_SIZES_FIRST = frozenset({"full", "new_full"})
# torch.distributed's, by namespace.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
# They read a tensor's dtype and device, never its rows.
_READS_METADATA = frozenset({"new_zeros", "new_ones", "new_empty", "new_full"})


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """`kind` is "graph", "boundary", "eager" or "scalar"; an eager one has a code of `REASONS` and a
    detail, and so has a boundary op that is not in a graph where it might have been."""

    kind: str
    code: str = ""
    detail: str = ""


class Classifier:
    """Classifies the nodes of one graph; `verdicts` has one entry per call node."""

    def __init__(
        self,
        graph: fx.Graph,
        facts: Mapping[fx.Node, NodeFacts],
        *,
        symbol: sympy.Symbol,
        shape_env: ShapeEnv | None,
        device: torch.device,
        forced: Mapping[fx.Node, Verdict],
        captures_boundaries: bool = False,
    ) -> None:
        self.graph, self.facts, self.symbol, self.shape_env = graph, facts, symbol, shape_env
        self.device, self.forced, self.captures_boundaries = device, forced, captures_boundaries
        self.verdicts: dict[fx.Node, Verdict] = {}
        self._exprs: dict[int, frozenset[sympy.Symbol]] = {}

    def run(self) -> dict[fx.Node, Verdict]:
        """One verdict per call node; marks the views that are pinned, afresh each time."""
        for node in self.graph.nodes:
            node.meta.pop("pinned", None)
        for node in self.graph.nodes:
            if node.op.startswith("call"):
                self.verdicts[node] = self._verdict(node, self.facts[node])
        while self._spread_shared_writes() or self._spread_dense_copies():
            pass
        self._pin_views()
        return self.verdicts

    def symbols(self, value: Any) -> frozenset[sympy.Symbol]:
        """Free symbols of the sizes of a tensor (or of all in a tuple), or of a scalar."""
        found: set[Any] = set()
        for tensor in tensors_in(value):
            for size in tensor.shape:
                if not isinstance(size, int):
                    found |= self._free(size)
        if isinstance(value, SYMBOLIC):
            found |= self._free(value)
        return frozenset(found)

    def _free(self, scalar: Any) -> frozenset[sympy.Symbol]:
        known = self._exprs.get(id(scalar.node))
        if known is None:
            expr = internals.expression(scalar, self.shape_env)
            known = frozenset(expr.free_symbols) if expr is not None else frozenset()  # type: ignore[arg-type]
            self._exprs[id(scalar.node)] = known
        return known

    def carries_tokens(self, value: Any) -> bool:
        return any(self.symbol in self.symbols(tensor) for tensor in tensors_in(value))

    def _verdict(self, node: fx.Node, fact: NodeFacts) -> Verdict:
        value = node.meta.get("example_value")
        if fact.boundary is not None:
            return self._boundary_verdict(node, fact)
        if is_tuple_item(node):
            return self.verdicts[node.args[0]]  # type: ignore[index]
        if node in self.forced:
            return self.forced[node]
        code = self._unrecordable(node, fact, value)
        if code is None and not any(True for _ in tensors_in(value)) and not fact.writes:
            return Verdict("scalar")
        code = code or self._by_symbols(node, fact, value)
        return Verdict("eager", code, REASONS[code]) if code else Verdict("graph")

    def _boundary_verdict(self, node: fx.Node, fact: NodeFacts) -> Verdict:
        """In a graph where it is asked for and can be; what it writes beside tokens is its own affair."""
        if not self.captures_boundaries or fact.boundary is None:
            return Verdict("boundary")
        if "kept_out" in node.meta:
            return Verdict("boundary", "not_capturable", node.meta["kept_out"])
        if not fact.boundary.capture_safe:
            return Verdict("boundary", "not_capture_safe", REASONS["not_capture_safe"])
        code = self._unrecordable(node, fact, None)
        tensors = [t for argument in fact.reads for t in tensors_in(argument.meta["example_value"])]
        if code is None and self.device.type != "cpu" and any(t.device.type == "cpu" for t in tensors):
            code = "cpu"
        if code is None and any(self.symbols(tensor) - {self.symbol} for tensor in tensors):
            code = "other_dynamic_dim"
        if code is None and self._uses_count_as_value(node, ""):
            code = "token_count_as_value"
        return Verdict("boundary", code, REASONS[code]) if code else Verdict("graph")

    def _unrecordable(self, node: fx.Node, fact: NodeFacts, value: Any) -> str | None:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return "control_flow"
        if target_name(node).partition("::")[0] in _COLLECTIVES:
            return "collective"
        if fact.random:
            return "random"
        if fact.from_host:
            return "host_tensor"
        if fact.reads_back:
            return "reads_back"
        seen = set(self.symbols(value))
        for argument in node.all_input_nodes:
            seen |= self.symbols(argument.meta.get("example_value"))
        if fact.data_dependent or any(internals.is_unbacked(symbol) for symbol in seen):
            return "data_dependent"
        return None

    def _by_symbols(self, node: fx.Node, fact: NodeFacts, value: Any) -> str | None:
        tensors = [
            *tensors_in(value),
            *(t for arg in fact.reads for t in tensors_in(arg.meta["example_value"])),
        ]
        # Scalars too: a kernel takes a 0-dim CPU tensor's value when it is launched, and a graph would
        # keep it.
        if self.device.type != "cpu" and any(tensor.device.type == "cpu" for tensor in tensors):
            return "cpu"
        if any(self.symbols(tensor) - {self.symbol} for tensor in tensors):
            return "other_dynamic_dim"
        name = target_name(node).rsplit("::", 1)[-1].strip("_")
        reads_tokens = any(self.carries_tokens(argument.meta["example_value"]) for argument in fact.reads)
        written = [argument.meta["example_value"] for argument in fact.writes]
        if reads_tokens and name not in _READS_METADATA:
            results = written or [value]
            if not all(self.carries_tokens(result) for result in results):
                return "consumes_token_dim"
        if self._uses_count_as_value(node, name):
            return "token_count_as_value"
        return None

    def _uses_count_as_value(self, node: fx.Node, name: str) -> bool:
        if name in _TAKES_SIZES:
            return False
        arguments = node.args[1 + (node.op == "call_method") :] if name in _TAKES_SIZES_FIRST else node.args
        counted = False

        def look(argument: Any) -> Any:
            nonlocal counted
            value = argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
            sizes = value if isinstance(value, torch.Size) else (value,)
            counted = counted or any(
                isinstance(size, SYMBOLIC) and bool(self.symbols(size)) for size in sizes
            )
            return argument

        fx.node.map_aggregate((arguments, dict(node.kwargs)), look)
        return counted

    def _spread_shared_writes(self) -> bool:
        """A graph op that writes memory which an eager op also holds becomes eager; true if one did."""
        held = set(self._input_memory())
        for node, verdict in self.verdicts.items():
            if verdict.kind == "eager" and not self.facts[node].writes:
                held |= self.facts[node].storages
        changed = False
        for node, verdict in self.verdicts.items():
            if verdict.kind != "graph":
                continue
            touched = {
                storage_of(t)
                for arg in self.facts[node].writes
                for t in tensors_in(arg.meta["example_value"])
            }
            if touched & held:
                kind = "eager" if self.facts[node].boundary is None else "boundary"
                self.verdicts[node] = Verdict(kind, "shared_with_eager", REASONS["shared_with_eager"])
                changed = True
        return changed

    def _spread_dense_copies(self) -> bool:
        """Memory whose rows lie apart when padded reaches eager ops as dense copies. Where one of them writes
        it and another one, or another view, looks at it, it is made eagerly; true if some was found."""
        written: set[int] = set()
        looked_at: dict[int, set[fx.Node]] = {}
        for node, verdict in self.verdicts.items():
            if verdict.kind not in ("eager", "boundary"):
                continue
            written |= {
                storage_of(t)
                for arg in self.facts[node].writes
                for t in tensors_in(arg.meta["example_value"])
            }
            takers = [*self.facts[node].reads, *([node] if self.facts[node].is_view else [])]
            for taken in takers:
                for tensor in tensors_in(taken.meta["example_value"]):
                    looked_at.setdefault(storage_of(tensor), set()).add(taken)
        changed = False
        for node, verdict in self.verdicts.items():
            if verdict.kind != "graph" or self.facts[node].is_view or self.facts[node].writes:
                continue
            for tensor in tensors_in(node.meta.get("example_value")):
                memory = storage_of(tensor)
                shared = memory in written and len(looked_at.get(memory, ())) > 1
                if shared and any(
                    self.symbol in self._free(stride)
                    for stride in tensor.stride()
                    if not isinstance(stride, int)
                ):
                    self.verdicts[node] = Verdict("eager", "shared_with_eager", REASONS["shared_with_eager"])
                    changed = True
        return changed

    def _input_memory(self) -> Iterable[int]:
        for node in self.graph.find_nodes(op="placeholder"):
            if node.meta.get("is_input"):
                yield from map(storage_of, tensors_in(node.meta.get("example_value")))

    def is_floating(self, node: fx.Node) -> bool:
        """A view that each consumer makes for itself from its base, so that it never crosses a border."""
        fact = self.facts.get(node)
        return (
            fact is not None
            and fact.is_view
            and self.verdicts[node].kind == "graph"
            and not node.meta.get("pinned")
        )

    def view_chain(self, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """The tensor that a view is made of in each segment, and the views in between, in order."""
        return view_chain(node, self.facts, is_link=lambda link: self.verdicts[link].kind == "graph")

    def _pin_views(self) -> None:
        """Views that a boundary op or the caller takes are made once, where their base lives."""
        takers = [node for node, verdict in self.verdicts.items() if verdict.kind == "boundary"]
        takers.append(self.graph.output_node())
        for taker in takers:
            for argument in taker.all_input_nodes:
                if argument not in self.verdicts or not self.is_floating(argument):
                    continue
                base, _ = self.view_chain(argument)
                made_by = self.verdicts[base].kind if base in self.verdicts else "outside"
                argument.meta["pinned"] = True
                if made_by != "graph":
                    self.verdicts[argument] = Verdict(
                        "eager", "view_for_boundary", REASONS["view_for_boundary"]
                    )
