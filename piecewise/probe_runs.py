"""The runs of a walk over a traced graph, one on real rows alone and others on padded rows: what each node is
in each of them, and how one is run."""

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
from piecewise.aliases import NodeFacts, storage_of, tensors_in, written_storages
from piecewise.classify import Verdict
from piecewise.index_bounds import CheckedIndices
from piecewise.positions import random_where_constant
from piecewise.probe_extents import Extent, Extents, map_with
from piecewise.row_samples import resize_leaf, with_padding
from piecewise.sizes import SizeFunctions
from piecewise.token_dim import TokenSymbol
from piecewise.torch_internals import SYMBOLIC
from piecewise.trace import Trace
from piecewise.zero_fills import makes_empty
from runners.rows import narrow_to

NUM_POISONS = 3


@dataclasses.dataclass(slots=True)
class Run:
    """One of the runs: `poison` is None for the unpadded one. `padded` holds padded copies of eager
    results."""

    rows: int
    poison: int | None
    values: dict[fx.Node, Any] = dataclasses.field(default_factory=dict)
    padded: dict[fx.Node, Any] = dataclasses.field(default_factory=dict)


class ProbeRuns:
    """What the nodes are in each run, and how one is run.

    Args:
        verdicts: of each call node, so far.
        num_tokens, padded_num_tokens: row counts of the runs.
    Attributes:
        kinds: what each call node runs as; changes during the walk.
    """

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
        self.real = Run(num_tokens, None)
        self.padded = [Run(padded_num_tokens, variant) for variant in range(NUM_POISONS)]
        self.generator = torch.Generator().manual_seed(0)
        self.written_outside = self._find_written_outside()
        self.device = trace.example.leaves[token.anchor[0]].device
        self._others: dict[Any, int] = {}
        self._scalar_functions: dict[Any, Callable[..., tuple]] = {}

    @property
    def all(self) -> tuple[Run, ...]:
        """The real run first."""
        return self.real, *self.padded

    def _find_written_outside(self) -> frozenset[fx.Node]:
        """Placeholders whose memory some op writes; boundary ops are not called here."""
        written = written_storages(fact for fact in self.facts.values() if fact.boundary is None)
        return frozenset(
            placeholder.node
            for placeholder in self.trace.placeholders
            if any(storage_of(t) in written for t in tensors_in(placeholder.node.meta.get("example_value")))
        )

    def load_placeholders(self) -> None:
        """Gives each run the example's inputs, resized and padded, and the model's state."""
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
                value = random_where_constant(value.detach(), self.generator)
            for run in self.all:
                if dims and function is not None:
                    run.values[node] = self._input_rows(value, function, run)
                else:
                    run.values[node] = (
                        value.detach().clone() if node in self.written_outside else value.detach()
                    )

    def _note_symbol(self, size: Any, actual: int) -> None:
        is_expression = isinstance(size, sympy.Basic)
        expr = size if is_expression else internals.expression(size, self.trace.shape_env)
        if expr is not None and expr.is_Symbol and expr != self.token.symbol:
            self._others[expr] = actual

    def _input_rows(
        self, value: torch.Tensor, function: Callable[[int], tuple[int, ...]], run: Run
    ) -> torch.Tensor:
        rows = resize_leaf(value.detach(), function(self.rows)).clone()
        if run.poison is None:
            return rows
        return with_padding(rows, function(self.padded_rows), None, run.poison)

    def execute(self, node: fx.Node, run: Run, rows: int) -> None:
        """Runs a node in one of the runs, on rows as it gets them there: padded in a graph, else real."""
        padded = run.poison is not None and self.kinds[node] == "graph"
        args, kwargs = self.operands(node, run, rows, padded=padded)
        if self.facts[node].random:
            torch.manual_seed(0)
        # Garbage used as an index is an error on a CPU, and on CUDA the end of the process' use of the
        # device.
        is_checked = padded and self.device.type == "cuda"
        with CheckedIndices() if is_checked else nullcontext():
            run.values[node] = self.call(node, args, kwargs)
        if makes_empty(node):
            for tensor in tensors_in(run.values[node]):
                tensor.zero_()  # in real rows garbage would differ between the runs; padded ones get poison

    def operands(self, node: fx.Node, run: Run, rows: int, *, padded: bool) -> tuple[Any, Any]:
        def operand(source: Any) -> Any:
            if isinstance(source, fx.Node):
                return self.value_in(source, run, padded=padded, rows=rows)
            return self._scalar(source, rows) if isinstance(source, SYMBOLIC) else source

        return fx.node.map_aggregate((node.args, dict(node.kwargs)), operand)  # type: ignore[return-value]

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        with _regions(node.meta.get("autocast", ())):
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            function: Any = node.target
            return function(*args, **kwargs)

    def value_in(self, source: fx.Node, run: Run, *, padded: bool, rows: int | None = None) -> Any:
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
        symbols = [self.token.symbol, *self._others]
        if expr not in self._scalar_functions:
            self._scalar_functions[expr] = internals.compile_expressions([expr], symbols)
        return self._scalar_functions[expr](rows, *self._others.values())[0]

    def forget_padded(self, written: fx.Node) -> None:
        """Padded copies of eager results that share memory with `written` are out of date."""
        storages = {storage_of(tensor) for tensor in tensors_in(written.meta["example_value"])}
        for run in self.padded:
            for node in [node for node in run.padded if self.facts[node].storages & storages]:
                del run.padded[node]

    def save_written(self, node: fx.Node) -> list[tuple[torch.Tensor, torch.Tensor]]:
        saved = []
        for target in self.facts[node].writes:
            for run in self.padded:
                for tensor in tensors_in(run.values.get(target)):
                    saved.append((tensor, tensor.clone()))
        return saved

    def restore_written(self, saved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
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
