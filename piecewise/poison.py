"""What padded rows and static memory are filled with, to see whether anything depends on them [I2, I3].

Before a replay all static memory is overwritten: a replay that reads what an earlier one left there shows.
During the replay each padded row is overwritten as soon as the plan has set it: a real row that depends on
one shows. Weights, state and inputs are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from piecewise.plan import ValueSpec
from piecewise.row_samples import int_candidates
from runners.bound_steps import Call, CopyIn, CopyInputs, Replay
from runners.rows import padded_parts, poison_value
from runners.step_plan import CallStep, Shadow, StaticArgument, StepPlan


@dataclass(frozen=True, slots=True)
class Poison:
    """What padded rows hold; `variant` as in `poison_value`, None for what the plan itself puts there, or
    real rows in another order where `is_shuffled`."""

    name: str
    variant: int | None
    is_shuffled: bool = False

    @property
    def is_served(self) -> bool:
        return self.variant is None and not self.is_shuffled

    def fill_(self, rows: torch.Tensor, pads: list[torch.Tensor]) -> None:
        """Fills padded rows: floats with the poison, integers with a value that a real row has; all with
        other rows where `is_shuffled`."""
        if self.is_served or not pads:
            return
        if self.variant is None:
            for pad in pads:
                pad.copy_(_shuffled(rows, pad.shape))
            return
        dtype = rows.dtype
        is_other = dtype.is_floating_point or dtype.is_complex or dtype is torch.bool
        value = poison_value(dtype, self.variant) if is_other else int_candidates(rows)[self.variant]
        for pad in pads:
            pad.fill_(value)


AS_SERVED = Poison("padding as served", None)
_FINITE = (
    Poison("padding of 1e4", 1),
    Poison("padding of -1e4", 2),
    Poison("padding of shuffled rows", None, is_shuffled=True),
)


def _shuffled(rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Real rows in another order, as many as `sizes` says: what looks right is the harder poison for an op
    that asks whether a row is sound."""
    if rows.shape == torch.Size(sizes):
        return rows.flip(0)
    for dim, size in enumerate(sizes):
        if rows.shape[dim] != size:
            order = torch.randperm(rows.shape[dim], generator=torch.Generator().manual_seed(dim))
            order = order.repeat(-(-size // max(len(order), 1)))[:size]
            rows = rows.index_select(dim, order.to(rows.device))
    return rows


def poisons_for(engine: str, *, is_padded: bool) -> tuple[Poison, ...]:
    """The replays of one call: as it is served, then with poison; NaN on the tape alone, since one that
    becomes an index ends all use of a CUDA device."""
    if not is_padded:
        return (AS_SERVED,)
    nan = (Poison("padding of nan", 0),) if engine == "tape" else ()
    return (AS_SERVED, *nan, *_FINITE)


def shadows_of(steps: StepPlan) -> dict[int, Shadow]:
    """Value index → the static buffer that graphs read in its place."""
    found = {}
    for shadow in [*steps.copy_ins, *(s for step in call_steps(steps) for s in step.copies)]:
        found[cast(ValueSpec, shadow.value).index] = shadow
    return found


def call_steps(steps: StepPlan) -> list[CallStep]:
    return [step for step in steps.steps if isinstance(step, CallStep)]


def spoil_static_memory(steps: StepPlan, pool: Any, poison: Poison) -> None:
    """Overwrites the pool and the plan's static buffers; the next replay must write all that it reads."""
    pool.spoil()
    for metadata in steps.step_metadata:
        metadata.clear()
    variant = poison.variant if poison.variant is not None else 1
    for shadow in shadows_of(steps).values():
        dtype = shadow.buffer.dtype
        is_float = dtype.is_floating_point or dtype.is_complex
        shadow.buffer.fill_(poison_value(dtype, variant) if is_float else 0)


def pads_after(
    bound: Any, steps: StepPlan, num_tokens: int
) -> Mapping[int, list[tuple[torch.Tensor, list[torch.Tensor]]]]:
    """Per position in the bound steps, (real rows, padded parts) of what the step there has just set."""
    found: dict[int, list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
    planned = iter(steps.steps)
    for position, step in enumerate(bound.steps):
        if isinstance(step, (CopyIn, CopyInputs)):
            copies = step.copies if isinstance(step, CopyInputs) else [step]
            found[position] = [_split(copy.rows, _whole(copy, steps)) for copy in copies]
        elif isinstance(step, (Replay, Call)):
            plan_step = next(planned)
            if isinstance(step, Call) and isinstance(plan_step, CallStep):
                found[position] = [_split(copy.rows, _whole(copy, steps)) for copy in step.copies]
                for argument in plan_step.arguments:
                    if isinstance(argument, StaticArgument) and argument.written:
                        found[position].append(_argument_parts(argument, num_tokens))
    return found


def _whole(step: CopyIn, steps: StepPlan) -> torch.Tensor:
    at = step.rows.data_ptr()
    return next((s.buffer for s in shadows_of(steps).values() if s.buffer.data_ptr() == at), step.rows)


def _split(rows: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return rows, padded_parts(whole, rows.shape)


def _argument_parts(argument: StaticArgument, num_tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    value, tensor = argument.value, argument.tensor
    if not value.token_dims or value.sizes is None:
        return tensor, []
    sizes = tuple(value.sizes(num_tokens))
    rows = tensor
    for dim, size in enumerate(sizes):
        rows = rows.narrow(dim, 0, size)
    return rows, padded_parts(tensor, sizes)


def replay_with(
    steps: StepPlan,
    leaves: list[Any],
    num_tokens: int,
    poison: Poison,
    *,
    around: Callable[[Any, str | None, Callable[[], None]], None] | None = None,
) -> list[Any]:
    """One replay with poisoned padding, step by step; the result's leaves.

    Args:
        around: called for each step in its stead, as `around(env, name of its segment or None, run)`.
    Raises:
        StateChanged: as `StepPlan.replay`.
    """
    if steps.begin_call is not None:
        steps.begin_call()
    bound = steps._bound.get(num_tokens) or steps._bind(num_tokens)
    pads = {} if poison.is_served else pads_after(bound, steps, num_tokens)
    env = leaves + [None] * (steps.num_values + len(steps.results))
    names = iter(step.name for step in steps.steps)
    for position, step in enumerate(bound.steps):
        name = next(names) if isinstance(step, (Replay, Call)) else None
        if around is None:
            step.replay(env)
        else:
            around(env, name, lambda step=step: step.replay(env))  # type: ignore[misc]
        for rows, parts in pads.get(position, ()):
            poison.fill_(rows, parts)
    return [read(env) for read in bound.results]
