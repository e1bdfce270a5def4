"""What compile time hands to run time: frozen data, no FX object and no CUDA object.

A `SegmentPlan` is one trace cut into segments. Its segments exchange numbered values. A `ValueSpec` says
where a value comes from and how large it is, as plain functions of the row count: the padded count inside
graphs, the real count outside them [I1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecewise.calls.structure import Structure
from runners.rows import narrow_to
from runners.state.state_check import StateFacts, StateRef

Sizes = Callable[..., tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class ResultLeaf:
    """Where a leaf of the result comes from: a graph output, an input, state of the model, or a constant."""

    kind: str
    index: int = -1
    state: StateRef | None = None
    value: Any = None


# A leaf of the result that is a tensor subclass, the leaves that it is made of, and what makes it of them.
WrappedLeaf = tuple[int, tuple[int, ...], Callable[[Sequence[Any]], Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedRows:
    """What the padded rows of a value may hold in a graph: what it was proven for, and is tested with.

    Attributes:
        is_real: each repeats a real row, the same one as those of other values; else they hold anything.
        bounds: row count → the least and the largest integer, None for a side that is open.
        is_prefix: whether the real rows lead; where they do not, graphs alone read the value.
    """

    is_real: bool = True
    bounds: Callable[[int], tuple[int | None, int | None]] = lambda rows: (None, None)
    is_prefix: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class ValueSpec:
    """A value that crosses a segment border, or an input, or state.

    Attributes:
        origin: "input", "state", "graph", "eager" or "symbol" (the size of an input that is not the token
            count).
        sizes: shape as a function of the row count, for tensors whose only symbol is the token count; None
            otherwise.
        strides, offset: likewise, for eager's own tensor; `offset` is where it begins in its memory.
        token_dims: dims that carry tokens, ascending.
        memory: values with one number share memory; -1 for scalars.
        leaf, dim: the input, and for a "symbol" its dim, −1 for an int.
        geometry: sizes, strides and offset in words, with `n` for the row count; equal where they are.
        any_strides: it may have any strides, of which the last one is 1; `strides` is then None.
        units: per dim, how many elements are one row.
    """

    index: int
    name: str
    origin: str
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    sizes: Sizes | None = None
    strides: Sizes | None = None
    token_dims: tuple[int, ...] = ()
    memory: int = -1
    leaf: int = -1
    dim: int = -1
    state: StateRef | None = None
    offset: Sizes | None = None
    geometry: str = ""
    any_strides: bool = False
    units: tuple[int, ...] = ()
    padded: PaddedRows = PaddedRows()

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    def real_rows(self, tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Views the leading rows of the value's padded tensor; all of one that carries no tokens."""
        follows = self.token_dims and self.sizes is not None
        return narrow_to(tensor, self.sizes(num_rows)) if follows else tensor  # type: ignore[misc]

    def number_in(self, leaves: Sequence[Any]) -> Any:
        """Returns what a value of origin "symbol" is for one call's leaves."""
        return leaves[self.leaf] if self.dim < 0 else leaves[self.leaf].shape[self.dim]


@dataclasses.dataclass(frozen=True, slots=True)
class EagerReason:
    """Why an op is not in a graph: a code, the op, the module that called it and the source line."""

    code: str
    op: str
    detail: str
    module_path: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class InputAt:
    """Stands for the segment's input at this position among an op's arguments."""

    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class BoundaryCall:
    """A boundary segment that is one call of the op, with inputs and constants as its arguments.

    Attributes:
        name: the op's, as the registry spells it.
        arguments: all of the schema's, up to the last one that is not the schema's default.
    """

    name: str
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive ops of one kind.

    Attributes:
        kind: "graph", "boundary" or "eager".
        function: `function(num_rows, *inputs) -> tuple` with one result per entry of `outputs`.
        lowering_key: equal for segments that are the same program on other tensors, in every process.
        inputs, outputs: value indices.
        writes: memories of the values that it writes.
        num_ops: ops without views of views; 0 for a segment that only makes views.
        reasons: why it is eager, or why a boundary op is not in a graph where such ops may be.
        captured_ops: boundary ops in a graph segment.
        unwritten: memories of its results that hold nothing yet, as later segments write them.
        op_call: the same as `function` where a boundary op is called with nothing but inputs and constants.
        own_function: `function` as the model has it, whatever was fused.
        keeps_own: why nothing may be fused, compiled or scheduled in it; empty where that may be.
        checks_values: an op of it checks values on the device, such as indices.
    """

    index: int
    kind: str
    function: Callable[..., tuple]
    lowering_key: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...]
    num_ops: int
    op_names: tuple[str, ...]
    module_path: str
    reasons: tuple[EagerReason, ...] = ()
    views_only: bool = False
    op_call: BoundaryCall | None = None
    captured_ops: int = 0
    unwritten: tuple[int, ...] = ()
    own_function: Callable[..., tuple] | None = None
    keeps_own: str = ""
    checks_values: bool = False

    @property
    def name(self) -> str:
        where = f" ({self.module_path})" if self.module_path else ""
        return f"segment {self.index}{where}"


@dataclasses.dataclass(frozen=True, slots=True)
class InputRule:
    """How an input's dims follow the token count: dim → size as a function of it; the size of `anchor_dim` is
    the count itself, −1 for none."""

    leaf: int
    dims: Mapping[int, Callable[[int], int]]
    anchor_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class TokenDim:
    """The token count: its symbol's name, the input dim that it is read from, all inputs that carry it."""

    symbol: str
    leaf: int
    dim: int
    inputs: tuple[InputRule, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ComputedNumber:
    """A number of the result computed from sizes: `compute(num_tokens, *values at indices)[0]`."""

    compute: Any
    indices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FusionReport:
    """What the passes over the graph segments found.

    Attributes:
        matches: (pass, matches in all segments), in the order of the passes.
        notes: what a reader might have expected to be fused and was not, each said once.
    """

    matches: tuple[tuple[str, int], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in self.matches)
        return "\n".join([f"fusions: {counts}", *(f"  {note}" for note in self.notes)])


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One trace, cut.

    Attributes:
        values: one per value index.
        segments: in order of execution.
        result: structure of the result; `result_leaves` has one per leaf, with "output" indices into
            `result_values`.
        result_values: per graph output, a value index or a number computed from sizes.
        is_valid: (num_tokens, *other symbols) → whether the trace's shape guards hold.
        symbols: value indices of the other symbols, in the order that `is_valid` takes them.
        state_facts: what the trace saw of the model's Python state.
        written_leaves: inputs that the call writes.
        fills: reason → how often memory of `empty*` that others than its graph's own ops write is filled with
            zeros for it; under "needless" how often it is not, as no reader minds what padded rows hold.
        fusions: what was rewritten in the graph segments; None where nothing was to be.
        step_memory: state that only captured forms of boundary ops write: nothing while the step that is
            loaded has no sequences, else what belongs to that step and is overwritten where it runs again.
        metadata_leaves: inputs without tokens that captured boundary ops read; zeros are a step of no tokens.
        max_rows: the largest row count for which the indices in graphs are in range; None for any.
    """

    token_dim: TokenDim
    values: tuple[ValueSpec, ...]
    segments: tuple[Segment, ...]
    result: Structure
    result_leaves: tuple[ResultLeaf, ...]
    result_values: tuple[int | ComputedNumber, ...]
    is_valid: Callable[..., bool]
    symbols: tuple[int, ...]
    state_facts: StateFacts
    written_leaves: tuple[int, ...]
    fills: Mapping[str, int]
    fusions: FusionReport | None = None
    step_memory: frozenset[int] = frozenset()
    metadata_leaves: frozenset[int] = frozenset()
    max_rows: int | None = None

    def graph_segments(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.kind == "graph")

    def computing_segments(self) -> tuple[Segment, ...]:
        """Returns the graph segments that do more than make views."""
        return tuple(segment for segment in self.graph_segments() if not segment.views_only)

    def holds_at(self, num_tokens: int, leaves: Sequence[Any]) -> bool:
        """Tells whether the trace holds for so many tokens, with the other sizes of a call's leaves."""
        is_within = self.max_rows is None or num_tokens <= self.max_rows
        others = (self.values[index].number_in(leaves) for index in self.symbols)
        return is_within and self.is_valid(num_tokens, *others)

    @property
    def coverage(self) -> float:
        """Share of the model's ops that are in graph segments; boundary ops are not counted."""
        graph = sum(segment.num_ops for segment in self.graph_segments())
        total = sum(segment.num_ops for segment in self.segments if segment.kind != "boundary")
        return graph / total if total else 0.0
