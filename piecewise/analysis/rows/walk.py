"""Follows the rows of each value through a traced graph while it is decided which node runs where.

Nodes come in order, each as what it runs as: `in_graph` (which may refuse), `eager` or `boundary`. A write
updates all views of the same memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import fx

from piecewise.analysis.rows.judge import Judge
from piecewise.analysis.rows.layout import MixReason, is_prefix, prefixes_or_none
from piecewise.analysis.rows.table import UNBOUNDED, Bounds, Rows, bounds_within, lesser
from piecewise.ir.effects import Facts, NodeFacts, Ref
from piecewise.ir.nodes import fakes_of, makes_empty, storages_of, value_of
from piecewise.ir.tensors import map_tensors, storage_of

# A node, and the position of a tensor in its value.
_Place = tuple[fx.Node, int]


class RowsWalk:
    """Walks over one graph; `largest` is the largest row count with all indices in range, None for any."""

    def __init__(self, judge: Judge, facts: Facts) -> None:
        self._judge, self._facts = judge, facts
        self._rows: dict[fx.Node, tuple[Rows, ...]] = {}
        self._origins: dict[fx.Node, fx.Node] = {}
        # Memory → its views, the maker first; then the memories that graphs own.
        self._holders: dict[int, list[_Place]] = {}
        self._in_graphs: set[int] = set()
        # Memory of integers that nobody has written yet: its padded rows start as zeros.
        self._fresh: set[int] = set()
        self.largest: int | None = None

    def rows_of(self, node: fx.Node) -> tuple[Rows, ...]:
        """Returns the rows of each tensor in the node's value; inputs and state are prefixes."""
        if node not in self._rows:
            self._note(node, self._outside(node))
        return self._rows[node]

    def is_prefix(self, node: fx.Node) -> bool:
        """Whether real rows lead in all tensors of a value, as they must where it leaves a graph."""
        return all(rows.layout is not None and is_prefix(rows.layout) for rows in self.rows_of(node))

    def origin(self, node: fx.Node) -> fx.Node:
        """Returns the node that moved the real rows of a value that is no prefix."""
        return self._origins.get(node, node)

    def in_graph(self, node: fx.Node) -> MixReason | None:
        """Runs a node in a graph, or returns why it must not be there and notes nothing."""
        fact = self._facts[node]
        if fact.recording is None:
            return MixReason("unknown_op", "nobody has looked into it")
        judged = self._judge.judge(fact.recording, self._given(fact), in_graph=True)
        if judged.mixes is not None:
            return judged.mixes
        sizes = [self._judge.sizes(fake.shape) for fake in fakes_of([node])]
        if [rows.sizes for rows in judged.results] != sizes:
            return MixReason("unknown_op", "its sizes are the example's")
        self.largest = lesser(self.largest, judged.largest)
        source = next((self.origin(read) for read in fact.reads if not self.is_prefix(read)), node)
        self._fresh -= storages_of(fact.writes)
        self._write(fact, judged.written, in_graph=True)
        self._note(node, judged.results, in_graph=True)
        self._origins[node] = source
        return None

    def eager(self, node: fx.Node) -> None:
        fact = self._facts[node]
        found = self._outside(node)
        if fact.recording is None:
            self.boundary(node, in_graph=False)
        else:
            judged = self._judge.judge(fact.recording, self._given(fact), in_graph=False)
            self._write(fact, judged.written, in_graph=False)
            if [rows.dtype for rows in judged.results] == [rows.dtype for rows in found]:
                made = zip(found, judged.results, strict=True)
                found = [own._replace(bounds=rows.bounds) for own, rows in made]
        self._note(node, found)

    def boundary(self, node: fx.Node, *, in_graph: bool) -> None:
        """Forgets what was known of the memory that a boundary op writes; the op returns nothing."""
        fact = self._facts[node]
        self._fresh -= storages_of(fact.writes)  # padding may hold anything now
        for target in fact.writes:
            for at, rows in enumerate(self.rows_of(target)):
                left = rows._replace(bounds=self._unbound(rows), is_real=rows.is_settled)
                self._change((target, at), left if in_graph else self._after_eager((target, at), left))

    def item(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        numbers = itertools.count()
        picked = map_tensors(value_of(source), lambda tensor: Ref(next(numbers)))[node.args[1]]
        places = picked if type(picked) in (tuple, list) else [picked]
        self._note(node, [self.rows_of(source)[place.position] for place in places if isinstance(place, Ref)])
        self._origins[node] = self.origin(source)

    def _given(self, fact: NodeFacts) -> tuple[Rows, ...]:
        return tuple(rows for read in fact.reads for rows in self.rows_of(read))

    def _outside(self, node: fx.Node) -> list[Rows]:
        """Returns the rows of a value from outside: graphs read a copy whose padding repeats a real row."""
        found = []
        for fake in fakes_of([node]):
            sizes = self._judge.sizes(fake.shape)
            layout = prefixes_or_none(sizes) if sizes is not None else None
            why = "its sizes do not grow with the token count alone"
            rows = Rows(sizes or (), layout, fake.dtype, why=why)
            found.append(rows._replace(bounds=self._unbound(rows)))
        return found

    def _note(self, node: fx.Node, rows: Sequence[Rows], *, in_graph: bool = False) -> None:
        self._rows[node] = tuple(rows)
        for at, fake in enumerate(fakes_of([node])):
            memory = storage_of(fake)
            holders = self._holders.setdefault(memory, [])
            if not holders and in_graph:
                self._in_graphs.add(memory)
                if makes_empty(node) and not fake.dtype.is_floating_point:
                    self._fresh.add(memory)
            holders.append((node, at))

    def _unbound(self, rows: Rows) -> Bounds:
        return bounds_within(rows.dtype, UNBOUNDED, self._judge.known)

    def _write(self, fact: NodeFacts, written: Mapping[int, Rows], *, in_graph: bool) -> None:
        places = [(read, at) for read in fact.reads for at in range(len(self.rows_of(read)))]
        for position, rows in written.items():
            self._change(places[position], rows if in_graph else self._after_eager(places[position], rows))

    def _after_eager(self, place: _Place, rows: Rows) -> Rows:
        """Returns a tensor's rows after an eager op wrote it: memory of graphs keeps its padding, other
        memory is copied for graphs with new padding."""
        before = self.rows_of(place[0])[place[1]]
        memory = self._memory_of(place)
        if memory not in self._in_graphs or before.is_settled:
            return before._replace(bounds=rows.bounds)
        zero = self._judge.known.constant(0)
        padding = Bounds(zero, zero) if memory in self._fresh else before.bounds
        low, high, permutes = rows.bounds
        if padding.low is None or padding.high is None or low is None or high is None:
            return before._replace(bounds=self._unbound(before), is_real=False)
        known = self._judge.known
        least = known.interned(np.minimum(padding.low.values, low.values))
        largest = known.interned(np.maximum(padding.high.values, high.values))
        return before._replace(bounds=Bounds(least, largest, permutes), is_real=False)

    def _memory_of(self, place: _Place) -> int:
        return storage_of(list(fakes_of([place[0]]))[place[1]])

    def _change(self, place: _Place, rows: Rows) -> None:
        for node, at in self._holders[self._memory_of(place)]:
            found = list(self._rows[node])
            left = found[at].after_write(rows.layout, self._judge.known, is_real=rows.is_real)
            found[at] = rows if (node, at) == place else left
            self._rows[node] = tuple(found)
