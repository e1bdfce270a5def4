"""Says what static memory and padding hold in a run of a call, to see whether results depend on them.

Before a replay all static memory is overwritten, which shows a replay that reads what an earlier one left
[I2]. During it each padded row is overwritten as soon as it is set, within what was proven of it [I3].
Weights, state and inputs are never overwritten.
"""

from dataclasses import dataclass
from typing import Any, cast

from piecewise.capture.placeholders import OTHER_ROWS
from piecewise.ir.plan import ValueSpec
from runners.engine import GraphEngine
from runners.rows import poison_value
from runners.step_plan import CallStep, StaticInput, StepPlan


@dataclass(frozen=True, slots=True)
class Poison:
    """Describes one run of a call: what padded rows hold, as `variant` of `poison_padding_` or as the plan
    pads them (None), and whether graphs are replayed or their segments' functions called."""

    name: str
    variant: int | None
    uses_graphs: bool = True


AS_SERVED = Poison("padding as served", None)
WITHOUT_GRAPHS = Poison("no graphs, padding as served", None, uses_graphs=False)
_OTHERS = {"1e4": 1, "-1e4": 2, "other rows": OTHER_ROWS}
_FINITE = tuple(Poison(f"padding of {what}", variant) for what, variant in _OTHERS.items())


def poisons_for(engine: GraphEngine, *, is_padded: bool) -> tuple[Poison, ...]:
    """Returns one call's replays, as served and poisoned; no NaN where a bad index ends a device's use."""
    if not is_padded:
        return (AS_SERVED,)
    nan = (Poison("padding of nan", 0),) if not engine.dies_of_bad_index else ()
    return (AS_SERVED, *nan, *_FINITE)


def static_inputs_of(steps: StepPlan) -> dict[int, StaticInput]:
    """Returns value index → the static buffer that graphs read in its place."""
    calls = (step for step in steps.steps if isinstance(step, CallStep))
    inputs = [*steps.copy_ins, *(each for step in calls for each in step.copies)]
    return {cast(ValueSpec, each.value).index: each for each in inputs}


def overwrite_static_memory(steps: StepPlan, pool: Any, poison: Poison) -> None:
    """Overwrites the pool and the plan's static buffers, so that a replay must write all that it reads."""
    pool.overwrite_with_garbage()
    for metadata in steps.step_metadata:
        metadata.clear()
    variant = poison.variant if poison.variant is not None else 1
    for shadow in static_inputs_of(steps).values():
        dtype = shadow.buffer.dtype
        is_float = dtype.is_floating_point or dtype.is_complex
        shadow.buffer.fill_(poison_value(dtype, variant) if is_float else 0)
