"""Runs the segments of a plan in order, for warm-ups, captures, comparisons and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecewise.ir.plan import Segment, SegmentPlan, ValueSpec

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
    last_use = _last_uses(plan) if on_live is not None else []
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
            on_live({index for index in env if last_use[index] > position})


def arguments_of(segment: Segment, values: Sequence[ValueSpec], env: Mapping[int, Any]) -> list[Any]:
    """Returns a segment's arguments: values of `env`, and the model's present tensors."""
    return [env[index] if index in env else state_tensor(values[index]) for index in segment.inputs]


def state_tensor(value: ValueSpec) -> torch.Tensor:
    """Returns the model's present tensor of a value of origin "state"."""
    assert value.state is not None
    return value.state.get().detach()


def _last_uses(plan: SegmentPlan) -> list[int]:
    """Finds per value the last segment that uses its memory; results are read after all segments."""
    last: dict[int, int] = {}
    for position, segment in enumerate(plan.segments):
        for index in (*segment.inputs, *segment.outputs):
            last[plan.values[index].memory] = position
    for source in plan.result_values:
        if isinstance(source, int):
            last[plan.values[source].memory] = len(plan.segments)
    return [last.get(value.memory, -1) for value in plan.values]
