"""Defines what compile time gives run time: frozen data without FX or CUDA objects.

A `SegmentPlan` is one trace cut into segments, which exchange numbered values. A `ValueSpec` has a value's
source and its sizes as functions of the row count: padded inside graphs, real outside [I1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from piecewise.calls.structure import Structure
from runners.rows import narrow_to
from runners.state.state_check import StateFacts, StateRef

Sizes = Callable[..., tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class ResultLeaf:
    """Describes the source of a leaf of the result: a graph output, an input, state, or a constant."""

    kind: str
    index: int = -1
    state: StateRef | None = None
    value: Any = None


# A result leaf that is a tensor subclass: its index, the leaves inside, and the function that builds it.
WrappedLeaf = tuple[int, tuple[int, ...], Callable[[Sequence[Any]], Any]]


class PaddedRows(NamedTuple):
    """Describes what padded rows of a value may hold in a graph, as proven and tested.

    Attributes:
        is_real: whether each repeats a real row, the same one in all such values; else they hold anything.
        bounds: row count → the least and the largest integer, None for an open side.
        is_prefix: whether the real rows lead; otherwise only graphs read the value.
    """

    is_real: bool = True
    bounds: Callable[[int], tuple[int | None, int | None]] = lambda rows: (None, None)
    is_prefix: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class ValueSpec:
    """Describes a value that crosses a segment border, or an input, or state.

    Attributes:
        origin: "input", "state", "graph", "eager" or "symbol" (an input's size other than the token count).
        sizes: row count → shape; None if there is another symbol than the token count.
        strides, offset: likewise, of eager's tensor; `offset` in elements into its memory.
        token_dims: dims that carry tokens, ascending.
        memory: values with one number share memory; -1 for scalars.
        leaf, dim: the input, and for a "symbol" its dim, −1 for an int.
        geometry: sizes, strides and offset as text, with `n` for the row count.
        any_strides: whether any strides will do whose last is 1; `strides` is then None.
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
        """Views the leading rows of the value's padded tensor; the whole tensor if it carries no tokens."""
        follows = self.token_dims and self.sizes is not None
        return narrow_to(tensor, self.sizes(num_rows)) if follows else tensor  # type: ignore[misc]

    def number_in(self, leaves: Sequence[Any]) -> Any:
        """Returns the number of a value of origin "symbol" for one call's leaves."""
        return leaves[self.leaf] if self.dim < 0 else leaves[self.leaf].shape[self.dim]


@dataclasses.dataclass(frozen=True, slots=True)
class EagerReason:
    """Describes why an op is not in a graph: a code, the op, its calling module and source line."""

    code: str
    op: str
    detail: str
    module_path: str
    source: str

    def __str__(self) -> str:
        where = f" in {self.module_path}" if self.module_path else ""
        source = f" at {self.source}" if self.source else ""
        return f"{self.op} ({self.code}: {self.detail}){where}{source}"


@dataclasses.dataclass(frozen=True, slots=True)
class InputAt:
    """Marks an op's argument as the segment's input at this position."""

    position: int


class BoundaryCall(NamedTuple):
    """Describes a boundary segment that only calls the op, on inputs and constants.

    Attributes:
        name: the op's, as the registry spells it.
        arguments: the schema's, up to the last one that is not the default.
    """

    name: str
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Holds a run of consecutive ops of one kind.

    Attributes:
        kind: "graph", "boundary" or "eager".
        function: `function(num_rows, *inputs) -> tuple` with one result per entry of `outputs`.
        lowering_key: equal for segments with one program on different tensors, in every process.
        inputs, outputs: value indices.
        writes: memories of the values that it writes.
        num_ops: ops without views of views; 0 for a segment that only makes views.
        reasons: why it is eager, or why a boundary op is not captured where such ops may be.
        captured_ops: boundary ops in a graph segment.
        unwritten: memories of its results that only later segments write.
        op_call: the call of a boundary op, if `function` is only that.
        own_function: `function` before any fusion.
        keeps_own: why it must not be fused, compiled or scheduled; empty if it may.
        checks_values: whether an op checks values on the device, such as indices.
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


class InputRule(NamedTuple):
    """Maps an input's dims to functions of the token count, which is the size of `anchor_dim` (−1: none)."""

    leaf: int
    dims: Mapping[int, Callable[[int], int]]
    anchor_dim: int


class TokenDim(NamedTuple):
    """Describes the token count: its symbol's name, the input dim that gives it, all inputs that carry it."""

    symbol: str
    leaf: int
    dim: int
    inputs: tuple[InputRule, ...]


class ComputedNumber(NamedTuple):
    """Describes a number of the result computed from sizes: `compute(num_tokens, *values at indices)[0]`."""

    compute: Any
    indices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FusionReport:
    """Describes the results of the passes over the graph segments.

    Attributes:
        matches: (pass, matches in all segments), in the order of the passes.
        notes: expected fusions that did not match, each once.
    """

    matches: tuple[tuple[str, int], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in self.matches)
        return "\n".join([f"fusions: {counts}", *(f"  {note}" for note in self.notes)])


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Holds one trace, cut into segments.

    Attributes:
        values: one per value index.
        segments: in order of execution.
        result: structure; `result_leaves` has one per leaf, with "output" indices into `result_values`.
        result_values: per graph output, a value index or a number computed from sizes.
        is_valid: (num_tokens, *other symbols) → whether the trace's shape guards hold.
        symbols: value indices of the other symbols, in the order of `is_valid`'s arguments.
        state_facts: the model's Python state that the trace read.
        written_leaves: inputs that the call writes.
        fills: reason → number of `empty*` memories that ops outside of the graph write and that it fills with
            zeros; "needless" counts those not filled, since no reader depends on padded rows.
        fusions: rewrites in the graph segments; None without passes.
        step_memory: state that only captured boundary ops write: nothing while the loaded step has no
            sequences, else memory of that step, which running it again overwrites.
        metadata_leaves: inputs without tokens that captured boundary ops read; zeros are a step of no tokens.
        max_rows: the largest row count whose indices in graphs are in range; None for any.
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
        return tuple(segment for segment in self.graph_segments() if not segment.views_only)

    def holds_at(self, num_tokens: int, leaves: Sequence[Any]) -> bool:
        """Whether the trace holds for this token count, with the other sizes of a call's leaves."""
        is_within = self.max_rows is None or num_tokens <= self.max_rows
        others = (self.values[index].number_in(leaves) for index in self.symbols)
        return is_within and self.is_valid(num_tokens, *others)

    @property
    def coverage(self) -> float:
        """Computes the share of the model's ops in graph segments, boundary ops left out."""
        graph = sum(segment.num_ops for segment in self.graph_segments())
        total = sum(segment.num_ops for segment in self.segments if segment.kind != "boundary")
        return graph / total if total else 0.0


Outputs = Sequence[Any] | None


def run_plan(
    plan: SegmentPlan,
    env: dict[int, Any],
    num_rows: int,
    *,
    on_segment: Callable[[Segment, list[Any]], Outputs],
    on_boundary: Callable[[Segment], Outputs] = lambda segment: None,
    on_live: Callable[[set[int]], object] | None = None,
) -> None:
    """Runs each segment and keeps its results in `env`; calls segments that only make views directly.

    Args:
        env: value index → value; holds what no segment here makes.
        num_rows: rows of the tensors in `env`.
        on_segment: runs a graph segment on its arguments.
        on_boundary: runs a boundary or eager segment. Both return the segment's results, None for none.
        on_live: called after each segment with the values in `env` whose memory is still read.
    """
    # Per memory the last segment that uses it; results are read after all segments.
    last_use: dict[int, int] = {}
    for position, segment in enumerate(plan.segments):
        for index in (*segment.inputs, *segment.outputs):
            last_use[plan.values[index].memory] = position
    for source in plan.result_values:
        if isinstance(source, int):
            last_use[plan.values[source].memory] = len(plan.segments)
    for position, segment in enumerate(plan.segments):
        if segment.kind != "graph":
            outputs = on_boundary(segment)
        elif segment.views_only:
            outputs = segment.function(num_rows, *arguments_of(segment, plan.values, env))
        else:
            outputs = on_segment(segment, arguments_of(segment, plan.values, env))
        if outputs is not None:
            env.update(zip(segment.outputs, outputs, strict=True))
        if on_live is not None:
            on_live({index for index in env if last_use.get(plan.values[index].memory, -1) > position})


def arguments_of(segment: Segment, values: Sequence[ValueSpec], env: Mapping[int, Any]) -> list[Any]:
    """Returns a segment's arguments: values of `env`, and the model's present tensors."""
    return [env[index] if index in env else state_tensor(values[index]) for index in segment.inputs]


def state_tensor(value: ValueSpec) -> torch.Tensor:
    """Returns the model's present tensor of a value of origin "state"."""
    assert value.state is not None
    return value.state.get().detach()
