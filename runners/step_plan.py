"""One bucket's flat list of steps: copy in · replay · boundary · replay · … · results.

    call (n = 5, bucket 8)   copy-in        replay 0     boundary 1         replay 2     result
    rows                     5 → 8          8            5 (views of 8)     8            5 (cloned)

A captured segment, a boundary call and an eager segment look alike here: a step with `replay(env)`.
Nothing on the way enters Dynamo, an FX interpreter or a GraphModule.

`env` is a list: the call's leaves first, then one slot per value that is made anew on each call. What
graphs own has no slot; steps hold views of it instead. Those views depend on the real row count, so they
are made once per `num_tokens` (`_Bound`) and kept for the row counts used last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from runners.engine import CapturedGraph
from runners.rows import has_strides, narrow_to, padded_parts
from runners.state_check import StateChange, StateCheck, StateRef

Sizes = Callable[[int], Sequence[int]]


class SizedValue(Protocol):
    """What a plan needs to know of a value: its sizes and strides as functions of the row count."""

    @property
    def sizes(self) -> Sizes | None: ...
    @property
    def strides(self) -> Sizes | None: ...
    @property
    def token_dims(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Shadow:
    """A static buffer that graphs read in place of a value made outside of them.

    Attributes:
        slot: the value's place in `env`.
        buffer: padded to the bucket.
        value: sizes of what is copied.
    """

    slot: int
    buffer: torch.Tensor
    value: SizedValue


@dataclass(frozen=True, slots=True)
class StaticArgument:
    """An argument of an eager call that graphs own: narrowed to the real rows; `written` where the call
    writes it."""

    tensor: torch.Tensor
    value: SizedValue
    written: bool


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """A captured segment."""

    graph: CapturedGraph
    name: str


@dataclass(frozen=True, slots=True)
class CallStep:
    """A boundary op or an eager segment, called as `function(num_tokens, *arguments)`.

    Attributes:
        arguments: per position, what graphs own or a slot of `env`.
        results: slots for what it returns.
        copies: results and written values that graphs read later.
    """

    function: Callable[..., Any]
    name: str
    arguments: tuple[StaticArgument | int, ...]
    results: tuple[int, ...] = ()
    copies: tuple[Shadow, ...] = ()


@dataclass(frozen=True, slots=True)
class ResultItem:
    """Where one leaf of the result comes from.

    Attributes:
        kind: "static" (graph memory, narrowed), "slot" (a value of this call), "number" (computed),
            "state" or "const".
        clone: whether the caller must be given memory of its own.
        number_type: `int` or `float` for a number that a tensor carries.
    """

    kind: str
    tensor: torch.Tensor | None = None
    value: SizedValue | None = None
    slot: int = -1
    clone: bool = False
    compute: Callable[..., Any] | None = None
    slots: tuple[int, ...] = ()
    state: StateRef | None = None
    const: Any = None
    number_type: type | None = None


class StateChanged(Exception):
    """The check between two steps found that the model is no longer what was recorded."""

    def __init__(self, change: StateChange | None) -> None:
        super().__init__(change)
        self.change = change


@dataclass(slots=True)
class _CopyIn:
    slot: int
    rows: torch.Tensor
    pads: list[torch.Tensor]

    def replay(self, env: list[Any]) -> None:
        self.rows.copy_(env[self.slot])
        for pad in self.pads:
            pad.zero_()


@dataclass(slots=True)
class _Replay:
    graph: CapturedGraph

    def replay(self, env: list[Any]) -> None:
        self.graph.replay()


@dataclass(slots=True)
class _Check:
    check: StateCheck

    def replay(self, env: list[Any]) -> None:
        if not self.check.is_unchanged():
            change = self.check.find_change()
            if change is not None:
                raise StateChanged(change)


@dataclass(slots=True)
class _Load:
    """Looks up tensors that only eager steps read; they are never recorded [I4]."""

    sources: list[tuple[int, Any, Any]]

    def replay(self, env: list[Any]) -> None:
        for slot, owner, key in self.sources:
            env[slot] = owner[key]


@dataclass(slots=True)
class _Measure:
    """Reads sizes of inputs that are not the token count."""

    sources: tuple[tuple[int, int, int], ...]

    def replay(self, env: list[Any]) -> None:
        for slot, leaf, dim in self.sources:
            env[slot] = env[leaf].shape[dim]


@dataclass(slots=True)
class _Dense:
    position: int
    rows: torch.Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    written: bool


@dataclass(slots=True)
class _Call:
    function: Callable[..., Any]
    arguments: list[Any]
    from_env: list[tuple[int, int]]
    results: tuple[int, ...]
    dense: list[_Dense]
    copies: list[_CopyIn]

    def replay(self, env: list[Any]) -> None:
        arguments = self.arguments.copy()  # the held list must not keep the caller's tensors alive
        for position, slot in self.from_env:
            arguments[position] = env[slot]
        for item in self.dense:
            arguments[item.position] = _dense_copy(item)
        returned = self.function(*arguments)
        for item in self.dense:
            if item.written:
                item.rows.copy_(arguments[item.position])
        for slot, value in zip(self.results, returned, strict=True) if self.results else ():
            env[slot] = value
        for copy in self.copies:
            copy.replay(env)


def _dense_copy(item: _Dense) -> torch.Tensor:
    dense = torch.empty_strided(item.sizes, item.strides, dtype=item.rows.dtype, device=item.rows.device)
    return dense.copy_(item.rows)


@dataclass(slots=True)
class _Bound:
    """The steps for one `num_tokens`, and how to read the results."""

    steps: list[Any]
    results: list[Callable[[list[Any]], Any]]


@dataclass(slots=True)
class StepPlan:
    """The steps that serve one bucket.

    Attributes:
        padded_num_tokens: the bucket.
        num_leaves, num_values: `env` has room for both.
        copy_ins: shadows of inputs, filled before the first step.
        steps: in order.
        state_slots: (slot, place) of tensors that only eager steps read.
        size_slots: (slot, leaf, dim) of sizes that eager steps read.
        results: one per leaf of the result.
        check: what is compared while the first graph runs; before everything where `check_first`.
        max_bound: how many row counts keep their views.
    """

    padded_num_tokens: int
    num_leaves: int
    num_values: int
    copy_ins: tuple[Shadow, ...]
    steps: tuple[ReplayStep | CallStep, ...]
    state_slots: tuple[tuple[int, StateRef], ...]
    size_slots: tuple[tuple[int, int, int], ...]
    results: tuple[ResultItem, ...]
    check: StateCheck
    check_first: bool
    outputs: str = "copy"
    max_bound: int = 64
    _bound: OrderedDict[int, _Bound] = field(default_factory=OrderedDict)

    @property
    def num_bound(self) -> int:
        """How many row counts have their views now."""
        return len(self._bound)

    def replay(self, leaves: list[Any], num_tokens: int) -> list[Any]:
        """Serves one call: the result's leaves, owned by the caller unless `outputs` is "view".

        Raises:
            StateChanged: the model changed; nothing persistent has been written, so the call can run eagerly.
        """
        bound = self._bound.get(num_tokens)
        if bound is None:
            bound = self._bind(num_tokens)
        else:
            self._bound.move_to_end(num_tokens)
        env = leaves + [None] * self.num_values
        for step in bound.steps:
            step.replay(env)
        return [read(env) for read in bound.results]

    def _bind(self, num_tokens: int) -> _Bound:
        with torch.inference_mode(False), torch.no_grad():
            binder = _Binder(self, num_tokens)
            bound = self._bound[num_tokens] = binder.bind()
        if len(self._bound) > self.max_bound:
            self._bound.popitem(last=False)
        return bound


class _Binder:
    """Makes the views of one row count; equal ones (same memory, same shape) are made once."""

    def __init__(self, plan: StepPlan, num_tokens: int) -> None:
        self.plan, self.num_tokens = plan, num_tokens
        self._views: dict[Any, torch.Tensor] = {}
        self._sizes: dict[Any, tuple[int, ...]] = {}

    def bind(self) -> _Bound:
        plan = self.plan
        steps: list[Any] = [self._copy_in(shadow) for shadow in plan.copy_ins]
        check = _Check(plan.check)
        first_graph = next((i for i, step in enumerate(plan.steps) if isinstance(step, ReplayStep)), None)
        early = plan.check_first or first_graph != 0
        if early:
            steps.append(check)
        if plan.state_slots:
            steps.append(_Load([(slot, ref.owner, ref.key) for slot, ref in plan.state_slots]))
        if plan.size_slots:
            steps.append(_Measure(plan.size_slots))
        for position, step in enumerate(plan.steps):
            steps.append(_Replay(step.graph) if isinstance(step, ReplayStep) else self._call(step))
            if position == 0 and not early:
                steps.append(check)
        return _Bound(steps, [self._reader(item) for item in plan.results])

    def _evaluate(self, function: Sizes) -> tuple[int, ...]:
        known = self._sizes.get(function)
        if known is None:
            known = self._sizes[function] = tuple(function(self.num_tokens))
        return known

    def _rows(self, tensor: torch.Tensor, value: SizedValue) -> torch.Tensor:
        if value.sizes is None or not value.token_dims:
            return tensor
        sizes = self._evaluate(value.sizes)
        key = (tensor.data_ptr(), sizes, tensor.stride(), tensor.dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = narrow_to(tensor, sizes)
        return view

    def _copy_in(self, shadow: Shadow) -> _CopyIn:
        rows = self._rows(shadow.buffer, shadow.value)
        return _CopyIn(shadow.slot, rows, padded_parts(shadow.buffer, rows.shape))

    def _call(self, step: CallStep) -> _Call:
        arguments: list[Any] = [self.num_tokens]
        from_env: list[tuple[int, int]] = []
        dense: list[_Dense] = []
        for position, argument in enumerate(step.arguments, start=1):
            if isinstance(argument, int):
                from_env.append((position, argument))
                arguments.append(None)
                continue
            rows = self._rows(argument.tensor, argument.value)
            arguments.append(rows)
            strides = (
                self._evaluate(argument.value.strides)
                if argument.value.strides is not None
                else rows.stride()
            )
            if not has_strides(
                rows, strides
            ):  # eager's tensor is dense here, and kernels may rely on it [I1]
                dense.append(_Dense(position, rows, tuple(rows.shape), strides, argument.written))
                arguments[position] = None
        return _Call(
            step.function,
            arguments,
            from_env,
            step.results,
            dense,
            [self._copy_in(item) for item in step.copies],
        )

    def _reader(self, item: ResultItem) -> Callable[[list[Any]], Any]:
        if item.kind == "static":
            assert item.tensor is not None and item.value is not None
            rows = self._rows(item.tensor, item.value)
            return (lambda env: rows.clone()) if item.clone else (lambda env: rows)
        if item.kind == "slot":
            slot, convert = item.slot, item.number_type
            if convert is not None:
                return lambda env: convert(
                    env[slot].item() if isinstance(env[slot], torch.Tensor) else env[slot]
                )
            return (lambda env: env[slot].clone()) if item.clone else (lambda env: env[slot])
        if item.kind == "number":
            compute, slots, num_tokens = item.compute, item.slots, self.num_tokens
            assert compute is not None
            return lambda env: compute(num_tokens, *(env[slot] for slot in slots))[0]
        if item.kind == "state":
            state = item.state
            assert state is not None
            return lambda env: state.get()
        return lambda env: item.const
