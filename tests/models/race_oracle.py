"""Says by vector clocks whether commands on parallel streams keep every order that a list of ops needs.

It knows nothing of how a schedule was found. Each stream has a clock per stream; a fork hands stream 0's
clock to the others, a join takes theirs back. Of two ops that touch one memory, of which one writes it, the
later one has to have seen the earlier one's own tick, and so has each op what it takes.
"""

from __future__ import annotations

from piecewise.streams.branches import Fork, Join, RunOp


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
    ran = {}  # op → (stream, its tick, the clock of its stream before it)
    faults = []
    num_open = 1
    for command in commands:
        if isinstance(command, Fork):
            if num_open != 1:
                faults.append("a fork inside a region")
            num_open = command.num_streams
            for stream in range(1, num_open):
                clocks[stream] = _merged(clocks.get(stream, {}), clocks[0])
        elif isinstance(command, Join):
            for stream in range(1, num_open):
                clocks[0] = _merged(clocks[0], clocks[stream])
            num_open = 1
        else:
            assert isinstance(command, RunOp)
            if command.stream >= num_open:
                faults.append(f"op {command.op} on stream {command.stream}, which is not open")
            if command.op in ran:
                faults.append(f"op {command.op} runs twice")
            clock = clocks.setdefault(command.stream, {})
            tick = clock.get(command.stream, 0) + 1
            ran[command.op] = command.stream, tick, dict(clock)
            clock[command.stream] = tick
    if num_open != 1:
        faults.append("streams that are not joined")
    faults += [f"op {op} never runs" for op in range(len(ops)) if op not in ran]
    for earlier, later, why in needed_orders(ops):
        if earlier in ran and later in ran:
            stream, tick, _ = ran[earlier]
            if ran[later][2].get(stream, 0) < tick:
                faults.append(f"op {later} {why} of op {earlier}, and does not wait for it")
    return faults


def _merged(one, other):
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in {*one, *other}}
