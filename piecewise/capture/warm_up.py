"""Runs each segment ahead of its capture, on stand-in values, with poison in the padded rows [I3, I8].

Several runs per graph segment, on the same real rows and other padding: what was proven for each op has to
hold for the segment as it was lowered, so the real rows of its results must be the same bits. docs/DESIGN.md
says what is run of the segments between graphs, and what is made up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from piecewise.capture.boundary_warm_up import BoundaryWarmUp, CapturedWarmUp
from piecewise.capture.faults import SegmentFault, are_same, checked_indices, real_results
from piecewise.capture.poison import anything, poison_padding_
from piecewise.ir.placeholders import placeholder_for, resize_leaf
from piecewise.ir.plan import Segment, SegmentPlan, ValueSpec
from piecewise.streams.streams import StreamSchedules
from runners.engine import Streams
from runners.engines import native_engine
from runners.errors import CaptureError, one_line
from runners.piecewise_runner import PiecewiseRunner
from runners.rows import has_strides, narrow_to, padded_parts, repeat_row_

_INPUTS = ("input", "symbol")


class WarmUp:
    """Warm-ups of one plan; one `run` per bucket, of `num_steps` (one or more) runs of each segment."""

    def __init__(
        self,
        plan: SegmentPlan,
        runners: Mapping[int, PiecewiseRunner],
        *,
        leaves: Sequence[Any],
        num_steps: int,
        streams: StreamSchedules,
        lanes: Streams,
    ) -> None:
        self.plan, self.runners, self.leaves, self.num_steps = plan, runners, tuple(leaves), num_steps
        self.streams, self.lanes = streams, lanes
        self.last_use = last_uses(plan)
        self._warmed_up: set[tuple[Any, ...]] = set()

    def function_for(self, segment: Segment, bucket: int) -> Callable[..., Sequence[Any]]:
        """What is warmed up and captured of a graph segment at a bucket."""
        on_lanes = self.streams.form_for(segment, bucket, self.lanes)
        return on_lanes or self.runners[segment.index].function

    def run(self, bucket: int, real_rows: int, shadows: dict[int, torch.Tensor]) -> None:
        """Warms up every segment at `bucket` rows, `real_rows` of them real.

        Args:
            shadows: value index → static buffer, of inputs and eager results that graphs read; filled here.
        Raises:
            CaptureError: the real rows of a segment change with its padding.
        """
        self._warmed_up.clear()
        inputs = self._inputs(real_rows)
        self._fill_shadows(shadows, inputs, real_rows)
        made: dict[int, torch.Tensor] = dict(shadows)
        eager: dict[int, Any] = dict(inputs)
        for position, segment in enumerate(self.plan.segments):
            if segment.kind == "boundary":
                self._stand_in_for(segment, made, real_rows)
                self._warm_up_boundary(segment, made, bucket)
            elif segment.kind == "eager":
                self._run_eager(segment, made, eager, shadows, real_rows)
            else:
                arguments = static_arguments(segment, self.plan.values, made)
                if segment.views_only:
                    outputs: Sequence[torch.Tensor] = segment.function(bucket, *arguments)
                else:
                    outputs = self._warm_up_segment(segment, bucket, real_rows, arguments)
                made.update(zip(segment.outputs, outputs, strict=True))
            for index in [index for index in made if self.last_use[index] <= position]:
                del made[index]

    def _inputs(self, real_rows: int) -> dict[int, Any]:
        """Value index → the example's input at `real_rows`; a copy where the call writes it."""
        found = {v.index: self._input(v, real_rows) for v in self.plan.values if v.origin in _INPUTS}
        for index, given in found.items():
            if isinstance(given, torch.Tensor) and self.plan.values[index].leaf in self.plan.written_leaves:
                found[index] = given.clone()
        return found

    def _input(self, value: ValueSpec, num_rows: int) -> Any:
        """The example's input, or the size of one, at so many rows."""
        if value.origin == "symbol":
            return value.number_in(self.leaves)
        leaf = self.leaves[value.leaf]
        if not isinstance(leaf, torch.Tensor) or value.sizes is None:
            return leaf
        return resize_leaf(leaf.detach(), value.sizes(num_rows))

    def _fill_shadows(
        self, shadows: Mapping[int, torch.Tensor], inputs: Mapping[int, Any], real_rows: int
    ) -> None:
        for index, buffer in shadows.items():
            value = self.plan.values[index]
            assert value.sizes is not None
            if value.origin == "input" and value.leaf in self.plan.metadata_leaves:
                buffer.zero_()
                continue
            sizes = value.sizes(real_rows)
            rows = inputs[index] if index in inputs else placeholder_for(sizes, buffer, seed=index)
            narrow_to(buffer, sizes).copy_(rows)
            repeat_row_(buffer, sizes, value.units)

    def _run_eager(
        self,
        segment: Segment,
        made: Mapping[int, torch.Tensor],
        eager: dict[int, Any],
        shadows: Mapping[int, torch.Tensor],
        real_rows: int,
    ) -> None:
        arguments: list[Any] = []
        copied_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value in (self.plan.values[index] for index in segment.inputs):
            if value.origin == "graph":
                rows = value.real_rows(made[value.index], real_rows)
                wanted = tuple(value.strides(real_rows)) if value.strides is not None else rows.stride()
                if not has_strides(rows, wanted):
                    dense = rows.new_empty(0).new_empty_strided(tuple(rows.shape), wanted).copy_(rows)
                    copied_back.append((rows, dense))
                    rows = dense
                arguments.append(rows)
            elif value.origin == "state":
                arguments.append(state_tensor(value))
            elif value.index in eager:
                arguments.append(eager[value.index])
            else:
                return  # made by an eager segment that was left out
        try:
            with checked_indices(arguments):
                results = segment.function(real_rows, *arguments)
        except Exception:  # the stand-ins do not suit it; the call itself will say what is wrong, if anything
            return
        for rows, dense in copied_back:
            rows.copy_(dense)
        eager.update(zip(segment.outputs, results, strict=True))
        for index, buffer in shadows.items():
            value = self.plan.values[index]
            renewed = index in segment.outputs or value.memory in segment.writes
            if renewed and index in eager and value.sizes is not None:
                sizes = value.sizes(real_rows)
                narrow_to(buffer, sizes).copy_(eager[index])
                repeat_row_(buffer, sizes, value.units)

    def _warm_up_segment(
        self,
        segment: Segment,
        bucket: int,
        real_rows: int,
        arguments: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        """Runs what serves a segment with one padding after the other."""
        runner, values = self.runners[segment.index], self.plan.values
        taken = [(values[index], tensor) for index, tensor in zip(segment.inputs, arguments, strict=True)]
        written = [(tensor, tensor.clone()) for value, tensor in taken if value.memory in segment.writes]
        first: dict[int, torch.Tensor] = {}
        outputs: Sequence[torch.Tensor] = ()
        function = self.function_for(segment, bucket)
        own = function is segment.own_function
        for step in range(self.num_steps):
            for tensor, before in written:
                tensor.copy_(before)
            for value, tensor in taken:
                poison_padding_(tensor, value, real_rows, bucket, variant=step)
            made_up = CapturedWarmUp(arguments, num_rows=bucket, real_rows=real_rows, variant=step)
            try:
                with made_up if segment.captured_ops else nullcontext():
                    if not own and segment.checks_values:  # what is compiled or fused trusts its indices
                        self._run_own(segment, bucket, arguments)
                        for tensor, before in written:
                            tensor.copy_(before)
                    with checked_indices(arguments) if own else nullcontext():
                        outputs = runner.warm_up(bucket, arguments, fn=function)
                rows = real_results(segment, values, outputs, real_rows)
                if step == 0:
                    first = {index: row.clone() for index, row in rows.items()}
                elif (changed := _first_changed(first, rows)) is not None:
                    raise CaptureError(
                        f"{segment.name}, bucket {bucket}, result '{values[changed].name}'",
                        expected="real rows that do not depend on what padded rows hold",
                        got=f"other values in warm-up {step + 1} than in warm-up 1",
                        rule="no padded row reaches a real row [I3]",
                        fix="leave strict=False, with which the op at fault runs eagerly, and report it",
                    )
            except CaptureError as error:
                for tensor, before in written:
                    tensor.copy_(before)
                raise SegmentFault(
                    error, segment, function, arguments, bucket=bucket, real_rows=real_rows, variant=step
                ) from error
        return outputs

    def _run_own(self, segment: Segment, bucket: int, arguments: Sequence[torch.Tensor]) -> None:
        """Runs a segment as the model has it; only on a device that an index out of range would end."""
        if segment.own_function is None or not any(
            native_engine(tensor.device).dies_of_bad_index for tensor in arguments
        ):
            return
        try:
            with checked_indices(arguments):
                segment.own_function(bucket, *arguments)
        except Exception as error:
            raise CaptureError(
                f"{segment.name}, bucket {bucket}", expected="a segment that runs", got=one_line(error),
                rule="no padded row is an index that is out of range [I3]",
                fix="leave strict=False, with which the op at fault runs eagerly, and report it",
            ) from error  # fmt: skip

    def _stand_in_for(self, segment: Segment, made: dict[int, torch.Tensor], real_rows: int) -> None:
        """Fills what a boundary op would write: random real rows, poisoned padding."""
        for index in segment.inputs:
            value = self.plan.values[index]
            if value.origin != "graph" or value.memory not in segment.writes or value.sizes is None:
                continue
            tensor, sizes = made[index], value.sizes(real_rows)
            for part in padded_parts(tensor, sizes):
                part.fill_(anything(tensor, 0))
            narrow_to(tensor, sizes).copy_(placeholder_for(sizes, tensor, seed=index))

    def _warm_up_boundary(self, segment: Segment, made: dict[int, torch.Tensor], bucket: int) -> None:
        """Once per kind of boundary segment: the layers of a model differ in their tensors only."""
        arguments: list[Any] = []
        for value in (self.plan.values[index] for index in segment.inputs):
            if value.index in made:
                arguments.append(made[value.index])
            elif value.state is not None:
                arguments.append(value.state.get())
            elif value.origin in _INPUTS:
                arguments.append(self._input(value, bucket))
            else:
                return  # made by an eager segment
        kinds = ((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments)
        key = segment.lowering_key, *kinds
        if key not in self._warmed_up:
            self._warmed_up.add(key)
            with BoundaryWarmUp(bucket):
                segment.function(bucket, *arguments)


def static_arguments(
    segment: Segment, values: Sequence[ValueSpec], made: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    """What a graph segment takes: value index → static memory, and the model's tensors."""
    return [made[index] if index in made else state_tensor(values[index]) for index in segment.inputs]


def state_tensor(value: ValueSpec) -> torch.Tensor:
    """The model's tensor behind a value of origin "state", as it is now."""
    assert value.state is not None
    return value.state.get().detach()


def last_uses(plan: SegmentPlan) -> list[int]:
    """Per value, the position of the last segment that reads or makes something in its memory; results are
    read after all segments."""
    last: dict[int, int] = {}
    for position, segment in enumerate(plan.segments):
        for index in (*segment.inputs, *segment.outputs):
            last[plan.values[index].memory] = position
    for source in plan.result_values:
        if isinstance(source, int):
            last[plan.values[source].memory] = len(plan.segments)
    return [last.get(value.memory, -1) for value in plan.values]


def _first_changed(before: Mapping[int, torch.Tensor], now: Mapping[int, torch.Tensor]) -> int | None:
    """The first value that differs; the device is waited for once, where none does."""
    equal = [(before[index] == rows).all() for index, rows in now.items()]
    if not equal or bool(torch.stack(equal).all()):
        return None
    # NaN is the same as NaN here, and takes a second look.
    return next((index for index, rows in now.items() if not are_same(before[index], rows)), None)
