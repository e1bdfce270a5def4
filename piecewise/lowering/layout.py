"""How the results of a graph segment are made of those of a function that knows no aliases.

A compiler sees each tensor as memory of its own. Where a segment's tensors share memory, that is settled
here, outside of what is compiled, from the sizes, strides and offsets of the plan. A segment that writes
memory in which several of its inputs lie is not compiled.

=============================  =========================================================================
results in an input's memory   views of the input, made afterwards
results of one memory that     one result that covers the others, which become views of it; where none
somebody writes, or that the   does, each is copied into one memory
caller is given
all other results              the function's own, with the plan's strides, no two in one memory; any
                               strides where only boundary ops read it that take any
=============================  =========================================================================
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from piecewise.ir.plan import Segment, SegmentPlan, ValueSpec
from runners.bound_steps import copied_together, own_copy
from runners.row_views import place_of
from runners.rows import has_strides, is_dense


class Unlowerable(Exception):
    """A segment that keeps eager kernels; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Result:
    """One result of a segment.

    Attributes:
        source: "made" (the function's result `index`), "input" (a view of input `index`), "cover" (a view of
            the function's result `index`) or "copy" (result `index`, copied into memory `group`).
        of: for views, the tensor that is viewed.
    """

    source: str
    index: int
    of: ValueSpec | None = None
    group: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Arguments and results of one segment's function; see the module's docstring.

    Attributes:
        inputs, outputs: the segment's values; each input is an argument.
        made: positions of the outputs that the function makes.
        results: one per output.
    """

    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    made: tuple[int, ...]
    results: tuple[_Result, ...]

    @classmethod
    def of(cls, plan: SegmentPlan, segment: Segment, row_counts: Sequence[int]) -> SegmentLayout:
        """The layout that holds for each of `row_counts`.

        Raises:
            Unlowerable: the segment has tensors that cannot be told apart in this way.
        """
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
        written = {m for other in plan.segments if other is not segment for m in other.writes}
        leaving = [index for index in plan.result_values if isinstance(index, int)]
        given = [plan.values[index].memory for index in leaving]
        kept = written | {memory for memory in given if given.count(memory) > 1}
        made, results = _results(inputs, outputs, kept, row_counts)
        return cls(inputs, outputs, made, results)

    def results_of(
        self, rows: int, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The segment's results, made of its inputs and of what the function made."""
        own = self._own(rows, inputs, made)
        groups = self._copies(rows, own)
        found = []
        for value, result in zip(self.outputs, self.results, strict=True):
            if result.source == "made":
                found.append(own[result.index])
            elif result.source == "copy":
                found.append(groups[result.index])
            else:
                assert result.of is not None
                viewed = inputs[result.index] if result.source == "input" else own[result.index]
                sizes, strides, offset = place_of(value, rows)
                offset += viewed.storage_offset() - _offset(result.of, rows)
                found.append(viewed.as_strided(sizes, strides, offset))
        return tuple(found)

    def _own(
        self, rows: int, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What was made, with the plan's strides, if there are any, and in memory that neither inputs nor
        results of another memory have."""
        owners: dict[int, int] = {tensor.untyped_storage().data_ptr(): -1 for tensor in inputs}
        found = []
        for position, tensor in zip(self.made, made, strict=True):
            value = self.outputs[position]
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), value.memory)
            if tensor.numel() and (owner != value.memory or not _fits(tensor, value, rows)):
                tensor = _laid_out(value, rows, tensor)
            found.append(tensor)
        return found

    def _copies(self, rows: int, own: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Results that share memory and of which none covers the rest: by index in `made`."""
        groups: dict[int, list[tuple[ValueSpec, int]]] = {}
        for value, result in zip(self.outputs, self.results, strict=True):
            if result.source == "copy":
                groups.setdefault(result.group, []).append((value, result.index))
        found: dict[int, torch.Tensor] = {}
        for members in groups.values():
            indices = [index for _, index in members]
            places = [place_of(value, rows) for value, _ in members]
            copies = copied_together(places, [own[index] for index in indices])
            found.update(zip(indices, copies, strict=True))
        return found


def _fits(tensor: torch.Tensor, value: ValueSpec, rows: int) -> bool:
    if value.any_strides:
        return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    return has_strides(tensor, _strides(value, rows))


def _laid_out(value: ValueSpec, rows: int, tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the plan's strides; a dense one where the plan has none."""
    if value.any_strides:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return own_copy(tensor, _strides(value, rows))


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _results(
    inputs: Sequence[ValueSpec],
    outputs: Sequence[ValueSpec],
    kept: set[int],
    row_counts: Sequence[int],
) -> tuple[tuple[int, ...], tuple[_Result, ...]]:
    """`made` and `results` of a layout; views into the memories in `kept` must stay views of one memory."""
    given: dict[int, int] = {}
    for position, value in enumerate(inputs):
        given.setdefault(value.memory, position)
    shared: dict[int, list[int]] = {}
    for position, value in enumerate(outputs):
        if value.memory in kept and value.memory not in given:
            shared.setdefault(value.memory, []).append(position)
    covers = {memory: _cover_of(members, outputs, row_counts) for memory, members in shared.items()}
    made: list[int] = []
    for position, value in enumerate(outputs):
        if value.memory not in given and covers.get(value.memory) in (None, position):
            made.append(position)
    results = []
    for position, value in enumerate(outputs):
        cover = covers.get(value.memory)
        if value.memory in given:
            viewed = inputs[given[value.memory]]
            if viewed.dtype is not value.dtype:
                raise Unlowerable(f"'{value.name}' is a view of '{viewed.name}' under another dtype")
            results.append(_Result("input", given[value.memory], viewed))
        elif cover is not None and cover != position:
            results.append(_Result("cover", made.index(cover), outputs[cover]))
        elif cover is None and len(shared.get(value.memory, ())) > 1:
            results.append(_Result("copy", made.index(position), group=value.memory))
        else:
            results.append(_Result("made", made.index(position)))
    return tuple(made), tuple(results)


def _cover_of(members: Sequence[int], outputs: Sequence[ValueSpec], row_counts: Sequence[int]) -> int | None:
    """The output whose memory holds all the others', at each row count; None where there is none."""
    if len({outputs[member].dtype for member in members}) > 1:
        raise Unlowerable(f"'{outputs[members[0]].name}' shares its memory with a result of another dtype")

    def covers(whole: ValueSpec, part: ValueSpec, rows: int) -> bool:
        is_inside = _offset(whole, rows) <= _offset(part, rows) and _end(part, rows) <= _end(whole, rows)
        return is_inside and is_dense(*place_of(whole, rows)[:2])

    for member in members:
        whole = outputs[member]
        if all(covers(whole, outputs[part], rows) for part in members for rows in row_counts):
            return member
    return None


def _strides(value: ValueSpec, rows: Any) -> tuple[Any, ...]:
    return place_of(value, rows)[1]


def _offset(value: ValueSpec, rows: Any) -> Any:
    return place_of(value, rows)[2]


def _end(value: ValueSpec, rows: Any) -> Any:
    """Offset behind the last element; of a tensor that has some."""
    sizes, strides, offset = place_of(value, rows)
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
