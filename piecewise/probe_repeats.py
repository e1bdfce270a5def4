"""Nodes that the probes need not run: alike to one that they have run, and that let no padding through.

Which rows an op reads can depend on its operands' shapes, and on integers and booleans among them: indices,
masks, lengths. It does not depend on floats, whose poison was NaN and passes through whatever another layer's
weights are. So for a deep model each op of one layer is run, and of the other layers those that are given
integers, whose memory or operands somebody writes, or that are not torch's own. A node that is left out takes
the values of the one that was run: for those who read them any real rows will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from piecewise.aliases import NodeFacts, storage_of, tensors_in

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

    def __init__(self, facts: Mapping[fx.Node, NodeFacts], kinds: Mapping[fx.Node, str]) -> None:
        self._facts, self._kinds = facts, kinds
        self._written = {
            storage_of(tensor)
            for fact in facts.values()
            for argument in fact.writes
            for tensor in tensors_in(argument.meta["example_value"])
        }
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
        are_floats = all(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in operands)
        return are_floats and not fact.opaque and self._written.isdisjoint(touched)
