"""Nodes that the probes need not run: alike to one that they have run, and that let no padding through.

Which rows an op reads can depend on its operands' shapes, and on integers and booleans among them: indices,
masks, lengths. It does not depend on floats, whose poison was NaN and passes through whatever another layer's
weights are. So for a deep model each op of one layer is run, and a node like it in another layer takes the
values of the one that was run: for those who read them any real rows will do. Run in every layer is

* what is given integers, whose memory or operands somebody writes, or that is not torch's own;
* what lies on the way to values that decide something after all: to integers and booleans made of floats, to
  numbers read back, to kernels inside of which nobody can look, and to coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecewise.aliases import NodeFacts, storage_of, tensors_in
from piecewise.normalize import target_name

# Of a few rows, what a layer makes is some megabytes. There are more where the model is not valid for few.
MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ProvenNode:
    """A node that was run.

    Attributes:
        values: its result in each run, in their order.
        poisoned: whether every padded run had poison in the padded rows of its memory.
    """

    values: tuple[Any, ...]
    poisoned: bool


class ProvenNodes:
    """The nodes of one walk that agreed, by what they do.

    Args:
        kinds: what each call node runs as; changes during the walk.
    """

    def __init__(
        self, graph: fx.Graph, facts: Mapping[fx.Node, NodeFacts], kinds: Mapping[fx.Node, str]
    ) -> None:
        self._facts, self._kinds = facts, kinds
        self._written = {
            storage_of(tensor)
            for fact in facts.values()
            for argument in fact.writes
            for tensor in tensors_in(argument.meta["example_value"])
        }
        self._decisive = _find_decisive(graph, facts)
        self._proven: dict[Any, ProvenNode] = {}
        self._bytes_left = MAX_BYTES

    def like(self, node: fx.Node, key: Any) -> ProvenNode | None:
        """One that does the same as `node`, on values that cannot make a difference.

        Args:
            key: equal for nodes that do the same on tensors of the same kind.
        """
        known = self._proven.get(self._full(node, key))
        return known if known is not None and self._follows_shapes(node) else None

    def add(self, node: fx.Node, key: Any, proven: ProvenNode) -> None:
        """Keeps the first of each kind, and with it the memory of its results, as far as there is room."""
        num_bytes = 0 if self._facts[node].is_view else sum(t.nbytes for t in tensors_in(proven.values))
        if num_bytes <= self._bytes_left and self._follows_shapes(node):
            self._bytes_left -= num_bytes
            self._proven[self._full(node, key)] = proven

    def _full(self, node: fx.Node, key: Any) -> Any:
        return key, node.meta.get("autocast", ()), *(self._kinds.get(x) for x in self._facts[node].reads)

    def _follows_shapes(self, node: fx.Node) -> bool:
        """Whether shapes alone decide which rows the node reads, and its memory and operands stay as made."""
        fact = self._facts[node]
        operands = [t for source in fact.reads for t in tensors_in(source.meta["example_value"])]
        touched = {*fact.storages, *map(storage_of, operands)}
        are_floats = all(map(_is_float, operands))
        is_free = fact.storages.isdisjoint(self._decisive) and self._written.isdisjoint(touched)
        return are_floats and is_free and not _decides(node, fact)


def _find_decisive(graph: fx.Graph, facts: Mapping[fx.Node, NodeFacts]) -> set[int]:
    """Storages whose floats come to decide which rows some op reads, or whether."""
    found: set[int] = set()
    # Backwards, each node stands before all that can make its operands decisive.
    for node in reversed(graph.nodes):
        fact = facts.get(node)
        if fact is None or fact.boundary is not None:  # boundary ops are not run
            continue
        written = [t for source in fact.writes for t in tensors_in(source.meta["example_value"])]
        if _decides(node, fact) or not found.isdisjoint({*fact.storages, *map(storage_of, written)}):
            read = [t for source in fact.reads for t in tensors_in(source.meta["example_value"])]
            found |= set(map(storage_of, read))
    return found


def _decides(node: fx.Node, fact: NodeFacts) -> bool:
    """Whether the values of floats among its operands may decide on more than values of the same rows."""
    if fact.opaque or fact.reads_back or fact.data_dependent or fact.makes_integers:
        return True
    operands = [t for source in fact.reads for t in tensors_in(source.meta["example_value"])]
    made = [
        *tensors_in(node.meta.get("example_value")),
        *(t for source in fact.writes for t in tensors_in(source.meta["example_value"])),
    ]
    turns = any(map(_is_float, operands)) and not all(map(_is_float, made))
    return turns or "grid_sample" in target_name(node)


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
