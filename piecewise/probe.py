"""Runs the traced ops with poisoned padding, to find those that let a padded row or the padded count reach
a real row [I3].

Symbols show when a result loses the token dim. They do not show a flip, a sort, a softmax over tokens or a
batch norm, whose results keep the shape. So the graph is run, node by node, four times side by side: on
the real rows alone, and on padded rows that hold NaN, +1e4 and −1e4 (integers: other rows' values). After
each node the real rows must agree, bit for bit between the padded runs, which use the same kernels, and to
rounding with the unpadded one.

The first node that differs is to blame, since all that came before agreed. It is made eager on the spot,
its result is taken from the unpadded run, and the walk goes on, so that one pass finds every such node.
After a node that agrees, the padded runs are set to the unpadded result, so that rounding never piles up
along the depth of the model, and their padded rows are poisoned anew: wherever the graph is cut, whatever is
in padded rows there, real rows are safe.

Boundary ops are not called: what they write is filled with random values, poisoned where padded. Nodes
outside graphs run on real rows, on copies of whatever they write, with the random state put back
afterwards [I8].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from piecewise.aliases import is_tuple_item, node_key, storage_of, tensors_in, written_storages
from piecewise.classify import Verdict
from piecewise.positions import can_be_numbered, keeps_places, lie_alike, numbered_like
from piecewise.probe_repeats import ProvenNode, ProvenNodes
from piecewise.probe_runs import ProbeRuns
from piecewise.recordable import Recorders
from piecewise.row_agreement import difference, same_bits, surely_agree
from piecewise.row_samples import map_tensors, unchanged_random_state
from runners.errors import CaptureError
from runners.rows import narrow_to, padded_parts, poison_value

# Which tensor it is, in words; its real rows without padding, and in each padded run.
_Result = tuple[str, torch.Tensor, list[torch.Tensor]]


class Probe:
    """One walk over one graph. `run()` returns the nodes to make eager, each with what was seen.

    Args:
        runs: of that graph, none of whose nodes was run.
        runs_all: whether nodes are run that are alike to others.
    """

    def __init__(self, runs: ProbeRuns, *, runs_all: bool = False) -> None:
        self.runs, self.trace, self.facts, self.kinds = runs, runs.trace, runs.facts, runs.kinds
        graph = self.trace.graph.graph
        self.forced: dict[fx.Node, Verdict] = {}
        self.poisoned: set[fx.Node] = set()  # makers of memory whose padded rows every run has poisoned
        self._aliases = self._find_aliases()
        self._last_use = _last_uses(graph, keep=runs.written_outside, together=list(self._aliases.values()))
        self._keys: dict[fx.Node, Any] = {}
        self._proven = None if runs_all else ProvenNodes(graph, self.facts, self.kinds)
        self._places: dict[Any, bool | None] = {}
        self._recorders = Recorders(runs.device)

    def _find_aliases(self) -> dict[int, list[fx.Node]]:
        """Storage → the nodes whose result lives in it."""
        found: dict[int, list[fx.Node]] = {}
        for node in self.trace.graph.graph.nodes:
            for storage in {storage_of(t) for t in tensors_in(node.meta.get("example_value"))}:
                found.setdefault(storage, []).append(node)
        return found

    def run(self) -> dict[fx.Node, Verdict]:
        with torch.inference_mode(False), torch.no_grad(), unchanged_random_state(self.runs.device):
            self.runs.load_placeholders()
            for position, node in enumerate(self.trace.graph.graph.nodes):
                if node.op == "get_attr":
                    for run in self.runs.all:
                        run.values[node] = getattr(self.trace.graph, str(node.target))
                elif node.op.startswith("call"):
                    self._step(node)
                self._free(position)
        self._recorders.release()
        return self.forced

    @property
    def is_conclusive(self) -> bool:
        """Whether no other result is to be expected of a walk that runs all nodes."""
        return not (self.has_stood_in and self._proven is not None and self._proven.is_doubtful)

    @property
    def has_stood_in(self) -> bool:
        """Whether nodes have taken the values of others."""
        return self._proven is not None and self._proven.num_served > 0

    def _free(self, position: int) -> None:
        for node in self._last_use.get(position, ()):
            for run in self.runs.all:
                run.values.pop(node, None)
                run.padded.pop(node, None)

    def _step(self, node: fx.Node) -> None:
        kind = self.kinds[node]
        if kind == "scalar":
            return
        if self.facts[node].boundary is not None:  # in a graph or not
            self._fill_written(node)
            return
        proven = self._proven if kind == "graph" else None
        if proven is not None and (known := proven.like(node, self._key_of(node))) is not None:
            self._stand_in(node, known)
            return
        if kind == "graph" and (refused := self._refused_recording(node)) is not None:
            self.forced[node] = Verdict("eager", "not_recordable", refused)
            self.kinds[node] = kind = "eager"
        if kind == "graph":
            saved = self.runs.save_written(node)
            self.runs.execute(node, self.runs.real, self.runs.rows)
            seen = self._run_padded(node)
            if seen is None:
                self._poison_memory(node)
                if proven is not None:
                    values = tuple(run.values[node] for run in self.runs.all)
                    proven.add(node, self._key_of(node), ProvenNode(values, node in self.poisoned))
                return
            self.forced[node] = Verdict("eager", "mixes_tokens", seen)
            self.kinds[node] = "eager"
            self.runs.restore_written(saved)
            for run in self.runs.padded:
                run.values.pop(node, None)
        else:
            self.runs.execute(node, self.runs.real, self.runs.rows)
        self._follow_real(node)

    def _stand_in(self, node: fx.Node, known: ProvenNode) -> None:
        for run, value in zip(self.runs.all, known.values, strict=True):
            run.values[node] = value
        if known.poisoned:
            self.poisoned.add(node)

    def _refused_recording(self, node: fx.Node) -> str | None:
        """Why the node cannot be recorded, or None; asked once per op and kind of operands."""
        copies: dict[int, torch.Tensor] = {}

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return copies.setdefault(id(tensor), tensor.clone()) if self.facts[node].writes else tensor

        def call() -> Any:
            operands = self.runs.operands(node, self.runs.real, self.runs.rows, padded=False)
            return self.runs.call(node, *map_tensors(operands, own))

        return self._recorders.refusal_of(call, key=self._key_of(node), name=node.name)

    def _run_padded(self, node: fx.Node) -> str | None:
        """Runs the node in each padded run; what differs, or None."""
        for run in self.runs.padded:
            try:
                self.runs.execute(node, run, self.runs.padded_rows)
            except (RuntimeError, IndexError, ValueError) as error:
                return f"fails on padded rows: {str(error).splitlines()[0]}"
        is_view = self.facts[node].is_view and not is_tuple_item(node)
        geometry = self._geometry_of(node) if is_view else None
        if self._places.get(geometry):
            return None  # it shows elements that agree, and the same ones
        results = list(self._results(node))
        if not same_bits((real, padded) for _, real, padded in results):
            if not surely_agree((real, padded) for _, real, padded in results):
                for what, real, padded in results:
                    seen = difference(real, padded)
                    if seen is not None:
                        return f"{what}{seen}"
            self._agree(node, results)
        if is_view:
            if geometry not in self._places:
                self._places[geometry] = self._compare_places(node)
            if self._places[geometry] is False:
                return "looks at other memory when rows are padded"
        return None

    def _key_of(self, node: fx.Node) -> Any:
        """Equal for nodes that do the same on tensors of the same kind."""
        if node not in self._keys:
            self._keys[node] = node_key(node)
        return self._keys[node]

    def _geometry_of(self, node: fx.Node) -> Any:
        """Equal for views that look at the same elements of what they read, in each run."""
        padded = self.runs.padded[0]
        bases = [
            (tensor.shape, tensor.stride(), tensor.storage_offset())
            for source in self.facts[node].reads
            for value in (self.runs.real.values[source], self.runs.value_in(source, padded, padded=True))
            for tensor in tensors_in(value)
        ]
        return self._key_of(node), tuple(bases)

    def _compare_places(self, node: fx.Node) -> bool | None:
        """Whether a view's real rows lie where they lie without padding; None where that cannot be told."""
        run = self.runs.padded[0]
        bases = [
            tensor
            for source in self.facts[node].reads
            for tensor in tensors_in(self.runs.real.values[source])
        ]
        held = {
            id(padded): real.shape
            for source in self.facts[node].reads
            for real, padded in zip(
                tensors_in(self.runs.real.values[source]),
                tensors_in(self.runs.value_in(source, run, padded=True)),
                strict=True,
            )
        }
        made = list(tensors_in(self.runs.real.values[node]))
        if not any(
            extent.carries_tokens
            for source in self.facts[node].reads
            for extent in self.runs.extents.of(source)
        ):
            return all(map(lie_alike, made, tensors_in(run.values[node])))
        if not all(can_be_numbered(tensor) and tensor.dtype == made[0].dtype for tensor in bases):
            return None
        real_args = map_tensors(
            self.runs.operands(node, self.runs.real, self.runs.rows, padded=False),
            lambda t: numbered_like(t, t.shape),
        )
        padded_args = map_tensors(
            self.runs.operands(node, run, self.runs.padded_rows, padded=True),
            lambda t: numbered_like(t, held[id(t)]),
        )
        return keeps_places(
            list(tensors_in(self.runs.call(node, *real_args))),
            list(tensors_in(self.runs.call(node, *padded_args))),
        )

    def _results(self, node: fx.Node) -> Iterator[_Result]:
        """Each tensor that the node makes, and all that share memory with what it writes: the real one, and
        the leading part of the padded ones."""
        written = written_storages([self.facts[node]])
        groups = [("", node)] + [
            (f"what it writes into '{alias.name}': ", alias)
            for storage in written
            for alias in self._aliases[storage]
            if alias in self.runs.real.values and alias is not node
        ]
        for what, source in groups:
            reals = list(tensors_in(self.runs.real.values.get(source)))
            padded = [
                list(tensors_in(self.runs.value_in(source, run, padded=False))) for run in self.runs.padded
            ]
            for index, (extent, real) in enumerate(zip(self.runs.extents.of(source), reals, strict=True)):
                if extent.real is not None:
                    yield what, real, [tensors[index] for tensors in padded]

    def _agree(self, node: fx.Node, results: Sequence[_Result]) -> None:
        """Sets the padded runs' real rows to the unpadded result, where the memory is the node's own."""
        if self.facts[node].is_view:
            return
        for _, real, padded in results:
            for tensor in filter(can_be_numbered, padded):
                tensor.copy_(real)

    def _poison_memory(self, node: fx.Node) -> None:
        """Poisons the padded rows of memory that graphs own and that the node has just made or written."""
        if self.facts[node].is_view:
            return
        for memory in written_storages([self.facts[node]]) | self.facts[node].storages:
            owner = self._aliases[memory][0]
            if (
                self.kinds.get(owner) != "graph"
                or self.facts[owner].is_view
                or owner not in self.runs.real.values
            ):
                continue
            for position, extent in enumerate(self.runs.extents.of(owner)):
                if extent.memory != memory or extent.real is None or not extent.is_floating:
                    continue
                for run in self.runs.padded:
                    tensor = list(tensors_in(run.values[owner]))[position]
                    for part in padded_parts(tensor, extent.real) if can_be_numbered(tensor) else ():
                        part.fill_(poison_value(tensor.dtype, run.poison or 0))
                        self.poisoned.add(owner)

    def _follow_real(self, node: fx.Node) -> None:
        """An eager node in the padded runs: run again where it looks at or writes their memory, else
        copied."""
        fact = self.facts[node]
        for target in fact.writes:
            self.runs.forget_padded(target)
        # A view of rows that lie apart when padded is made of a dense copy at run time, too.
        is_view = fact.is_view and all(
            extent.keeps_strides for source in fact.reads for extent in self.runs.extents.of(source)
        )
        for run in self.runs.padded:
            if is_view or fact.writes:
                self.runs.execute(node, run, self.runs.rows)
            else:
                value = self.runs.real.values[node]
                run.values[node] = map_tensors(value, torch.clone)

    def _fill_written(self, node: fx.Node) -> None:
        """Stands in for a boundary op: what it writes holds random values, and poison where padded."""
        outside = {  # the model's and the caller's own tensors: KV pools, never touched here
            p.node
            for p in self.trace.placeholders
            if p.kind == "state" or not self.runs.sizes.token_dims_of(p.node.meta.get("example_value"))
        }
        for target in self.facts[node].writes:
            fake = target.meta["example_value"]
            if target in outside or not isinstance(fake, torch.Tensor) or target not in self.runs.real.values:
                continue
            real = self.runs.real.values[target]
            if real.dtype.is_floating_point:
                noise = torch.randn(tuple(real.shape), generator=self.runs.generator).to(
                    real.device, real.dtype
                )
                real.copy_(noise)
            else:
                real.zero_()
            self.runs.forget_padded(target)
            for run in self.runs.padded:
                tensor = run.values[target]
                leading = narrow_to(tensor, real.shape)
                for part in padded_parts(tensor, real.shape):
                    part.fill_(
                        poison_value(tensor.dtype, run.poison or 0) if real.dtype.is_floating_point else 0
                    )
                leading.copy_(real)


def _last_uses(
    graph: fx.Graph, *, keep: frozenset[fx.Node], together: Sequence[Sequence[fx.Node]]
) -> dict[int, list[fx.Node]]:
    """Position → nodes that nobody reads after it; the next call reads `keep`. Nodes that share memory go
    together."""
    position_of: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.nodes):
        for argument in node.all_input_nodes:
            if argument not in keep:
                position_of[argument] = position
    for group in together:
        last = max((position_of[node] for node in group if node in position_of), default=0)
        position_of.update({node: last for node in group if node in position_of})
    found: dict[int, list[fx.Node]] = {}
    for node, position in position_of.items():
        found.setdefault(position, []).append(node)
    return found


def report_strictly(node: fx.Node, seen: str, where: str, path: str) -> CaptureError:
    """The error of `strict`: which op mixes tokens, and where the user wrote it."""
    return CaptureError(
        f"op '{node.name}' in {path or 'forward'} ({where}) {seen}",
        rule="no padded row reaches a real row, and nothing depends on the padded count [I3]",
        fix="rewrite it row by row, move it behind a boundary op, or drop strict=True to run it eagerly",
    )
