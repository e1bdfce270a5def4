"""Serves one bucket by a flat list of steps: copy in · replay · boundary · replay · … · results.

A captured segment, a boundary call and an eager segment look alike here: a step with `replay(env)`, where
`env` is a list of the call's leaves, then one slot per value that is made anew on each call. What graphs own
has no slot; steps hold views of it instead. Those views depend on the real row count, so they are made once
per `num_tokens` (`_Bound`) and kept for the row counts used last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from runners import bound_steps
from runners.engine import CapturedGraph
from runners.row_views import BoundRows, RowViews, SizedValue, place_of
from runners.rows import has_strides, is_dense, row_copies
from runners.state.state_check import StateCheck, StateRef


@dataclass(frozen=True, slots=True)
class StaticInput:
    """Describes a static buffer, padded to the bucket, that graphs read in place of `env[slot]`."""

    slot: int
    buffer: torch.Tensor
    value: SizedValue


@dataclass(frozen=True, slots=True)
class StaticArgument:
    """Describes a graph-owned argument of an eager call, on the real rows; whether the call writes it."""

    tensor: torch.Tensor
    value: SizedValue
    written: bool


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """Replays a captured segment."""

    graph: CapturedGraph
    name: str

    def replay(self, env: list[Any]) -> None:
        self.graph.replay()


@dataclass(frozen=True, slots=True)
class CallStep:
    """Calls a boundary op or an eager segment as `function(num_tokens, *arguments)`.

    Attributes:
        arguments: per position, what graphs own or a slot of `env`.
        copies: results and written values that graphs read later.
        direct: how to call the op itself, where all its arguments have one geometry at each call.
        owned: positions in `results` of tensors that the plan has in memory of their own.
    """

    function: Callable[..., Any]
    name: str
    arguments: tuple[StaticArgument | int, ...]
    results: tuple[int, ...] = ()
    copies: tuple[StaticInput, ...] = ()
    direct: bound_steps.DirectCall | None = None
    owned: tuple[int, ...] = ()


# Reads a leaf of the result from `env`.
Reader = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class ResultItem:
    """Says where one leaf of the result comes from.

    Attributes:
        bind: num_tokens → what reads the leaf, if `tensor` is None.
        tensor: graph memory, which is narrowed to the rows of the call.
        slot: the place of a leaf that is cloned and no graph's.
        clone: whether the caller must be given memory of its own.
        memory: cloned results with the same number share memory for the caller as they do here.
    """

    bind: Callable[[int], Reader] | None = None
    tensor: torch.Tensor | None = None
    value: SizedValue | None = None
    slot: int = -1
    clone: bool = False
    memory: int = -1


class _Bound(NamedTuple):
    """Holds the steps for one `num_tokens`, and how to read the results."""

    steps: list[Any]
    results: list[Reader]


@dataclass(slots=True)
class StepPlan:
    """Holds the steps that serve one bucket.

    Attributes:
        padded_num_tokens: the bucket.
        num_leaves, num_values: `env` has room for both.
        copy_ins: static inputs that are filled before the first step.
        state_slots: (slot, place) of tensors that only eager steps read.
        size_slots: (slot, leaf, dim) of sizes that eager steps read.
        check: what is compared on each call before the step at `check_before`, the first whose effects
            an eager run of the call would not overwrite. So late, because the device then has work meanwhile.
        may_run_ahead: whether calls may still be made before the check, as they could when this was planned.
        step_metadata: loaded before each replay, for ops in graphs that read it at fixed addresses.
        max_bound: how many row counts keep their views.
        copier: makes one launch of copies into static buffers, where it can.
    """

    padded_num_tokens: int
    num_leaves: int
    num_values: int
    copy_ins: tuple[StaticInput, ...]
    steps: tuple[ReplayStep | CallStep, ...]
    state_slots: tuple[tuple[int, StateRef], ...]
    size_slots: tuple[tuple[int, int, int], ...]
    results: tuple[ResultItem, ...]
    check: StateCheck
    check_before: int
    begin_call: Callable[[], None] | None = None
    may_run_ahead: Callable[[], bool] = lambda: True
    step_metadata: tuple[bound_steps.Loadable, ...] = ()
    max_bound: int = 64
    copier: Callable[[Sequence[bound_steps.CopyIn]], bound_steps.CopyLaunch | None] | None = None
    _bound: OrderedDict[int, _Bound] = field(default_factory=OrderedDict)
    _binder: _Binder = field(init=False)

    def __post_init__(self) -> None:
        self._binder = _Binder(self)

    def replay(self, leaves: list[Any], num_tokens: int) -> list[Any]:
        """Serves one call; returns the result's leaves, owned by the caller where `clone` says so.

        Raises `StateChanged` before anything is left that an eager run of the call would not write anew.
        """
        if self.begin_call is not None:
            self.begin_call()
        bound = self._bound.get(num_tokens)
        if bound is None:
            bound = self._bind(num_tokens)
        else:
            self._bound.move_to_end(num_tokens)
        env = leaves + [None] * (self.num_values + len(self.results))
        try:
            for step in bound.steps:
                step.replay(env)
        except bound_steps.StateChanged:
            raise
        except Exception:
            # It may be no fault of the call: the model changed, which was not looked at yet.
            bound_steps.raise_change(self.check)
            raise
        return [read(env) for read in bound.results]

    def _bind(self, num_tokens: int) -> _Bound:
        with torch.inference_mode(False), torch.no_grad():
            bound = self._bound[num_tokens] = self._binder.bind(num_tokens)
        if len(self._bound) > self.max_bound:
            self._bound.popitem(last=False)
        return bound


class _CallTemplate(NamedTuple):
    """Holds a call step and what does not depend on the row count; `views` index the row views."""

    step: CallStep
    views: list[int]
    from_env: list[tuple[int, int]]
    copies: list[tuple[StaticInput, int]]


class _Binder:
    """Makes the steps of one row count: only views are new, all else was prepared with the plan."""

    def __init__(self, plan: StepPlan) -> None:
        self._copier = plan.copier
        self._views = RowViews()
        self._copy_ins = self._with_views(plan.copy_ins)
        self._steps: list[Any] = [s if isinstance(s, ReplayStep) else self._template(s) for s in plan.steps]
        self._results = [
            (item, self._views.add(item.tensor, item.value) if item.tensor is not None else -1)
            for item in plan.results
        ]
        self._groups = _shared_results(plan.results)
        self._first_copy = plan.num_leaves + plan.num_values
        calls = [at for at, step in enumerate(plan.steps) if isinstance(step, CallStep)]
        first_call = calls[0] if calls else len(plan.steps)
        is_asked = plan.state_slots or plan.size_slots
        look: list[Any] = [bound_steps.LookUp(plan.state_slots, plan.size_slots)] if is_asked else []
        # A check goes before all look-ups: what it finds may be that a place is gone.
        if plan.check_before <= first_call:
            self._steps[plan.check_before : plan.check_before] = [bound_steps.Check(plan.check), *look]
        else:
            self._steps.insert(plan.check_before, bound_steps.Check(plan.check))
            self._steps[first_call:first_call] = [bound_steps.Check(plan.check, plan.may_run_ahead), *look]
        self._loads = [bound_steps.LoadStep(metadata) for metadata in plan.step_metadata]

    def _with_views(self, inputs: Sequence[StaticInput]) -> list[tuple[StaticInput, int]]:
        return [(each, self._views.add(each.buffer, each.value)) for each in inputs]

    def _template(self, step: CallStep) -> _CallTemplate:
        views, from_env = [], []
        for position, argument in enumerate(step.arguments, start=1):
            if isinstance(argument, int):
                from_env.append((position, argument))
                views.append(-1)
            else:
                views.append(self._views.add(argument.tensor, argument.value))
        return _CallTemplate(step, views, from_env, self._with_views(step.copies))

    def bind(self, num_tokens: int) -> _Bound:
        rows = self._views.bind(num_tokens)
        steps: list[Any] = list(self._loads)
        copies = self._copy_inputs(self._copy_ins, rows)
        steps += [copies] if copies is not None else []
        steps += [
            self._call(step, num_tokens, rows) if isinstance(step, _CallTemplate) else step
            for step in self._steps
        ]
        readers = [_reader(item, num_tokens, rows.views[index]) for item, index in self._results]
        for group in self._groups:
            steps.append(self._copy_out(group, num_tokens, rows))
            for position in group:
                readers[position] = itemgetter(self._first_copy + position)
        return _Bound(steps, readers)

    def _call(self, template: _CallTemplate, num_tokens: int, rows: BoundRows) -> bound_steps.BoundCall:
        step, views = template.step, rows.views
        arguments = [num_tokens, *(views[index] for index in template.views)]
        dense: list[bound_steps.Dense] = []
        for index in dict.fromkeys(template.views) if rows.other_strides else ():
            if (strides := rows.other_strides.get(index)) is None:
                continue
            positions = tuple(at for at, taken in enumerate(template.views, start=1) if taken == index)
            taken_as = (step.arguments[at - 1] for at in positions)
            written = any(isinstance(taken, StaticArgument) and taken.written for taken in taken_as)
            dense.append(bound_steps.Dense(positions, views[index], strides, written))
            for at in positions:
                arguments[at] = None
        copies = self._copy_inputs(template.copies, rows)
        # Of one row, `contiguous()` or `sum_to_size` return what they were given, where the plan has a copy.
        function = _with_own_memory(step) if num_tokens == 1 and step.owned else step.function
        parts = (function, arguments, template.from_env, step.results, dense, copies)
        if step.direct is None or dense:
            return bound_steps.BoundCall(*parts)
        return bound_steps.BoundOpCall(*parts, step.direct)

    def _copy_inputs(self, inputs: Sequence[Any], rows: BoundRows) -> bound_steps.CopyInputs | None:
        copies = [
            bound_steps.CopyIn(x.slot, x.buffer, real, row_copies(x.buffer, real.shape, units), units)
            for x, index in inputs
            for real, units in [(rows.views[index], x.value.units)]
        ]
        if not copies:
            return None
        return bound_steps.CopyInputs(copies, self._copier(copies) if self._copier is not None else None)

    def _copy_out(self, group: list[int], num_tokens: int, rows: BoundRows) -> bound_steps.CopyOut:
        """Copies the results at these positions, laid out as in eager's memory."""
        found = []
        for position in group:
            item, index = self._results[position]
            assert item.value is not None
            source = item.slot if index < 0 else rows.views[index]
            found.append((self._first_copy + position, source, place_of(item.value, num_tokens)))
        return bound_steps.CopyOut(found)


def _with_own_memory(step: CallStep) -> Callable[..., Any]:
    """Wraps a step so that owned results in graph memory are copied before a later step reuses it."""
    taken = enumerate(step.arguments, start=1)
    static = [at for at, argument in taken if isinstance(argument, StaticArgument)]

    def call(*arguments: Any) -> list[Any]:
        results = list(step.function(*arguments))
        held = {arguments[at].untyped_storage().data_ptr() for at in static}
        for position in step.owned:
            result = results[position]
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in held:
                results[position] = result.clone()
        return results

    return call


def _reader(item: ResultItem, num_tokens: int, rows: torch.Tensor | None) -> Reader:
    if rows is None:
        assert item.bind is not None
        return item.bind(num_tokens)
    if not item.clone:
        return lambda env: rows
    strides = item.value.strides if item.value is not None else None
    wanted = tuple(strides(num_tokens)) if strides is not None else rows.stride()
    if strides is None or has_strides(rows, wanted) and is_dense(rows.shape, wanted):
        return lambda env: rows.clone()
    return lambda env: bound_steps.own_copy(rows, wanted)


def _shared_results(results: tuple[ResultItem, ...]) -> list[list[int]]:
    """Groups the positions of results to clone that share memory."""
    found: dict[Any, list[int]] = {}
    for position, item in enumerate(results):
        value = item.value
        if item.clone and value is not None and value.sizes and value.strides and value.offset:
            found.setdefault((item.memory, value.dtype), []).append(position)
    return [group for group in found.values() if len(group) > 1]
