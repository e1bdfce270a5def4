"""Runs each segment before its capture, on placeholder values, with poison in the padded rows [I3, I8].

Each graph segment runs several times, on the same real rows and different padding. What was proven for each
op has to hold for the segment as it was lowered, so the real rows of its results must be the same bits.

A boundary op between graphs is not called, but its `warm_up` is, if it has one. A boundary op in a graph runs
on a step of zero sequences; graph-owned memory that it would have written gets placeholders: random values,
the same in each warm-up, and poison in padded rows.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import boundary_ops
from boundary_ops import BoundaryOp
from piecewise.capture import placeholders
from piecewise.capture.faults import SegmentFault
from piecewise.errors.capture import PaddingMatters
from piecewise.ir.plan import Segment, SegmentPlan, ValueSpec, run_plan, state_tensor
from piecewise.ir.tensors import bound_arguments, storage_of, tensors_in
from runners.engines import native_engine
from runners.errors import CaptureError, one_line
from runners.piecewise_runner import PiecewiseRunner
from runners.rows import has_strides, narrow_to, padded_parts, poison_value, repeat_row_

_INPUTS = ("input", "symbol")


@dataclasses.dataclass(slots=True)
class WarmUp:
    """Warms up the segments of a plan for one bucket.

    Attributes:
        leaves: leaves of the example call.
        function_for: (segment, bucket) → the form of a graph segment that is warmed up and captured.
        num_steps: runs of each graph segment, one or more.
        static_inputs: value index → static buffer of an input or eager result that graphs read; filled by
            `run`.
    """

    plan: SegmentPlan
    runners: Mapping[int, PiecewiseRunner]
    leaves: Sequence[Any]
    function_for: Callable[[Segment, int], Callable[..., Sequence[Any]]]
    num_steps: int
    bucket: int
    real_rows: int
    static_inputs: Mapping[int, torch.Tensor]
    _made: dict[int, torch.Tensor] = dataclasses.field(init=False)
    _eager: dict[int, Any] = dataclasses.field(init=False)
    _warmed_up: set[tuple[Any, ...]] = dataclasses.field(default_factory=set)

    def run(self) -> None:
        """Warms up all segments; raises SegmentFault if one fails or its real rows change with padding."""
        self._made, self._eager = dict(self.static_inputs), self._inputs()
        for index, buffer in self.static_inputs.items():
            value = self.plan.values[index]
            assert value.sizes is not None
            if value.origin == "input" and value.leaf in self.plan.metadata_leaves:
                buffer.zero_()
                continue
            rows = self._eager.get(index)
            if rows is None:
                rows = placeholders.placeholder_for(value.sizes(self.real_rows), buffer, seed=index)
            self._fill(value, rows)
        run_plan(
            self.plan, self._made, self.bucket, on_segment=self._warm_up_segment,
            on_boundary=self._run_between, on_live=self._keep,
        )  # fmt: skip

    def _inputs(self) -> dict[int, Any]:
        """Maps value index → the example's input at the real rows; clones inputs that the call writes."""
        found = {v.index: self._input(v, self.real_rows) for v in self.plan.values if v.origin in _INPUTS}
        for index, given in found.items():
            if isinstance(given, torch.Tensor) and self.plan.values[index].leaf in self.plan.written_leaves:
                found[index] = given.clone()
        return found

    def _input(self, value: ValueSpec, num_rows: int) -> Any:
        if value.origin == "symbol":
            return value.number_in(self.leaves)
        leaf = self.leaves[value.leaf]
        if not isinstance(leaf, torch.Tensor) or value.sizes is None:
            return leaf
        return placeholders.resize_leaf(leaf.detach(), value.sizes(num_rows))

    def _fill(self, value: ValueSpec, rows: torch.Tensor) -> None:
        assert value.sizes is not None
        buffer, sizes = self.static_inputs[value.index], value.sizes(self.real_rows)
        narrow_to(buffer, sizes).copy_(rows)
        repeat_row_(buffer, sizes, value.units)

    def _keep(self, live: set[int]) -> None:
        for index in self._made.keys() - live:
            del self._made[index]

    def _run_between(self, segment: Segment) -> None:
        if segment.kind == "eager":
            self._run_eager(segment)
        else:
            self._overwrite(segment)
            self._warm_up_boundary(segment)

    def _run_eager(self, segment: Segment) -> None:
        arguments: list[Any] = []
        copied_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value in (self.plan.values[index] for index in segment.inputs):
            if value.origin == "graph":
                rows = value.real_rows(self._made[value.index], self.real_rows)
                wanted = tuple(value.strides(self.real_rows)) if value.strides is not None else rows.stride()
                if not has_strides(rows, wanted):
                    dense = rows.new_empty(0).new_empty_strided(tuple(rows.shape), wanted).copy_(rows)
                    copied_back.append((rows, dense))
                    rows = dense
                arguments.append(rows)
            elif value.origin == "state":
                arguments.append(state_tensor(value))
            elif value.index in self._eager:
                arguments.append(self._eager[value.index])
            else:
                return  # made by an eager segment that was left out
        try:
            with placeholders.checked_indices(arguments):
                results = segment.function(self.real_rows, *arguments)
        except Exception:  # placeholders may not suit the segment; a real error shows at the call
            return
        for rows, dense in copied_back:
            rows.copy_(dense)
        self._eager.update(zip(segment.outputs, results, strict=True))
        for index in self.static_inputs.keys() & self._eager.keys():
            value = self.plan.values[index]
            if index in segment.outputs or value.memory in segment.writes:
                self._fill(value, self._eager[index])

    def _warm_up_segment(self, segment: Segment, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        values, bucket, real_rows = self.plan.values, self.bucket, self.real_rows
        taken = [(values[index], tensor) for index, tensor in zip(segment.inputs, arguments, strict=True)]
        written = [(tensor, tensor.clone()) for value, tensor in taken if value.memory in segment.writes]
        first: dict[int, torch.Tensor] = {}
        outputs: Sequence[torch.Tensor] = ()
        function = self.function_for(segment, bucket)
        own = function is segment.own_function
        for step in range(self.num_steps):
            _put_back(written)
            for value, tensor in taken:
                placeholders.poison_padding_(tensor, value, real_rows, bucket, variant=step)
            made_up = CapturedWarmUp(arguments, bucket, real_rows, variant=step)
            try:
                with made_up if segment.captured_ops else nullcontext():
                    if not own and segment.checks_values:  # compiled or fused kernels do not check indices
                        self._run_own(segment, arguments)
                        _put_back(written)
                    with placeholders.checked_indices(arguments) if own else nullcontext():
                        outputs = self.runners[segment.index].warm_up(bucket, arguments, fn=function)
                rows = placeholders.real_results(segment, values, outputs, real_rows)
                if step == 0:
                    first = {index: row.clone() for index, row in rows.items()}
                elif (changed := _first_changed(first, rows)) is not None:
                    raise PaddingMatters(
                        segment=segment.name, bucket=bucket, result=f", result '{values[changed].name}'",
                        expected="real rows that do not depend on what padded rows hold",
                        got=f"other values in warm-up {step + 1} than in warm-up 1",
                    )  # fmt: skip
            except CaptureError as error:
                _put_back(written)
                raise SegmentFault(
                    error, segment, function, arguments, bucket=bucket, real_rows=real_rows, variant=step
                ) from error
        return outputs

    def _run_own(self, segment: Segment, arguments: Sequence[torch.Tensor]) -> None:
        """Runs a segment's own function, if the device would die of an index out of range."""
        may_die = any(native_engine(tensor.device).dies_of_bad_index for tensor in arguments)
        if segment.own_function is None or not may_die:
            return
        try:
            with placeholders.checked_indices(arguments):
                segment.own_function(self.bucket, *arguments)
        except Exception as error:
            raise PaddingMatters(
                segment=segment.name, bucket=self.bucket, result="",
                expected="a segment that runs", got=one_line(error),
            ) from error  # fmt: skip

    def _overwrite(self, segment: Segment) -> None:
        """Writes placeholders for a boundary op's results: random real rows, poisoned padding."""
        for index in segment.inputs:
            value = self.plan.values[index]
            if value.origin != "graph" or value.memory not in segment.writes or value.sizes is None:
                continue
            tensor, sizes = self._made[index], value.sizes(self.real_rows)
            for part in padded_parts(tensor, sizes):
                part.fill_(placeholders.anything(tensor, 0))
            narrow_to(tensor, sizes).copy_(placeholders.placeholder_for(sizes, tensor, seed=index))

    def _warm_up_boundary(self, segment: Segment) -> None:
        """Warms up each kind of boundary segment once: a model's layers differ only in their tensors."""
        arguments: list[Any] = []
        for value in (self.plan.values[index] for index in segment.inputs):
            if value.index in self._made:
                arguments.append(self._made[value.index])
            elif value.state is not None:
                arguments.append(value.state.get())
            elif value.origin in _INPUTS:
                arguments.append(self._input(value, self.bucket))
            else:
                return  # made by an eager segment
        kinds = ((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments)
        key = segment.lowering_key, *kinds
        if key not in self._warmed_up:
            self._warmed_up.add(key)
            with BoundaryWarmUp(self.bucket):
                segment.function(self.bucket, *arguments)


def _put_back(written: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, before in written:
        tensor.copy_(before)


def _first_changed(before: Mapping[int, torch.Tensor], now: Mapping[int, torch.Tensor]) -> int | None:
    """Finds the first value that differs; waits for the device only once if none does."""
    equal = [(before[index] == rows).all() for index, rows in now.items()]
    if not equal or bool(torch.stack(equal).all()):
        return None
    # NaN equals NaN here, which takes a second comparison.
    differ = (index for index, rows in now.items() if not placeholders.are_same(before[index], rows))
    return next(differ, None)


class BoundaryWarmUp(TorchFunctionMode):
    """Calls the `warm_up` of each boundary op instead of the op; tensors with tokens have `num_rows` rows."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = boundary_ops.lookup(func)
        return func(*args, **(kwargs or {})) if op is None else self._served(op, args, kwargs or {})

    def _served(self, op: BoundaryOp, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if op.warm_up is not None:
            shown = (args, kwargs) if _takes_more(op.warm_up) else ((), {})
            op.warm_up(self._num_rows, *shown[0], **shown[1])


class CapturedWarmUp(BoundaryWarmUp):
    """Writes placeholders into graph-owned memory that boundary ops would write, then runs the ops.

    Args:
        outside: tensors that the graph does not own; their contents are left alone.
        variant: which poison padded rows get, as for `poison_value`.
    """

    def __init__(self, outside: Iterable[torch.Tensor], num_rows: int, real_rows: int, variant: int) -> None:
        super().__init__(num_rows)
        self._outside = {storage_of(tensor) for tensor in outside}
        self._real_rows, self._variant = real_rows, variant

    def _served(self, op: BoundaryOp, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._variant == 0:
            super()._served(op, args, kwargs)
        bound = bound_arguments(op.overload, args, kwargs)
        for name in op.mutated:
            for tensor in tensors_in(bound.get(name)):
                if storage_of(tensor) not in self._outside:
                    self._make_up(tensor, (op.token_args or {}).get(name))
        op(*args, **kwargs)

    def _make_up(self, tensor: torch.Tensor, dim: int | None) -> None:
        tensor.copy_(placeholders.placeholder_for(tensor.shape, tensor, seed=0))
        if tensor.dtype.is_floating_point and dim is not None and tensor.shape[dim] == self._num_rows:
            padded = tensor.narrow(dim, self._real_rows, self._num_rows - self._real_rows)
            padded.fill_(poison_value(tensor.dtype, self._variant))


@lru_cache(maxsize=64)
def _takes_more(warm_up: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(warm_up).parameters.values()
    except ValueError:  # a builtin without a signature
        return False
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
