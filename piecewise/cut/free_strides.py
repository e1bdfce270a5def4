"""Finds values whose strides may differ from eager's, because only stride-agnostic boundary ops read them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

import boundary_ops
from boundary_ops import BoundaryOp
from piecewise.ir.plan import InputAt, Segment, ValueSpec


def with_free_strides(
    values: Sequence[ValueSpec], segments: Sequence[Segment], results: Collection[int]
) -> tuple[ValueSpec, ...]:
    """Frees the values that need not have eager's strides; the caller receives `results`."""
    in_memory = Counter(value.memory for value in values)
    taken = {index for segment in segments for index in segment.inputs}
    bound = {index for segment in segments for index in _counted_on(segment)} | set(results)
    made = []
    for value in values:
        is_read = value.index in taken and value.index not in bound
        # Eager's elements of one row are contiguous, and must stay so.
        is_dense = value.strides is not None and value.strides(2)[-1:] == (1,)
        if value.origin == "graph" and in_memory[value.memory] == 1 and is_read and is_dense:
            geometry = f"{value.geometry}, any strides"
            value = dataclasses.replace(value, strides=None, any_strides=True, geometry=geometry)
        made.append(value)
    return tuple(made)


def takers_of_any_strides(segments: Sequence[Segment], values: Sequence[ValueSpec]) -> set[str]:
    """Names the boundary ops whose declaration lets values have other strides than eager's."""
    takers = (segment for segment in segments if any(values[index].any_strides for index in segment.inputs))
    return {segment.op_call.name for segment in takers if segment.op_call is not None}


def op_of(segment: Segment) -> BoundaryOp | None:
    """Returns the boundary op, as declared now, if the segment is only its call."""
    return boundary_ops.lookup(segment.op_call.name) if segment.op_call is not None else None


def _counted_on(segment: Segment) -> set[int]:
    op = op_of(segment)
    if segment.op_call is None or op is None:
        return set(segment.inputs)
    return {
        segment.inputs[argument.position]
        for named, argument in zip(op.overload._schema.arguments, segment.op_call.arguments, strict=False)
        if isinstance(argument, InputAt) and named.name not in op.any_strides
    }
