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

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from piecewise import torch_internals as internals
from piecewise.aliases import NodeFacts, is_tuple_item, node_key, storage_of, tensors_in
from piecewise.classify import Verdict
from piecewise.index_bounds import CheckedIndices
from piecewise.positions import can_be_numbered, keeps_places, lie_alike, numbered_like, random_where_constant
from piecewise.probe_extents import Extent, Extents, map_with
from piecewise.probe_repeats import ProvenNode, ProvenNodes
from piecewise.recordable import Recorders
from piecewise.row_agreement import difference, same_bits, surely_agree
from piecewise.row_samples import map_tensors, resize_leaf, unchanged_random_state, with_padding
from piecewise.sizes import SizeFunctions
from piecewise.token_dim import TokenSymbol
from piecewise.torch_internals import SYMBOLIC
from piecewise.trace import Trace
from piecewise.zero_fills import makes_empty
from runners.errors import CaptureError
from runners.rows import narrow_to, padded_parts, poison_value

NUM_POISONS = 3


# Which tensor it is, in words; its real rows without padding, and in each padded run.
_Result = tuple[str, torch.Tensor, list[torch.Tensor]]


@dataclasses.dataclass(slots=True)
class _Run:
    """One of the runs: `poison` is None for the unpadded one. `padded` holds padded copies of eager
    results."""

    rows: int
    poison: int | None
    values: dict[fx.Node, Any] = dataclasses.field(default_factory=dict)
    padded: dict[fx.Node, Any] = dataclasses.field(default_factory=dict)


class Probe:
    """One walk over one graph. `run()` returns the nodes to make eager, each with what was seen."""

    def __init__(
        self,
        trace: Trace,
        facts: Mapping[fx.Node, NodeFacts],
        token: TokenSymbol,
        verdicts: Mapping[fx.Node, Verdict],
        *,
        num_tokens: int,
        padded_num_tokens: int,
    ) -> None:
        self.trace, self.facts, self.token = trace, facts, token
        self.kinds = {node: verdict.kind for node, verdict in verdicts.items()}
        self.rows, self.padded_rows = num_tokens, padded_num_tokens
        self.sizes = SizeFunctions(trace.shape_env, token.symbol)
        self.extents = Extents(self.sizes, num_tokens=num_tokens, padded_num_tokens=padded_num_tokens)
        self.real = _Run(num_tokens, None)
        self.runs = [_Run(padded_num_tokens, variant) for variant in range(NUM_POISONS)]
        self.forced: dict[fx.Node, Verdict] = {}
        self.poisoned: set[fx.Node] = set()  # makers of memory whose padded rows every run has poisoned
        self.others: dict[Any, int] = {}
        self._written_outside = self._find_written_outside()
        self._aliases = self._find_aliases()
        self._last_use = _last_uses(
            trace.graph.graph, keep=self._written_outside, together=list(self._aliases.values())
        )
        self._keys: dict[fx.Node, Any] = {}
        self._proven = ProvenNodes(facts, self.kinds)
        self._places: dict[Any, bool | None] = {}
        self._generator = torch.Generator().manual_seed(0)
        self._scalar_functions: dict[Any, Callable[..., tuple]] = {}
        self._device = trace.example.leaves[token.anchor[0]].device
        self._recorders = Recorders(self._device)

    def _find_written_outside(self) -> frozenset[fx.Node]:
        """Placeholders whose memory some op writes; boundary ops are not called here."""
        written = {
            storage_of(tensor)
            for fact in self.facts.values()
            if fact.boundary is None
            for argument in fact.writes
            for tensor in tensors_in(argument.meta["example_value"])
        }
        return frozenset(
            placeholder.node
            for placeholder in self.trace.placeholders
            if any(storage_of(t) in written for t in tensors_in(placeholder.node.meta.get("example_value")))
        )

    def _find_aliases(self) -> dict[int, list[fx.Node]]:
        """Storage → the nodes whose result lives in it."""
        found: dict[int, list[fx.Node]] = {}
        for node in self.trace.graph.graph.nodes:
            for storage in {storage_of(t) for t in tensors_in(node.meta.get("example_value"))}:
                found.setdefault(storage, []).append(node)
        return found

    def run(self) -> dict[fx.Node, Verdict]:
        with torch.inference_mode(False), torch.no_grad(), unchanged_random_state(self._device):
            self._load_placeholders()
            for position, node in enumerate(self.trace.graph.graph.nodes):
                if node.op == "get_attr":
                    for run in (self.real, *self.runs):
                        run.values[node] = getattr(self.trace.graph, str(node.target))
                elif node.op.startswith("call"):
                    self._step(node)
                self._free(position)
        self._recorders.release()
        return self.forced

    def _free(self, position: int) -> None:
        for node in self._last_use.get(position, ()):
            for run in (self.real, *self.runs):
                run.values.pop(node, None)
                run.padded.pop(node, None)

    def _load_placeholders(self) -> None:
        for (leaf, dim), expr in internals.symbolic_sizes(self.trace.shape_env).items():
            value = self.trace.example.leaves[leaf]
            self._note_symbol(expr, value if dim < 0 else value.shape[dim])
        read = {arg for node, fact in self.facts.items() if fact.boundary is None for arg in fact.reads}
        for placeholder in self.trace.placeholders:
            node, fake = placeholder.node, placeholder.node.meta.get("example_value")
            if placeholder.kind == "symbol" or not isinstance(fake, torch.Tensor):
                if placeholder.kind == "input":
                    self._note_symbol(fake, self.trace.example.leaves[placeholder.leaf])
                continue
            value = (
                placeholder.state.get()
                if placeholder.state is not None
                else self.trace.example.leaves[placeholder.leaf]
            )
            for size, actual in zip(fake.shape, value.shape, strict=True):
                self._note_symbol(size, actual)
            dims = self.sizes.token_dims(fake) if placeholder.kind == "input" else ()
            function = self.sizes.of(fake.shape)
            if placeholder.kind == "state" and node in read:
                value = random_where_constant(value.detach(), self._generator)
            for run in (self.real, *self.runs):
                if dims and function is not None:
                    run.values[node] = self._input_rows(value, function, run)
                else:
                    run.values[node] = (
                        value.detach().clone() if node in self._written_outside else value.detach()
                    )

    def _note_symbol(self, size: Any, actual: int) -> None:
        is_expression = isinstance(size, sympy.Basic)
        expr = size if is_expression else internals.expression(size, self.trace.shape_env)
        if expr is not None and expr.is_Symbol and expr != self.token.symbol:
            self.others[expr] = actual

    def _input_rows(
        self, value: torch.Tensor, function: Callable[[int], tuple[int, ...]], run: _Run
    ) -> torch.Tensor:
        rows = resize_leaf(value.detach(), function(self.rows)).clone()
        if run.poison is None:
            return rows
        return with_padding(rows, function(self.padded_rows), None, run.poison)

    def _step(self, node: fx.Node) -> None:
        kind = self.kinds[node]
        if kind == "scalar":
            return
        if self.facts[node].boundary is not None:  # in a graph or not
            self._fill_written(node)
            return
        if kind == "graph" and (known := self._proven.like(node, self._key_of(node))) is not None:
            self._stand_in(node, known)
            return
        if kind == "graph" and (refused := self._refused_recording(node)) is not None:
            self.forced[node] = Verdict("eager", "not_recordable", refused)
            self.kinds[node] = kind = "eager"
        if kind == "graph":
            saved = self._save_written(node)
            self._execute(node, self.real, self.rows)
            seen = self._run_padded(node)
            if seen is None:
                self._poison_memory(node)
                values = tuple(run.values[node] for run in (self.real, *self.runs))
                self._proven.add(node, self._key_of(node), ProvenNode(values, node in self.poisoned))
                return
            self.forced[node] = Verdict("eager", "mixes_tokens", seen)
            self.kinds[node] = "eager"
            self._restore_written(saved)
            for run in self.runs:
                run.values.pop(node, None)
        else:
            self._execute(node, self.real, self.rows)
        self._follow_real(node)

    def _stand_in(self, node: fx.Node, known: ProvenNode) -> None:
        for run, value in zip((self.real, *self.runs), known.values, strict=True):
            run.values[node] = value
        if known.poisoned:
            self.poisoned.add(node)

    def _refused_recording(self, node: fx.Node) -> str | None:
        """Why the node cannot be recorded, or None; asked once per op and kind of operands."""
        copies: dict[int, torch.Tensor] = {}

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return copies.setdefault(id(tensor), tensor.clone()) if self.facts[node].writes else tensor

        def call() -> Any:
            operands = self._operands(node, self.real, self.rows, padded=False)
            return self._call(node, *map_tensors(operands, own))

        return self._recorders.refusal_of(call, key=self._key_of(node), name=node.name)

    def _run_padded(self, node: fx.Node) -> str | None:
        """Runs the node in each padded run; what differs, or None."""
        for run in self.runs:
            try:
                self._execute(node, run, self.padded_rows)
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
        padded = self.runs[0]
        bases = [
            (tensor.shape, tensor.stride(), tensor.storage_offset())
            for source in self.facts[node].reads
            for value in (self.real.values[source], self._value_in(source, padded, padded=True))
            for tensor in tensors_in(value)
        ]
        return self._key_of(node), tuple(bases)

    def _compare_places(self, node: fx.Node) -> bool | None:
        """Whether a view's real rows lie where they lie without padding; None where that cannot be told."""
        run = self.runs[0]
        bases = [
            tensor for source in self.facts[node].reads for tensor in tensors_in(self.real.values[source])
        ]
        held = {
            id(padded): real.shape
            for source in self.facts[node].reads
            for real, padded in zip(
                tensors_in(self.real.values[source]),
                tensors_in(self._value_in(source, run, padded=True)),
                strict=True,
            )
        }
        made = list(tensors_in(self.real.values[node]))
        if not any(
            extent.carries_tokens for source in self.facts[node].reads for extent in self.extents.of(source)
        ):
            return all(map(lie_alike, made, tensors_in(run.values[node])))
        if not all(can_be_numbered(tensor) and tensor.dtype == made[0].dtype for tensor in bases):
            return None
        real_args = map_tensors(
            self._operands(node, self.real, self.rows, padded=False), lambda t: numbered_like(t, t.shape)
        )
        padded_args = map_tensors(
            self._operands(node, run, self.padded_rows, padded=True), lambda t: numbered_like(t, held[id(t)])
        )
        return keeps_places(
            list(tensors_in(self._call(node, *real_args))), list(tensors_in(self._call(node, *padded_args)))
        )

    def _results(self, node: fx.Node) -> Iterator[_Result]:
        """Each tensor that the node makes, and all that share memory with what it writes: the real one, and
        the leading part of the padded ones."""
        written = {
            storage_of(t) for arg in self.facts[node].writes for t in tensors_in(arg.meta["example_value"])
        }
        groups = [("", node)] + [
            (f"what it writes into '{alias.name}': ", alias)
            for storage in written
            for alias in self._aliases[storage]
            if alias in self.real.values and alias is not node
        ]
        for what, source in groups:
            reals = list(tensors_in(self.real.values.get(source)))
            padded = [list(tensors_in(self._value_in(source, run, padded=False))) for run in self.runs]
            for index, (extent, real) in enumerate(zip(self.extents.of(source), reals, strict=True)):
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
        written = {
            storage_of(t) for arg in self.facts[node].writes for t in tensors_in(arg.meta["example_value"])
        }
        for memory in written | self.facts[node].storages:
            owner = self._aliases[memory][0]
            if self.kinds.get(owner) != "graph" or self.facts[owner].is_view or owner not in self.real.values:
                continue
            for position, extent in enumerate(self.extents.of(owner)):
                if extent.memory != memory or extent.real is None or not extent.is_floating:
                    continue
                for run in self.runs:
                    tensor = list(tensors_in(run.values[owner]))[position]
                    for part in padded_parts(tensor, extent.real) if can_be_numbered(tensor) else ():
                        part.fill_(poison_value(tensor.dtype, run.poison or 0))
                        self.poisoned.add(owner)

    def _follow_real(self, node: fx.Node) -> None:
        """An eager node in the padded runs: run again where it looks at or writes their memory, else
        copied."""
        fact = self.facts[node]
        for target in fact.writes:
            self._forget_padded(target)
        # A view of rows that lie apart when padded is made of a dense copy at run time, too.
        is_view = fact.is_view and all(
            extent.keeps_strides for source in fact.reads for extent in self.extents.of(source)
        )
        for run in self.runs:
            if is_view or fact.writes:
                self._execute(node, run, self.rows)
            else:
                value = self.real.values[node]
                run.values[node] = map_tensors(value, torch.clone)

    def _execute(self, node: fx.Node, run: _Run, rows: int) -> None:
        padded = run.poison is not None and self.kinds[node] == "graph"
        args, kwargs = self._operands(node, run, rows, padded=padded)
        if self.facts[node].random:
            torch.manual_seed(0)
        # Garbage used as an index is an error on a CPU, and on CUDA the end of the process' use of the
        # device.
        is_checked = padded and self._device.type == "cuda"
        with CheckedIndices() if is_checked else nullcontext():
            run.values[node] = self._call(node, args, kwargs)
        if makes_empty(node):
            for tensor in tensors_in(run.values[node]):
                tensor.zero_()  # in real rows garbage would differ between the runs; padded ones get poison

    def _operands(self, node: fx.Node, run: _Run, rows: int, *, padded: bool) -> tuple[Any, Any]:
        def operand(source: Any) -> Any:
            if isinstance(source, fx.Node):
                return self._value_in(source, run, padded=padded, rows=rows)
            return self._scalar(source, rows) if isinstance(source, SYMBOLIC) else source

        return fx.node.map_aggregate((node.args, dict(node.kwargs)), operand)  # type: ignore[return-value]

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        with _regions(node.meta.get("autocast", ())):
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            function: Any = node.target
            return function(*args, **kwargs)

    def _value_in(self, source: fx.Node, run: _Run, *, padded: bool, rows: int | None = None) -> Any:
        """What `source` is to a reader: padded to a graph node, real rows to an eager one, numbers for its
        row count."""
        if source not in run.values:
            return self._scalar(source.meta.get("example_value"), rows if rows is not None else self.rows)
        value = run.values[source]
        if run.poison is None or not any(True for _ in tensors_in(value)):
            return value
        is_real = self.kinds.get(source) == "eager"
        if padded and is_real:
            if source not in run.padded:
                run.padded[source] = self._pad_eager(source, value, run.poison)
            return run.padded[source]
        if not padded and not is_real:
            # Strided where eager's would be dense: a node must read and write the run's own memory here.
            return map_with(value, self.extents.of(source), _real_part)
        return value

    def _pad_eager(self, source: fx.Node, value: Any, variant: int) -> Any:
        def pad(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
            if extent.padded is None or not extent.carries_tokens:
                return tensor
            return with_padding(tensor, extent.padded, extent.padded_strides, variant)

        return map_with(value, self.extents.of(source), pad)

    def _scalar(self, value: Any, rows: int) -> Any:
        if isinstance(value, (tuple, list)):
            return (
                type(value)(self._scalar(item, rows) for item in value)
                if type(value) is not torch.Size
                else tuple(self._scalar(item, rows) for item in value)
            )
        expr = internals.expression(value, self.trace.shape_env)
        if expr is None or not expr.free_symbols:
            return value if expr is None else (int(expr) if expr.is_integer else float(expr))
        symbols = [self.token.symbol, *self.others]
        if expr not in self._scalar_functions:
            self._scalar_functions[expr] = internals.compile_expressions([expr], symbols)
        return self._scalar_functions[expr](rows, *self.others.values())[0]

    def _fill_written(self, node: fx.Node) -> None:
        """Stands in for a boundary op: what it writes holds random values, and poison where padded."""
        outside = {  # the model's and the caller's own tensors: KV pools, never touched here
            p.node
            for p in self.trace.placeholders
            if p.kind == "state" or not self.sizes.token_dims_of(p.node.meta.get("example_value"))
        }
        for target in self.facts[node].writes:
            fake = target.meta["example_value"]
            if target in outside or not isinstance(fake, torch.Tensor) or target not in self.real.values:
                continue
            real = self.real.values[target]
            if real.dtype.is_floating_point:
                noise = torch.randn(tuple(real.shape), generator=self._generator).to(real.device, real.dtype)
                real.copy_(noise)
            else:
                real.zero_()
            self._forget_padded(target)
            for run in self.runs:
                tensor = run.values[target]
                leading = narrow_to(tensor, real.shape)
                for part in padded_parts(tensor, real.shape):
                    part.fill_(
                        poison_value(tensor.dtype, run.poison or 0) if real.dtype.is_floating_point else 0
                    )
                leading.copy_(real)

    def _forget_padded(self, written: fx.Node) -> None:
        """Padded copies of eager results that share memory with `written` are out of date."""
        storages = {storage_of(tensor) for tensor in tensors_in(written.meta["example_value"])}
        for run in self.runs:
            for node in [node for node in run.padded if self.facts[node].storages & storages]:
                del run.padded[node]

    def _save_written(self, node: fx.Node) -> list[tuple[torch.Tensor, torch.Tensor]]:
        saved = []
        for target in self.facts[node].writes:
            for run in self.runs:
                for tensor in tensors_in(run.values.get(target)):
                    saved.append((tensor, tensor.clone()))
        return saved

    def _restore_written(self, saved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, before in saved:
            tensor.copy_(before)


def _real_part(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
    is_whole = extent.real is None or not extent.carries_tokens
    return tensor if is_whole else narrow_to(tensor, extent.real)  # type: ignore[arg-type]


@contextmanager
def _regions(regions: Sequence[tuple]) -> Iterator[None]:
    with ExitStack() as stack:
        for arguments in regions:
            opened = _enter_autocast(*arguments)
            stack.callback(_exit_autocast, opened)
        yield


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
