"""Nodes that the probes need not run: alike to one that they have run, and that let no padding through.

Of the ops that most of a decoder is made of (sums and products, norms, matmuls, activations, views), shapes
alone decide which rows they read: the poison was NaN, which passes through whatever another layer's weights
are. So for a deep model such an op is run in one layer, and a node like it in another takes the values of
the one that was run: for those who read them any real rows will do. Run in every layer is

* any other op, and what is given integers, or whose memory or operands somebody writes;
* what lies on the way to such an op, whose integers, checks and choices may be made of its floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecewise.aliases import NodeFacts, fakes_of, storage_of, tensors_in, written_storages

# Of a few rows, what a layer makes is some megabytes. There are more where the model is not valid for few.
MAX_BYTES = 256 << 20

# Ops that read the rows that shapes say, whatever is in them. Of others nobody has looked.
_NAMES = """
    _fused_rms_norm _reshape_alias _to_copy _unsafe_view abs add addcmul addmm alias as_strided baddbmm
    bmm broadcast_to cat chunk clone contiguous copy cos detach div empty empty_like empty_strided erf
    exp expand expand_as fill flatten full full_like gelu hardswish layer_norm leaky_relu lift_fresh
    linear log matmul mean mm movedim mul narrow native_layer_norm neg new_empty new_zeros ones
    ones_like permute pow reciprocal relu reshape rms_norm rsqrt select sigmoid silu sin size slice
    softplus split split_with_sizes sqrt square squeeze stack sub sum t tanh to transpose type_as unbind
    unflatten unsafe_split unsqueeze view view_as zero zeros zeros_like
"""
_BY_SHAPE = frozenset(f"aten::{name}" for name in _NAMES.split()) | {"prim::device"}


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
    Attributes:
        num_served: how many nodes have taken the values of others.
        is_doubtful: whether a result was NaN or infinite. There poison shows no more than anything else, and
            of another layer's values it may be made where a layer's own would give none.
    """

    def __init__(
        self, graph: fx.Graph, facts: Mapping[fx.Node, NodeFacts], kinds: Mapping[fx.Node, str]
    ) -> None:
        self._facts, self._kinds = facts, kinds
        self._deciding, decisive = _find_decisive(graph, facts)
        written = written_storages(facts.values())
        # Of these shapes alone decide which rows they read, and memory and operands stay as made.
        self._by_shape = {
            node
            for node, fact in facts.items()
            if node not in self._deciding
            and all(map(_is_float, fakes_of(fact.reads)))
            and fact.storages.isdisjoint(decisive)
            and written.isdisjoint({*fact.storages, *map(storage_of, fakes_of(fact.reads))})
        }
        given = fakes_of(node for node in graph.nodes if not node.op.startswith("call"))
        self._given = set(map(storage_of, given))
        self._proven: dict[Any, ProvenNode] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._bytes_left = MAX_BYTES
        self.num_served, self.is_doubtful = 0, False

    def like(self, node: fx.Node, key: Any) -> ProvenNode | None:
        """One that does the same as `node`, on values that cannot make a difference.

        Args:
            key: equal for nodes that do the same on tensors of the same kind.
        """
        if self.is_doubtful or node not in self._by_shape:
            return None
        known = self._proven.get(self._full(node, key))
        self.num_served += known is not None
        return known

    def add(self, node: fx.Node, key: Any, proven: ProvenNode) -> None:
        """Keeps the first of each kind, and with it the memory of its results, as far as there is room."""
        if node in self._deciding:
            return  # what it was given is its own
        self.is_doubtful |= not all(map(_is_finite, tensors_in(proven.values[0])))
        if self.is_doubtful or node not in self._by_shape:
            return
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_in(proven.values)}
        is_given = self._facts[node].storages <= self._given  # a look at weights, say
        new = {} if is_given else {at: each for at, each in storages.items() if at not in self._kept}
        num_bytes = sum(storage.nbytes() for storage in new.values())
        if num_bytes <= self._bytes_left:
            self._bytes_left -= num_bytes
            self._kept |= new
            self._proven[self._full(node, key)] = proven

    def _full(self, node: fx.Node, key: Any) -> Any:
        return key, node.meta.get("autocast", ()), *(self._kinds.get(x) for x in self._facts[node].reads)


def _find_decisive(graph: fx.Graph, facts: Mapping[fx.Node, NodeFacts]) -> tuple[set[fx.Node], set[int]]:
    """The nodes whose operands' values decide on more than values of the same rows; and the storages of what
    leads to them."""
    deciding: set[fx.Node] = set()
    decisive: set[int] = set()
    # Backwards, each node stands before all that can make its operands decisive.
    for node in reversed(graph.nodes):
        fact = facts.get(node)
        if fact is None or fact.boundary is not None:  # boundary ops are not run
            continue
        if _decides(node, fact):
            deciding.add(node)
        elif decisive.isdisjoint(fact.storages | written_storages([fact])):
            continue
        decisive |= set(map(storage_of, fakes_of(fact.reads)))
    return deciding, decisive


def _decides(node: fx.Node, fact: NodeFacts) -> bool:
    """Whether the values of its operands may decide on more than values of the same rows."""
    if fact.ops is None or fact.makes_integers or not all(name.rstrip("_") in _BY_SHAPE for name in fact.ops):
        return True
    return any(map(_is_float, fakes_of(fact.reads))) and not all(map(_is_float, fakes_of([node])))


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all())
