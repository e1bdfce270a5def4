"""Finds independent branches in a list of ops and puts them on parallel streams, without looking at tensors.

    before      norm · q matmul · q rotary · k matmul · k rotary · v matmul · stack
    after       norm ─fork─┬─ q matmul · q rotary ─┬─join─ stack        stream 0, the caller's
                           ├─ k matmul · k rotary ─┤                    stream 1
                           └─ v matmul ────────────┘                    stream 2

docs/DESIGN.md says what orders two ops, which ops are cuts, and how regions and their branches are found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True, slots=True)
class OpFacts:
    """Describes what orders one op of a list.

    Attributes:
        takes: positions of the earlier ops whose results it takes.
        reads, writes: memories, `writes` with its results; both are empty for an op that only makes a view.
        is_heavy: whether its branch is worth a stream.
        is_barrier: whether it must keep its place whatever its reads and writes.
    """

    takes: tuple[int, ...]
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    weight: float = 0.0
    is_heavy: bool = False
    is_barrier: bool = False


class Fork(NamedTuple):
    """Starts streams 1 to `num_streams` - 1 behind all that stream 0 runs so far."""

    num_streams: int


class RunOp(NamedTuple):
    op: int
    stream: int = 0


class Join(NamedTuple):
    """Makes stream 0 wait for all other streams."""


Command = Fork | RunOp | Join


class Region(NamedTuple):
    """Describes ops `start` to `stop` (excluded) with independent branches: those `before` the fork and
    `after` the join, and those of each stream, all ascending; stream 0 has the heaviest branch."""

    start: int
    stop: int
    before: tuple[int, ...]
    streams: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]
    num_branches: int


class StreamSchedule(NamedTuple):
    """Says where each of `num_ops` ops runs: `regions` in order, everything between them on stream 0."""

    num_ops: int
    regions: tuple[Region, ...]

    @property
    def num_streams(self) -> int:
        return max((len(region.streams) for region in self.regions), default=1)

    @property
    def num_branches(self) -> tuple[int, ...]:
        return tuple(region.num_branches for region in self.regions)

    def commands(self) -> Iterator[Command]:
        """Lists commands as the host issues them, per region the last stream first. A device does not care,
        but one stream alone runs the branches in reverse, so that a missed dependency changes the result."""
        position = 0
        for region in self.regions:
            yield from map(RunOp, range(position, region.start))
            yield from map(RunOp, region.before)
            yield Fork(len(region.streams))
            for stream, ops in sorted(enumerate(region.streams), key=lambda each: -each[1][0]):
                yield from (RunOp(op, stream) for op in ops)
            yield Join()
            yield from map(RunOp, region.after)
            position = region.stop
        yield from map(RunOp, range(position, self.num_ops))


def schedule(ops: Sequence[OpFacts], num_streams: int) -> StreamSchedule:
    """Finds the regions of a list of ops, with at most `num_streams` streams each."""
    after = _predecessors(ops)
    marks = [position for position, op in enumerate(ops) if op.is_heavy or op.is_barrier]
    regions: list[Region] = []
    group: list[int] = []
    start = 0
    for mark in [*marks, len(ops)]:
        is_cut = mark == len(ops) or all(other == mark or _are_ordered(after, other, mark) for other in marks)
        if not is_cut:
            group.append(mark)
            continue
        branches = _branches(group, after)
        if len(branches) > 1:
            regions.append(_region(ops, after, range(start, mark), branches, num_streams))
        group, start = [], mark + 1
    return StreamSchedule(len(ops), tuple(regions))


def _predecessors(ops: Sequence[OpFacts]) -> list[int]:
    """Returns per op a bit set of the ops that must come before it, directly or not."""
    found: list[int] = []
    for later, op in enumerate(ops):
        bits = 0
        for earlier in reversed(range(later)):
            if not bits >> earlier & 1 and (earlier in op.takes or _must_wait(op, ops[earlier])):
                bits |= found[earlier] | 1 << earlier
        found.append(bits)
    return found


def _must_wait(later: OpFacts, earlier: OpFacts) -> bool:
    """Whether an op must come after an earlier one whose result it does not take."""
    if later.is_barrier or earlier.is_barrier:
        return True
    reads_or_writes = later.reads | later.writes
    return not (earlier.writes.isdisjoint(reads_or_writes) and earlier.reads.isdisjoint(later.writes))


def _are_ordered(after: Sequence[int], one: int, other: int) -> bool:
    return bool(after[max(one, other)] >> min(one, other) & 1)


def _branches(group: Sequence[int], after: Sequence[int]) -> list[list[int]]:
    branches: list[list[int]] = []
    for op in group:
        joined = [branch for branch in branches if any(_are_ordered(after, other, op) for other in branch)]
        branches = [branch for branch in branches if branch not in joined]
        branches.append(sorted([op, *(other for branch in joined for other in branch)]))
    return sorted(branches)


def _region(
    ops: Sequence[OpFacts], after: Sequence[int], span: range, branches: Sequence[list[int]], num_streams: int
) -> Region:
    before: list[int] = []
    behind: list[int] = []
    members: list[list[int]] = [[] for _ in branches]
    place: dict[int, int | None] = {}  # op → its branch, None behind the join
    branch_of = {op: number for number, branch in enumerate(branches) for op in branch}
    for op in span:
        needs = {number for other, number in place.items() if after[op] >> other & 1}
        needed_by = {number for heavy, number in branch_of.items() if after[heavy] >> op & 1}
        if op not in branch_of and not needs and len(needed_by) != 1:
            before.append(op)
            continue
        number = branch_of.get(op)
        if number is None and len(needs) <= 1:
            number = (needs or needed_by).pop()
        place[op] = number
        (behind if number is None else members[number]).append(op)
    streams = _dealt(ops, members, num_streams)
    return Region(span.start, span.stop, tuple(before), streams, tuple(behind), len(branches))


def _dealt(
    ops: Sequence[OpFacts], branches: Sequence[Sequence[int]], num_streams: int
) -> tuple[tuple[int, ...], ...]:
    """Assigns the branches to streams, the heaviest first, each to the stream with the least weight."""

    def weight(ops_of_it: Sequence[int]) -> float:
        return sum(ops[op].weight for op in ops_of_it)

    streams: list[list[int]] = [[] for _ in range(min(num_streams, len(branches)))]
    for branch in sorted(branches, key=weight, reverse=True):
        # Among equal weights an empty stream comes first.
        lightest = min(streams, key=lambda stream: (weight(stream), len(stream)))
        lightest += branch
    return tuple(tuple(sorted(stream)) for stream in sorted(streams, key=weight, reverse=True))
