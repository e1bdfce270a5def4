"""Replays a call with static memory and padding overwritten, to see whether anything depends on them.

Before a replay all static memory is overwritten: a replay that reads what an earlier one left there shows
[I2]. During it each padded row is overwritten as soon as it is set, by what was proven of it [I3]. Weights,
state and inputs are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from piecewise.capture.placeholders import OTHER_ROWS, poison_padding_
from piecewise.ir.plan import ValueSpec
from runners.bound_steps import BoundCall, CopyInputs
from runners.rows import poison_value
from runners.step_plan import CallStep, ReplayStep, StaticArgument, StaticInput, StepPlan


@dataclass(frozen=True, slots=True)
class Poison:
    """One run of a call: what padded rows hold, and whether its graphs are replayed.

    Attributes:
        variant: as for `poison_padding_`, None for what the plan itself puts there.
        uses_graphs: without them each graph segment's function is called.
    """

    name: str
    variant: int | None
    uses_graphs: bool = True


AS_SERVED = Poison("padding as served", None)
WITHOUT_GRAPHS = Poison("no graphs, padding as served", None, uses_graphs=False)
_FINITE = (
    Poison("padding of 1e4", 1),
    Poison("padding of -1e4", 2),
    Poison("padding of other rows", OTHER_ROWS),
)


def poisons_for(engine: str, *, is_padded: bool) -> tuple[Poison, ...]:
    """The replays of one call: as it is served, then with poison; NaN on the tape alone, since one that
    becomes an index ends all use of a CUDA device."""
    if not is_padded:
        return (AS_SERVED,)
    nan = (Poison("padding of nan", 0),) if engine == "tape" else ()
    return (AS_SERVED, *nan, *_FINITE)


def static_inputs_of(steps: StepPlan) -> dict[int, StaticInput]:
    """Value index → the static buffer that graphs read in its place."""
    calls = (step for step in steps.steps if isinstance(step, CallStep))
    shadows = [*steps.copy_ins, *(shadow for step in calls for shadow in step.copies)]
    return {cast(ValueSpec, shadow.value).index: shadow for shadow in shadows}


def overwrite_static_memory(steps: StepPlan, pool: Any, poison: Poison) -> None:
    """Overwrites the pool and the plan's static buffers; the next replay must write all that it reads."""
    pool.overwrite_with_garbage()
    for metadata in steps.step_metadata:
        metadata.clear()
    variant = poison.variant if poison.variant is not None else 1
    for shadow in static_inputs_of(steps).values():
        dtype = shadow.buffer.dtype
        is_float = dtype.is_floating_point or dtype.is_complex
        shadow.buffer.fill_(poison_value(dtype, variant) if is_float else 0)


def _set_at(bound: Any, steps: StepPlan) -> Mapping[int, list[tuple[torch.Tensor, ValueSpec]]]:
    """Per position in the bound steps, the static tensors whose real rows the step there has just set."""
    found: dict[int, list[tuple[torch.Tensor, Any]]] = {}
    planned = iter(steps.steps)
    for position, step in enumerate(bound.steps):
        if isinstance(step, CopyInputs):
            found[position] = [(shadow.buffer, shadow.value) for shadow in steps.copy_ins]
        elif isinstance(step, (ReplayStep, BoundCall)):
            plan_step = next(planned)
            if isinstance(plan_step, CallStep):
                found[position] = [(shadow.buffer, shadow.value) for shadow in plan_step.copies]
                found[position] += [
                    (argument.tensor, argument.value)
                    for argument in plan_step.arguments
                    if isinstance(argument, StaticArgument) and argument.written
                ]
    return found


def replay_with(
    steps: StepPlan,
    leaves: list[Any],
    num_tokens: int,
    poison: Poison,
    *,
    around: Callable[[Any, str | None, Callable[[], None]], None],
) -> list[Any]:
    """One run with poisoned padding, step by step; the result's leaves.

    Args:
        around: called for each step in its stead, as `around(env, name of its segment or None, run)`.
    Raises:
        StateChanged: as `StepPlan.replay`.
    """
    if steps.begin_call is not None:
        steps.begin_call()
    bound = steps._bound.get(num_tokens) or steps._bind(num_tokens)
    pads = {} if poison.variant is None else _set_at(bound, steps)
    env = leaves + [None] * (steps.num_values + len(steps.results))
    names = iter(step.name for step in steps.steps)
    for position, step in enumerate(bound.steps):
        name = next(names) if isinstance(step, (ReplayStep, BoundCall)) else None
        around(env, name, partial(step.replay, env))
        for tensor, value in pads.get(position, ()):
            assert poison.variant is not None
            poison_padding_(tensor, value, num_tokens, steps.padded_num_tokens, variant=poison.variant)
    return [read(env) for read in bound.results]
