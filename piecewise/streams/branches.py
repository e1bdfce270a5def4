"""Finds independent branches in a list of ops, and puts them on parallel lanes; pure: numbers in and out.

    before      norm · q matmul · q rotary · k matmul · k rotary · v matmul · stack
    after       norm ─fork─┬─ q matmul · q rotary ─┬─join─ stack        lane 0, the caller's stream
                           ├─ k matmul · k rotary ─┤                    lane 1
                           └─ v matmul ────────────┘                    lane 2

docs/DESIGN.md says what orders two ops, which ops are cuts, and how regions and their branches are found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class OpFacts:
    """One op of a list, as far as its order matters.

    Attributes:
        takes: positions of the ops whose results it takes, all before its own.
        reads, writes: memories that it touches while it runs; what it makes is written too. Empty for an op
            that only makes a view.
        weight: what it costs, in any unit.
        is_heavy: whether a branch is worth a lane for it.
        is_barrier: it must stay where it is, for another reason than what it touches.
    """

    takes: tuple[int, ...]
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    weight: float = 0.0
    is_heavy: bool = False
    is_barrier: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Fork:
    """Lanes 1 to `num_lanes` - 1 begin, after all that ran on lane 0 so far."""

    num_lanes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The op at this position runs on this lane."""

    op: int
    lane: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Lane 0 goes on after all that ran on the others."""


Command = Fork | Run | Join


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A stretch of ops with independent branches.

    Attributes:
        start, stop: the stretch, `stop` not included.
        before, after: ops that run ahead of the fork and behind the join, ascending.
        lanes: the ops of each lane, ascending; lane 0 is the heaviest.
    """

    start: int
    stop: int
    before: tuple[int, ...]
    lanes: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]
    num_branches: int


@dataclasses.dataclass(frozen=True, slots=True)
class StreamSchedule:
    """Where each of `num_ops` ops runs; `regions` in order, with everything between them on lane 0."""

    num_ops: int
    regions: tuple[Region, ...]

    @property
    def num_lanes(self) -> int:
        """The most lanes of any region; 1 where there is none."""
        return max((len(region.lanes) for region in self.regions), default=1)

    @property
    def num_branches(self) -> tuple[int, ...]:
        """Branches of each region."""
        return tuple(region.num_branches for region in self.regions)

    def commands(self) -> Iterator[Command]:
        """The order in which the host issues it all.

        Of several lanes the one that began last comes first. On streams that makes no difference; in a run
        on one stream it turns the order of the branches around, so that a dependency between them that was
        missed gives another result.
        """
        position = 0
        for region in self.regions:
            yield from map(Run, range(position, region.start))
            yield from map(Run, region.before)
            yield Fork(len(region.lanes))
            for lane in sorted(range(len(region.lanes)), key=lambda lane: -region.lanes[lane][0]):
                yield from (Run(op, lane) for op in region.lanes[lane])
            yield Join()
            yield from map(Run, region.after)
            position = region.stop
        yield from map(Run, range(position, self.num_ops))


def schedule(ops: Sequence[OpFacts], num_streams: int) -> StreamSchedule:
    """The regions of a list of ops, with no more than `num_streams` lanes each."""
    order = _Order(ops)
    regions = []
    for start, stop, branches in _stretches(ops, order):
        regions.append(_region(ops, order, start, stop, branches, num_streams))
    return StreamSchedule(len(ops), tuple(regions))


class _Order:
    """Which op has to come after which.

    Attributes:
        direct: per op, the ops that it directly comes after.
        after: per op, a bit for each op that it comes after, directly or not.
    """

    def __init__(self, ops: Sequence[OpFacts]) -> None:
        self.direct = _direct(ops)
        self.after: list[int] = []
        for needed in self.direct:
            bits = 0
            for other in needed:
                bits |= self.after[other] | 1 << other
            self.after.append(bits)

    def connects(self, one: int, other: int) -> bool:
        first, second = sorted((one, other))
        return bool(self.after[second] >> first & 1)


def _direct(ops: Sequence[OpFacts]) -> list[set[int]]:
    found: list[set[int]] = []
    written: dict[int, int] = {}  # memory → the last op that wrote it
    read: dict[int, list[int]] = {}  # memory → the ops that read it since
    barrier: int | None = None
    for position, op in enumerate(ops):
        needed = set(op.takes)
        if op.is_barrier:
            needed |= set(range(position))
            barrier = position
        elif barrier is not None:
            needed.add(barrier)
        for memory in op.reads | op.writes:
            if memory in written:
                needed.add(written[memory])
        for memory in op.writes:
            needed |= set(read.pop(memory, ()))
            written[memory] = position
        for memory in op.reads - op.writes:
            read.setdefault(memory, []).append(position)
        found.append(needed)
    return found


def _stretches(ops: Sequence[OpFacts], order: _Order) -> Iterator[tuple[int, int, list[list[int]]]]:
    """(start, stop, branches) of each stretch between two cuts that has branches; those list heavy ops."""
    marks = [position for position, op in enumerate(ops) if op.is_heavy or op.is_barrier]
    group: list[int] = []
    start = 0
    for mark in [*marks, len(ops)]:
        is_cut = mark == len(ops) or all(other == mark or order.connects(other, mark) for other in marks)
        if not is_cut:
            group.append(mark)
            continue
        branches = _connected(group, order)
        if len(branches) > 1:
            yield start, mark, branches
        group, start = [], mark + 1


def _connected(group: Sequence[int], order: _Order) -> list[list[int]]:
    """The ops of a group, put together where an order connects them."""
    branches: list[list[int]] = []
    for op in group:
        joined = [branch for branch in branches if any(order.connects(other, op) for other in branch)]
        branches = [branch for branch in branches if branch not in joined]
        branches.append(sorted([op, *(other for branch in joined for other in branch)]))
    return sorted(branches)


def _region(
    ops: Sequence[OpFacts],
    order: _Order,
    start: int,
    stop: int,
    branches: Sequence[Sequence[int]],
    num_streams: int,
) -> Region:
    before: list[int] = []
    after: list[int] = []
    place: dict[int, int | None] = {}  # op → its branch, None for after the join
    branch_of = {op: number for number, branch in enumerate(branches) for op in branch}
    for op in range(start, stop):
        needs = {place[other] for other in order.direct[op] if other in place}
        needed_by = {number for heavy, number in branch_of.items() if order.after[heavy] >> op & 1}
        if op in branch_of:
            place[op] = branch_of[op]
        elif len(needs) > 1 or None in needs:
            place[op] = None
            after.append(op)
        elif needs or len(needed_by) == 1:
            place[op] = (needs or needed_by).pop()
        else:
            before.append(op)
    members = [[op for op, at in place.items() if at == number] for number in range(len(branches))]
    lanes = _dealt(ops, members, num_streams)
    return Region(start, stop, tuple(before), lanes, tuple(after), len(branches))


def _dealt(
    ops: Sequence[OpFacts], branches: Sequence[Sequence[int]], num_lanes: int
) -> tuple[tuple[int, ...], ...]:
    weights = [sum(ops[op].weight for op in branch) for branch in branches]
    lanes: list[list[int]] = [[] for _ in range(min(num_lanes, len(branches)))]
    loads = [0.0] * len(lanes)
    for number in sorted(range(len(branches)), key=lambda number: -weights[number]):
        # Of equal loads an empty lane comes first.
        lane = min(range(len(lanes)), key=lambda lane: (loads[lane], len(lanes[lane])))
        lanes[lane] += branches[number]
        loads[lane] += weights[number]
    heaviest_first = sorted(range(len(lanes)), key=lambda lane: -loads[lane])
    return tuple(tuple(sorted(lanes[lane])) for lane in heaviest_first)
