"""Finds the `empty*` memory that a graph must zero [I2], for the readers in docs/DESIGN.md of padded rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from piecewise.ir.effects import NodeFacts
from piecewise.ir.nodes import fakes_of, storages_of, target_name


class ZeroFills:
    """Decides for the `empty*` nodes of one graph; `found` becomes `SegmentPlan.fills`."""

    def __init__(
        self, graph: fx.Graph, facts: Mapping[fx.Node, NodeFacts], kinds: Mapping[fx.Node, str]
    ) -> None:
        self._facts = facts
        self._readers: dict[int, str] = {}
        self.found: Counter[str] = Counter()
        for node in graph.nodes:
            fact = facts.get(node)
            if fact is not None and kinds[node] == "graph" and (fact.boundary or fact.calls_op_of_others):
                # An op handles the memory that it writes itself.
                read = storages_of(argument for argument in fact.reads if argument not in fact.writes)
                why = f"{target_name(node)} reads it, which is no op of torch"
                self._readers.update(dict.fromkeys(read, why))

    def needs(self, node: fx.Node, *, segment: Sequence[fx.Node], leaving: Collection[int]) -> bool:
        """Whether an `empty*` node must start as zeros; other segments use the memories `leaving`."""
        memory = self._facts[node].storages
        facts = map(self._facts.__getitem__, segment)
        writers = [fact for fact in facts if not memory.isdisjoint(storages_of(fact.writes))]
        if memory.isdisjoint(leaving) and all(fact.boundary is None for fact in writers):
            return False  # what graphs alone write is eager's, row by row
        reason = next((self._readers[storage] for storage in memory if storage in self._readers), None)
        if not all(fake.dtype.is_floating_point for fake in fakes_of([node])):
            reason = "it holds integers, which may be indices"
        elif any(fact.boundary is None for fact in writers):
            reason = reason or "ops of its own segment write a part of it"
        self.found[reason or "needless"] += 1
        return reason is not None
