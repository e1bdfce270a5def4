"""Makes the results of a graph segment from those of a compiled function that knows no aliases.

A compiler takes each tensor for memory of its own. Aliasing is restored here, outside of the compiled code,
from the sizes, strides and offsets of the plan. A segment that writes memory of several of its inputs is not
compiled.

=============================  =========================================================================
results in an input's memory   views of the input, made afterwards
results of one memory that     one result that covers the others, which become views of it; where none
somebody writes, or that the   does, each is copied into one memory
caller is given
all other results              the function's own, with the plan's strides, no two in one memory; any
                               strides where only stride-agnostic boundary ops read them
=============================  =========================================================================
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from piecewise.ir.plan import Segment, SegmentPlan, ValueSpec
from runners.bound_steps import copied_together, own_copy
from runners.row_views import place_of
from runners.rows import has_strides, is_dense, num_spanned

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Unlowerable(Exception):
    """Says why a segment keeps eager kernels."""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentResult:
    """Describes the source of one result of a segment.

    Attributes:
        source: "made" (the function's result `index`), "input" (a view of input `index`), "cover" (a view of
            the function's result `index`) or "copy" (result `index`, copied into one memory with others).
        of: for views, the tensor that is viewed.
    """

    source: str
    index: int
    of: ValueSpec | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Describes how a segment's arguments and results lie in memory, and makes the results; `made` are the
    positions of the outputs that the function makes."""

    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    made: tuple[int, ...]
    results: tuple[SegmentResult, ...]

    @classmethod
    def of(cls, plan: SegmentPlan, segment: Segment, row_counts: Sequence[int]) -> SegmentLayout:
        """Finds the layout that holds at each of `row_counts`; raises `Unlowerable` without one, or if the
        segment must not be compiled."""
        if segment.keeps_own:
            raise Unlowerable(segment.keeps_own)
        if segment.captured_ops:
            # Functional graphs copy what an op writes: here whole KV pools.
            raise Unlowerable("it holds captured boundary ops, which write memory that must not be copied")
        inputs = tuple(plan.values[index] for index in segment.inputs)
        outputs = tuple(plan.values[index] for index in segment.outputs)
        for value in (*inputs, *outputs):
            is_known = value.sizes and value.offset and (value.strides or value.any_strides)
            if not value.is_tensor or not is_known:
                raise Unlowerable(f"'{value.name}' has a size that is not a function of the token count")
            if value.state is not None and type(value.state.get()) not in _PLAIN:
                raise Unlowerable(f"'{value.name}' is a {type(value.state.get()).__name__}, no plain tensor")
        memories = Counter(value.memory for value in inputs)
        shared = [f"'{v.name}'" for v in inputs if v.memory in segment.writes and memories[v.memory] > 1]
        if shared:
            raise Unlowerable(f"{', '.join(shared)} share memory that it writes")
        # Views into these memories must stay views of one memory.
        given = Counter(plan.values[index].memory for index in plan.result_values if isinstance(index, int))
        kept = {memory for other in plan.segments if other is not segment for memory in other.writes}
        kept |= {memory for memory, count in given.items() if count > 1}
        return cls(inputs, outputs, *_results(inputs, outputs, kept, row_counts))

    def results_of(self, rows: int, inputs: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Makes the segment's results from its inputs and the function's results."""
        own = self._own(rows, inputs, made)
        # Results that share memory where none covers the rest, by their memory.
        groups: dict[int, list[tuple[ValueSpec, int]]] = {}
        for value, result in zip(self.outputs, self.results, strict=True):
            if result.source == "copy":
                groups.setdefault(value.memory, []).append((value, result.index))
        copies: dict[int, Tensor] = {}
        for members in groups.values():
            places = [place_of(value, rows) for value, _ in members]
            together = copied_together(places, [own[index] for _, index in members])
            copies.update(zip((index for _, index in members), together, strict=True))
        found = []
        for value, result in zip(self.outputs, self.results, strict=True):
            if result.of is not None:
                viewed = inputs[result.index] if result.source == "input" else own[result.index]
                sizes, strides, offset = place_of(value, rows)
                offset += viewed.storage_offset() - place_of(result.of, rows)[2]
                found.append(viewed.as_strided(sizes, strides, offset))
            else:
                found.append(copies.get(result.index, own[result.index]))
        return tuple(found)

    def _own(self, rows: int, inputs: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """Returns the function's results with the plan's strides, if any, copied where a result shares memory
        with an input or with a result of another memory."""
        owners: dict[int, int] = {tensor.untyped_storage().data_ptr(): -1 for tensor in inputs}
        found = []
        for position, tensor in zip(self.made, made, strict=True):
            value = self.outputs[position]
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), value.memory)
            strides = None if value.any_strides else place_of(value, rows)[1]
            is_dense_row = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
            fits = is_dense_row if strides is None else has_strides(tensor, strides)
            if tensor.numel() and (owner != value.memory or not fits):
                dense = torch.contiguous_format
                tensor = tensor.clone(memory_format=dense) if strides is None else own_copy(tensor, strides)
            found.append(tensor)
        return found


def _results(
    inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec], kept: set[int], row_counts: Sequence[int]
) -> tuple[tuple[int, ...], tuple[SegmentResult, ...]]:
    """Returns `made` and `results` of a layout; `kept` are memories into which views must stay views."""
    given: dict[int, int] = {}
    for position, value in enumerate(inputs):
        given.setdefault(value.memory, position)
    shared: dict[int, list[int]] = {}
    for position, value in enumerate(outputs):
        if value.memory in kept and value.memory not in given:
            shared.setdefault(value.memory, []).append(position)
    covers = {memory: _cover_of(members, outputs, row_counts) for memory, members in shared.items()}
    own = [position for position, value in enumerate(outputs) if value.memory not in given]
    made = [position for position in own if covers.get(outputs[position].memory) in (None, position)]
    results = []
    for position, value in enumerate(outputs):
        if value.memory in given:
            viewed = inputs[given[value.memory]]
            if viewed.dtype is not value.dtype:
                raise Unlowerable(f"'{value.name}' is a view of '{viewed.name}' under another dtype")
            results.append(SegmentResult("input", given[value.memory], viewed))
        elif position not in made:
            cover = covers[value.memory]
            assert cover is not None
            results.append(SegmentResult("cover", made.index(cover), outputs[cover]))
        else:
            is_alone = covers.get(value.memory) is not None or len(shared.get(value.memory, ())) < 2
            results.append(SegmentResult("made" if is_alone else "copy", made.index(position)))
    return tuple(made), tuple(results)


def _cover_of(members: Sequence[int], outputs: Sequence[ValueSpec], row_counts: Sequence[int]) -> int | None:
    """Returns the output whose memory holds all the others' at each row count; None without one."""
    if len({outputs[member].dtype for member in members}) > 1:
        raise Unlowerable(f"'{outputs[members[0]].name}' shares its memory with a result of another dtype")

    def covers(whole: ValueSpec, part: ValueSpec, rows: int) -> bool:
        sizes, strides, begin = place_of(whole, rows)
        part_sizes, part_strides, part_begin = place_of(part, rows)
        part_end = part_begin + num_spanned(part_sizes, part_strides)
        is_inside = begin <= part_begin and part_end <= begin + num_spanned(sizes, strides)
        return is_inside and is_dense(sizes, strides)

    for member in members:
        if all(covers(outputs[member], outputs[part], rows) for part in members for rows in row_counts):
            return member
    return None
