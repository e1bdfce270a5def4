"""Which memory of `empty*` a graph fills with zeros: what others write, unless its padding is proven inert.

    before   out = empty in graph 0   | attn writes its real rows   | o_proj(out) in graph 2 reads all rows
    filled   out = zeros              | ...                         | padded rows are zero [I2]
    inert    out = empty              | ...                         | padded rows are anything [I3]

Real rows need no fill: eager's `empty` holds garbage too, wherever nobody writes. Padded rows need none where
the probes have run the graph with poison in the padded rows of just this memory, and found that it stays
there. Garbage takes more values than the poison, though. An index made of one may be out of range, which ends
all use of a CUDA device, and a kernel that nobody can look into may make one. So memory whose padded rows can
come to an integer or to such a kernel is filled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from piecewise.aliases import NodeFacts, storage_of, tensors_in
from piecewise.normalize import target_name
from piecewise.plan import KeptFill


def makes_empty(node: fx.Node) -> bool:
    """Whether the node allocates memory without writing it."""
    return target_name(node).startswith(("empty", "new_empty"))


class ZeroFills:
    """Decides for the `empty*` nodes of one graph.

    Args:
        kinds: what each call node runs as, such as "graph".
        inert: nodes in whose memory the probes had poison in the padded rows, in a walk without a finding.
    """

    def __init__(
        self,
        graph: fx.Graph,
        facts: Mapping[fx.Node, NodeFacts],
        kinds: Mapping[fx.Node, str],
        inert: Collection[fx.Node],
    ) -> None:
        self.facts, self.kinds, self.inert = facts, kinds, inert
        self._culprits = self._find_culprits(graph)
        self.num_needless = 0
        self.kept: list[KeptFill] = []

    def _find_culprits(self, graph: fx.Graph) -> dict[int, str]:
        """Storage → the op by which its padded rows could become an integer, or nobody knows what."""
        found: dict[int, str] = {}
        # Backwards, each node stands before all that can make its operands a danger.
        for node in reversed(graph.nodes):
            fact = self.facts.get(node)
            # Others are given real rows.
            if fact is None or self.kinds[node] != "graph" or fact.boundary is not None:
                continue
            told = ""
            if fact.makes_integers:
                told = f"integers are made of it by {target_name(node)}"
            elif fact.opaque:
                told = f"{target_name(node)} reads it, which is no op of torch"
            else:
                into = fact.storages.union(*map(_storages, fact.writes))
                told = next((found[storage] for storage in into if storage in found), "")
            if told:
                for argument in fact.reads:
                    found.update(dict.fromkeys(_storages(argument) - found.keys(), told))
        return found

    def needs(self, node: fx.Node, *, segment: Sequence[fx.Node], leaving: Collection[int]) -> bool:
        """Whether the `empty*` node of a graph segment is to start as zeros; counted for the report.

        Args:
            segment: the nodes of its segment.
            leaving: memory that is read or written outside of it.
        """
        memory = self.facts[node].storages
        writers = [
            other for other in segment if any(memory & _storages(arg) for arg in self.facts[other].writes)
        ]
        if not memory & set(leaving) and all(self.facts[other].boundary is None for other in writers):
            return False  # what graphs alone write is eager's, row by row
        reason = self._reason(node, writers)
        if reason is None:
            self.num_needless += 1
            return False
        self.kept.append(KeptFill(node.name, reason))
        return True

    def _reason(self, node: fx.Node, writers: Sequence[fx.Node]) -> str | None:
        """Why the fill stays."""
        fakes = list(tensors_in(node.meta["example_value"]))
        if not all(fake.dtype.is_floating_point for fake in fakes):
            return "it holds integers, which may be indices"
        if node not in self.inert:
            return "no probe has had poison in its padded rows"
        if any(self.facts[other].boundary is None for other in writers):
            return "ops of its own segment write into it"
        return next((told for fake in fakes if (told := self._culprits.get(storage_of(fake)))), None)


def _storages(node: fx.Node) -> frozenset[int]:
    return frozenset(storage_of(tensor) for tensor in tensors_in(node.meta.get("example_value")))
