"""Which segment of a plan is the first that differs: each beside its own function on the real rows alone.

Both begin from equal inputs, so the rounding of earlier segments plays no part, and a fault shows in the
segment that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import boundary_ops
from piecewise.assemble import PlanAssembler
from piecewise.differences import TensorDifference, Tolerance, compare_tensors
from piecewise.plan import Segment, ValueSpec
from piecewise.poison import AS_SERVED, Poison, replay_with, shadows_of
from piecewise.row_samples import unchanged_random_state
from piecewise.signatures import ServedBucket
from piecewise.tensors import bound_arguments, storage_of, tensors_in, written_arguments
from piecewise.warm_up import state_tensor, static_arguments
from runners.bound_steps import copied_together, copy_elements
from runners.row_views import place_of
from runners.rows import narrow_to


@dataclass(frozen=True, slots=True)
class Located:
    """The first segment that differs.

    Attributes:
        op, tensor: as in `Difference`.
        difference: how far, or None where the plan's step raised an error, told in `detail`.
    """

    segment: Segment
    op: str
    tensor: str
    difference: TensorDifference | None
    detail: str = ""


class _Found(Exception):
    """Ends a walk with what it looked for."""


# For each step of a walk: the call's values, the name of its segment, if it has one, and what runs it.
_Around = Callable[[list[Any], str | None, Callable[[], None]], None]


class SegmentWalk:
    """Walks one call's plan, with the replay of its graphs or, where a run is without them, with a call of
    their functions on the same padded memory.

    Before each walk state and inputs must be those of before the call: for that the caller gives a `prepare`,
    or sees to it. A walk leaves random numbers as they are.
    """

    def __init__(
        self,
        served: ServedBucket,
        assembler: PlanAssembler,
        *,
        leaves: Sequence[Any],
        num_tokens: int,
        tolerance: Tolerance,
    ) -> None:
        self.plan, self.steps, self.assembler = served.plan, served.steps, assembler
        self.leaves, self.num_tokens = list(leaves), num_tokens
        self.bucket = served.steps.padded_num_tokens
        self.device = leaves[served.plan.token_dim.leaf].device
        self.tolerance = replace(tolerance, num_segments=1)  # each alone, on equal inputs
        self._by_name = {segment.name: segment for segment in self.plan.segments}
        # Value index → what graphs read or made, as at the capture.
        self._static = {index: shadow.buffer for index, shadow in shadows_of(self.steps).items()}
        for segment in self.plan.graph_segments():
            if segment.views_only:
                outputs: Sequence[Any] = segment.function(
                    self.bucket, *static_arguments(segment, self.plan.values, self._static)
                )
            else:
                graph = self.assembler.runners[segment.index].graph_for(self.bucket)
                outputs = graph.outputs if graph is not None else ()
            self._static.update(zip(segment.outputs, outputs, strict=False))

    def beside_functions(self, poison: Poison, prepare: Callable[[], None]) -> Located | None:
        """The first segment whose step is not its function on the real rows."""
        prepare()

        def around(env: list[Any], name: str | None, run: Callable[[], None]) -> None:
            if name is None:
                run()
                return
            segment = self._by_name[name]
            with unchanged_random_state(self.device):
                expected = self._reference(segment, env)
            try:
                run()
            except Exception as error:
                detail = f"{type(error).__name__}: {error}"
                raise _Found(Located(segment, segment.op_names[0], "", None, detail)) from error
            for value, wanted, before in expected:
                self._compare(segment, value, wanted, env, self.tolerance, before=before)

        return self._with_op(self._walk(poison, around), poison, prepare, self.tolerance)

    def beside_unpoisoned(self, poison: Poison, prepare: Callable[[], None]) -> Located | None:
        """The first segment whose real rows change by any bit with what padded rows hold."""
        before: list[list[tuple[ValueSpec, Any]]] = []

        def note(env: list[Any], name: str | None, run: Callable[[], None]) -> None:
            run()
            if name is not None:
                before.append([(v, _copied(self._now(v, env))) for v in self._changed(self._by_name[name])])

        def compare(env: list[Any], name: str | None, run: Callable[[], None]) -> None:
            run()
            for value, wanted in before.pop(0) if name is not None else ():
                self._compare(self._by_name[name or ""], value, wanted, env, None)

        prepare()
        self._walk(AS_SERVED, note)
        prepare()
        return self._with_op(self._walk(poison, compare), poison, prepare, None)

    def _with_op(
        self,
        found: Located | None,
        poison: Poison,
        prepare: Callable[[], None],
        tolerance: Tolerance | None,
    ) -> Located | None:
        """`found`, with the op of a graph segment that mixes rows, where one does."""
        if found is None or found.segment.kind != "graph":
            return found
        alone, beside = self._op_results(found.segment, poison, prepare)
        # A kernel may round otherwise at another number of rows, so bits are compared at the same one.
        other = None if tolerance is not None else self._op_results(found.segment, AS_SERVED, prepare)[1]
        op = _first_different(alone, beside, tolerance, other)
        return found if op is None else replace(found, op=op, detail="")

    def _walk(self, poison: Poison, around: _Around) -> Any:
        try:
            self._run(poison, around)
        except _Found as found:
            return found.args[0]
        return None

    def result(self, poison: Poison) -> list[Any]:
        """The call served by this walk: the result's leaves.

        Raises:
            StateChanged: as `StepPlan.replay`.
        """
        return self._run(poison, lambda env, name, run: run())

    def _run(self, poison: Poison, around: _Around) -> list[Any]:
        def step(env: list[Any], name: str | None, run: Callable[[], None]) -> None:
            segment = self._by_name[name] if name is not None else None
            if segment is not None and segment.kind == "graph" and not poison.uses_graphs:
                around(env, name, partial(self._call_function, segment))
            else:
                around(env, name, run)

        with unchanged_random_state(self.device):
            return replay_with(self.steps, self.leaves, self.num_tokens, poison, around=step)

    def _call_function(self, segment: Segment) -> None:
        """What the segment's graph does, done by its function: reads and writes static memory."""
        results = segment.function(self.bucket, *static_arguments(segment, self.plan.values, self._static))
        for index, made in zip(segment.outputs, results, strict=True):
            static = self._static[index]
            if static.data_ptr() != made.data_ptr():
                copy_elements(static, made)

    def _changed(self, segment: Segment) -> list[ValueSpec]:
        """What a segment makes or writes, each tensor once."""
        values = [self.plan.values[index] for index in (*segment.outputs, *segment.inputs)]
        made = {v.index for v in values[: len(segment.outputs)] if v.memory not in segment.unwritten}
        return [v for v in values if v.index in made or (v.is_tensor and v.memory in segment.writes)]

    def _compare(
        self,
        segment: Segment,
        value: ValueSpec,
        wanted: Any,
        env: list[Any],
        tolerance: Tolerance | None,
        *,
        before: torch.Tensor | None = None,
    ) -> None:
        """Ends the walk where a value is not the one wanted; to the bit without a tolerance."""
        found = self._now(value, env)
        name = value.state.path if value.state is not None else value.name
        op = _maker(segment, value.name)
        if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
            dim = value.token_dims[0] if value.token_dims else 0
            difference = compare_tensors(wanted, found, tolerance, dim=dim, before=before)
            if difference is not None:
                raise _Found(Located(segment, op, name, difference))
        elif not (wanted == found or (wanted != wanted and found != found)):
            raise _Found(Located(segment, op, name, None, f"{found!r} where eager has {wanted!r}"))

    def _now(self, value: ValueSpec, env: list[Any]) -> Any:
        """The value's real rows as the plan holds them."""
        return self._real(value) if value.origin == "graph" else self._outside(value, env)

    def _real(self, value: ValueSpec) -> torch.Tensor:
        return value.real_rows(self._static[value.index], self.num_tokens)

    def _outside(self, value: ValueSpec, env: list[Any]) -> Any:
        if value.origin == "state":
            return state_tensor(value)
        if value.origin == "symbol":
            return value.number_in(env)
        return env[self.assembler._slot(value.index)]

    def _reference(self, segment: Segment, env: list[Any]) -> list[tuple[ValueSpec, Any, Any]]:
        """What the segment's function makes and writes on the real rows, and what state and inputs that it
        writes were before, None for others; these are put back."""
        arguments = self._arguments(segment, env)
        values = [self.plan.values[index] for index in segment.inputs]
        written = [
            (value, argument)
            for value, argument in zip(values, arguments, strict=True)
            if value.is_tensor and value.memory in segment.writes
        ]
        saved = {value.index: argument.clone() for value, argument in written if value.origin != "graph"}
        try:
            results = segment.function(self.num_tokens, *arguments)
            expected = [
                (self.plan.values[index], _copied(result), None)
                for index, result in zip(segment.outputs, results, strict=True)
                if self.plan.values[index].memory not in segment.unwritten
            ]
            expected += [(v, argument.clone(), saved.get(v.index)) for v, argument in written]
        finally:
            for value, argument in written:
                if value.index in saved:
                    argument.copy_(saved[value.index])
        return expected

    def _arguments(self, segment: Segment, env: list[Any]) -> list[Any]:
        """The real rows of what graphs made, in memory laid out as eager's: those that share memory there
        share it here."""
        inputs = [self.plan.values[index] for index in segment.inputs]
        groups: dict[Any, list[ValueSpec]] = {}
        for value in inputs:
            if value.origin == "graph" and value.sizes and value.strides and value.offset:
                groups.setdefault((value.memory, value.dtype), []).append(value)
        copies: dict[int, torch.Tensor] = {}
        for group in groups.values():
            places = [place_of(value, self.num_tokens) for value in group]
            together = copied_together(places, list(map(self._real, group)))
            copies.update(zip((value.index for value in group), together, strict=True))
        found = []
        for value in inputs:
            if value.index in copies:
                found.append(copies[value.index])
            elif value.origin == "graph":
                found.append(self._real(value).clone())
            else:
                found.append(self._outside(value, env))
        return found

    def _op_results(
        self, segment: Segment, poison: Poison, prepare: Callable[[], None]
    ) -> tuple[_OpResults, _OpResults]:
        """What each op of a graph segment makes of the real rows alone, and of the padded ones."""
        alone, beside = _OpResults(), _OpResults()

        def around(env: list[Any], name: str | None, run: Callable[[], None]) -> None:
            if name != segment.name:
                run()
                return
            values = [self.plan.values[index] for index in segment.inputs]
            padded = [tensor.clone() for tensor in static_arguments(segment, self.plan.values, self._static)]
            pairs = zip(values, padded, strict=True)
            real = [value.real_rows(rows, self.num_tokens).clone() for value, rows in pairs]
            with alone:
                segment.function(self.num_tokens, *real)
            with beside:
                segment.function(self.bucket, *padded)
            raise _Found(None)

        prepare()
        self._walk(poison, around)
        return alone, beside


class _OpResults(TorchDispatchMode):
    """Notes what each op returns, and what a boundary op writes of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, torch.Tensor]] = []
        self._unwritten: dict[int, torch.Tensor] = {}  # held, so that no other memory gets its place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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


def _first_different(
    alone: _OpResults, beside: _OpResults, tolerance: Tolerance | None, other: _OpResults | None
) -> str | None:
    """The first op whose real rows beside padding are not those alone, or, if given, beside other padding."""
    others = [padded for _, padded in other.results] if other is not None else [None] * len(alone.results)
    for (op, real), (same, padded), expected in zip(alone.results, beside.results, others, strict=False):
        fits = op == same and real.dim() == padded.dim()
        if not fits or any(size > room for size, room in zip(real.shape, padded.shape, strict=True)):
            return None
        wanted = real if expected is None else narrow_to(expected, real.shape)
        if compare_tensors(wanted, narrow_to(padded, real.shape), tolerance) is not None:
            return op
    return None


def _maker(segment: Segment, name: str) -> str:
    """The op that made a tensor of this name, or all ops of the segment where no name tells."""
    if len(segment.op_names) == 1:
        return segment.op_names[0]
    stem = name.rstrip("0123456789").rstrip("_")
    named = [op for op in segment.op_names if op.split(".")[-1] == stem or op == stem]
    return named[0] if named else f"one of {', '.join(dict.fromkeys(segment.op_names))}"


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
