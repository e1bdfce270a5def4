"""Says by vector clocks whether commands on parallel lanes keep every order that a list of ops needs.

It knows nothing of how a schedule was found. Each lane has a clock per lane; a fork hands lane 0's clock to
the others, a join takes theirs back. Of two ops that touch one memory, of which one writes it, the later one
has to have seen the earlier one's own tick, and so has each op what it takes.
"""

from __future__ import annotations

from piecewise.streams.branches import Fork, Join, Run


def needed_orders(ops):
    """(earlier, later, why) for each pair of ops that must not run at once or the other way round."""
    for later, second in enumerate(ops):
        for earlier, first in enumerate(ops[:later]):
            if earlier in second.takes:
                yield earlier, later, "takes its result"
            elif first.is_barrier or second.is_barrier:
                yield earlier, later, "stays where it is"
            elif first.writes & (second.reads | second.writes) or first.reads & second.writes:
                yield earlier, later, "touches the same memory"


def find_races(ops, commands):
    """Each needed order that the commands do not keep, as text; and what is wrong with the commands."""
    clocks = {0: {}}
    ran = {}  # op → (lane, its tick, the clock of its lane before it)
    faults = []
    num_open = 1
    for command in commands:
        if isinstance(command, Fork):
            if num_open != 1:
                faults.append("a fork inside a region")
            num_open = command.num_lanes
            for lane in range(1, num_open):
                clocks[lane] = _merged(clocks.get(lane, {}), clocks[0])
        elif isinstance(command, Join):
            for lane in range(1, num_open):
                clocks[0] = _merged(clocks[0], clocks[lane])
            num_open = 1
        else:
            assert isinstance(command, Run)
            if command.lane >= num_open:
                faults.append(f"op {command.op} on lane {command.lane}, which is not open")
            if command.op in ran:
                faults.append(f"op {command.op} runs twice")
            clock = clocks.setdefault(command.lane, {})
            tick = clock.get(command.lane, 0) + 1
            ran[command.op] = command.lane, tick, dict(clock)
            clock[command.lane] = tick
    if num_open != 1:
        faults.append("lanes that are not joined")
    faults += [f"op {op} never runs" for op in range(len(ops)) if op not in ran]
    for earlier, later, why in needed_orders(ops):
        if earlier in ran and later in ran:
            lane, tick, _ = ran[earlier]
            if ran[later][2].get(lane, 0) < tick:
                faults.append(f"op {later} {why} of op {earlier}, and does not wait for it")
    return faults


def _merged(one, other):
    return {lane: max(one.get(lane, 0), other.get(lane, 0)) for lane in {*one, *other}}
