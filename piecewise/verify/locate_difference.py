"""Finds the first segment of a plan that differs from its function on the real rows, or depends on padding.

Both runs of a segment begin from equal inputs, so that rounding of earlier segments plays no part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import boundary_ops
from piecewise import torch_api
from piecewise.capture.build_plan import PlanAssembler
from piecewise.capture.captured_call import ServedBucket
from piecewise.capture.placeholders import poison_padding_
from piecewise.ir.plan import Segment, ValueSpec, arguments_of, run_plan, state_tensor
from piecewise.ir.tensors import bound_arguments, storage_of, tensors_in, written_arguments
from piecewise.verify.differences import TensorDifference, Tolerance, compare_values
from piecewise.verify.poison import AS_SERVED, Poison, static_inputs_of
from runners.bound_steps import BoundCall, CopyInputs, copied_together, copy_elements
from runners.engines import native_engine
from runners.row_views import place_of
from runners.rows import narrow_to, repeat_row_
from runners.step_plan import CallStep, ReplayStep, StaticArgument

# Called instead of each step that runs a segment: (segment, the call's values, runs the step).
_OnSegment = Callable[[Segment, list[Any], Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class LocatedDifference:
    segment: Segment
    op: str
    tensor: str
    difference: TensorDifference


class _Found(Exception):
    """Ends a walk with its finding."""


class SegmentWalk:
    """Runs one call's plan step by step: it replays graphs, or calls their functions on the same padded
    memory. Random states are restored afterwards."""

    def __init__(
        self, served: ServedBucket, assembler: PlanAssembler,
        *, leaves: Sequence[Any], num_tokens: int, tolerance: Tolerance,
    ) -> None:  # fmt: skip
        self.plan, self.steps, self.assembler = served.plan, served.steps, assembler
        self.leaves, self.num_tokens = list(leaves), num_tokens
        self.bucket = served.steps.padded_num_tokens
        self.device = leaves[served.plan.token_dim.leaf].device
        self.tolerance = replace(tolerance, num_segments=1)  # each alone, on equal inputs
        self._by_name = {segment.name: segment for segment in self.plan.segments}
        # Value index → the tensors that graphs read or made at capture.
        self._static = {index: static.buffer for index, static in static_inputs_of(self.steps).items()}

        def graph_outputs(segment: Segment, arguments: Sequence[Any]) -> Sequence[Any] | None:
            graph = assembler.runners[segment.index].graph_for(self.bucket)
            return graph.outputs if graph is not None else None

        run_plan(self.plan, self._static, self.bucket, on_segment=graph_outputs)

    def run(self, poison: Poison, on_segment: _OnSegment = lambda segment, env, run: run()) -> list[Any]:
        """Serves the call; returns the result's leaves. Raises StateChanged as `StepPlan.replay`."""
        steps, num_tokens, env = self.steps, self.num_tokens, list(self.leaves)
        if steps.begin_call is not None:
            steps.begin_call()
        bound = steps._bound.get(num_tokens) or steps._bind(num_tokens)
        env += [None] * (steps.num_values + len(steps.results))
        planned = iter(steps.steps)
        with native_engine(self.device).fork_random_state(self.device):
            for step in bound.steps:
                runs_segment = isinstance(step, (ReplayStep, BoundCall))
                plan_step = next(planned) if runs_segment else None
                if plan_step is None:
                    step.replay(env)
                else:
                    segment, run = self._by_name[plan_step.name], partial(step.replay, env)
                    if segment.kind == "graph" and not poison.uses_graphs:
                        run = partial(self._call_function, segment)
                    on_segment(segment, env, run)
                if poison.variant is not None:
                    for tensor, value in self._set_by(step, plan_step):
                        poison_padding_(tensor, value, num_tokens, self.bucket, variant=poison.variant)
            return [read(env) for read in bound.results]

    def _set_by(self, step: Any, plan_step: Any) -> list[tuple[torch.Tensor, Any]]:
        """Returns the static tensors whose real rows a step has set."""
        if isinstance(step, CopyInputs):
            return [(static.buffer, static.value) for static in self.steps.copy_ins]
        if not isinstance(plan_step, CallStep):
            return []
        taken = (each for each in plan_step.arguments if isinstance(each, StaticArgument) and each.written)
        copied = [(static.buffer, static.value) for static in plan_step.copies]
        return copied + [(argument.tensor, argument.value) for argument in taken]

    def first_difference(
        self, poison: Poison, prepare: Callable[[Poison], None], *, by_bits: bool = False
    ) -> LocatedDifference | None:
        """Finds the first segment whose step differs from its function on the real rows.

        Args:
            prepare: restores state and inputs to those before the call; called before each walk.
            by_bits: find instead the first segment whose real rows change by any bit with the padding.
        """
        tolerance = None if by_bits else self.tolerance
        as_served: list[list[tuple[ValueSpec, Any, None]]] = []

        def note(segment: Segment, env: list[Any], run: Callable[[], None]) -> None:
            run()
            as_served.append([(v, _copied(self._now(v, env)), None) for v in self._changed(segment)])

        def compare(segment: Segment, env: list[Any], run: Callable[[], None]) -> None:
            expected = as_served.pop(0) if by_bits else self._reference(segment, env)
            try:
                run()
            except Exception as error:
                difference = TensorDifference(detail=f"{type(error).__name__}: {error}")
                raise _Found(LocatedDifference(segment, segment.op_names[0], "", difference)) from error
            for value, wanted, before in expected:
                dim = value.token_dims[0] if value.token_dims else 0
                found = compare_values(wanted, self._now(value, env), tolerance, dim=dim, before=before)
                if found is not None:
                    name = value.state.path if value.state is not None else value.name
                    raise _Found(LocatedDifference(segment, _maker(segment, value.name), name, found))

        if by_bits:
            prepare(poison)
            self.run(AS_SERVED, note)
        located: LocatedDifference | None = self._search(poison, prepare, compare)
        if located is None or located.segment.kind != "graph":
            return located
        op = self._search(poison, prepare, partial(self._find_mixing_op, located.segment, tolerance))
        return located if op is None else replace(located, op=op)

    def _search(self, poison: Poison, prepare: Callable[[Poison], None], on_segment: _OnSegment) -> Any:
        prepare(poison)
        try:
            self.run(poison, on_segment)
        except _Found as found:
            return found.args[0]
        return None

    def _call_function(self, segment: Segment) -> None:
        """Calls the segment's function in place of its graph, on the same static memory."""
        results = segment.function(self.bucket, *arguments_of(segment, self.plan.values, self._static))
        for index, made in zip(segment.outputs, results, strict=True):
            static = self._static[index]
            if static.data_ptr() != made.data_ptr():
                copy_elements(static, made)

    def _changed(self, segment: Segment) -> list[ValueSpec]:
        values = [self.plan.values[index] for index in (*segment.outputs, *segment.inputs)]
        made = {v.index for v in values[: len(segment.outputs)] if v.memory not in segment.unwritten}
        return [v for v in values if v.index in made or (v.is_tensor and v.memory in segment.writes)]

    def _now(self, value: ValueSpec, env: list[Any]) -> Any:
        if value.origin == "graph":
            return value.real_rows(self._static[value.index], self.num_tokens)
        if value.origin == "state":
            return state_tensor(value)
        if value.origin == "symbol":
            return value.number_in(env)
        return env[self.assembler._slot(value.index)]

    def _reference(self, segment: Segment, env: list[Any]) -> list[tuple[ValueSpec, Any, Any]]:
        """Runs the segment's function on the real rows, and restores the state and inputs that it writes.
        Returns (value, its expected rows, its rows before or None)."""
        arguments = self._arguments(segment, env)
        values = [self.plan.values[index] for index in segment.inputs]
        written = [
            (value, argument)
            for value, argument in zip(values, arguments, strict=True)
            if value.is_tensor and value.memory in segment.writes
        ]
        saved = {value.index: argument.clone() for value, argument in written if value.origin != "graph"}
        try:
            with native_engine(self.device).fork_random_state(self.device):
                results = segment.function(self.num_tokens, *arguments)
            expected = [
                (self.plan.values[index], _copied(result), None)
                for index, result in zip(segment.outputs, results, strict=True)
                if self.plan.values[index].memory not in segment.unwritten
            ]
            return expected + [(v, argument.clone(), saved.get(v.index)) for v, argument in written]
        finally:
            for value, argument in written:
                if value.index in saved:
                    argument.copy_(saved[value.index])

    def _arguments(self, segment: Segment, env: list[Any]) -> list[Any]:
        """Copies the real rows of graphs' values into memory laid out as eager's, aliases included."""
        inputs = [self.plan.values[index] for index in segment.inputs]
        groups: dict[Any, list[ValueSpec]] = {}
        for value in inputs:
            if value.origin == "graph" and value.sizes and value.strides and value.offset:
                groups.setdefault((value.memory, value.dtype), []).append(value)
        copies: dict[int, torch.Tensor] = {}
        for group in groups.values():
            places = [place_of(value, self.num_tokens) for value in group]
            together = copied_together(places, [self._now(value, env) for value in group])
            copies.update(zip((value.index for value in group), together, strict=True))
        for value in inputs:
            if value.index not in copies:
                now = self._now(value, env)
                copies[value.index] = now.clone() if value.origin == "graph" else now
        return [copies[value.index] for value in inputs]

    def _find_mixing_op(
        self, wanted: Segment, tolerance: Tolerance | None,
        segment: Segment, env: list[Any], run: Callable[[], None],
    ) -> None:  # fmt: skip
        """Finds the first op of a graph segment whose real rows change with padding. Without a tolerance the
        comparison is with padding that repeats a row, as kernels may round by the number of rows."""
        if segment is not wanted:
            run()
            return
        values = [self.plan.values[index] for index in segment.inputs]
        padded = [tensor.clone() for tensor in arguments_of(segment, self.plan.values, self._static)]
        pairs = list(zip(values, padded, strict=True))
        real = [value.real_rows(rows, self.num_tokens).clone() for value, rows in pairs]
        repeated = [rows.clone() for rows in padded]
        for value, rows in zip(values, repeated, strict=True):
            if value.token_dims and value.sizes is not None and value.padded.is_prefix:
                repeat_row_(rows, value.sizes(self.num_tokens), value.units)
        alone = _op_results(segment, self.num_tokens, real)
        expected = alone if tolerance is not None else _op_results(segment, self.bucket, repeated)
        beside = _op_results(segment, self.bucket, padded)
        for (op, rows), (_, left), (other, right) in zip(alone, expected, beside, strict=False):
            fits = op == other and rows.dim() == right.dim()
            if not fits or any(size > room for size, room in zip(rows.shape, right.shape, strict=True)):
                break
            left, right = narrow_to(left, rows.shape), narrow_to(right, rows.shape)
            if compare_values(left, right, tolerance) is not None:
                raise _Found(op)
        raise _Found(None)


class _OpResults(torch_api.TorchDispatchMode):
    """Records each op's results, and the token arguments that boundary ops write."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, torch.Tensor]] = []
        self._unwritten: dict[int, torch.Tensor] = {}  # held, so that no other memory gets its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = list(tensors_in(result))
        if "empty" in str(func):
            self._unwritten.update((storage_of(item), item) for item in made)
            return result
        for written in tensors_in(written_arguments(func, args, kwargs or {})):
            self._unwritten.pop(storage_of(written), None)
        op, bound = boundary_ops.lookup(func), bound_arguments(func, args, kwargs or {})
        if op is not None:
            made += [bound[name] for name in op.mutated if name in (op.token_args or op.mutated)]
        for item in made:
            if isinstance(item, torch.Tensor) and storage_of(item) not in self._unwritten:
                self.results.append((str(func), item.detach().clone()))
        return result


def _op_results(segment: Segment, num_rows: int, arguments: list[Any]) -> list[tuple[str, torch.Tensor]]:
    with _OpResults() as noted:
        segment.function(num_rows, *arguments)
    return noted.results


def _maker(segment: Segment, name: str) -> str:
    """Returns the op that made the tensor of this name, or all ops of the segment."""
    if len(segment.op_names) == 1:
        return segment.op_names[0]
    stem = name.rstrip("0123456789").rstrip("_")
    named = [op for op in segment.op_names if op.split(".")[-1] == stem or op == stem]
    return named[0] if named else f"one of {', '.join(dict.fromkeys(segment.op_names))}"


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
