"""Which ops are put on parallel streams: shapes of real segments, and random lists under the race oracle."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st
from race_oracle import find_races

from piecewise.streams.branches import Fork, Join, OpFacts, RunOp, schedule


class Program:
    """Ops by name; each makes a memory of its own, named after it, and reads those of what it takes."""

    def __init__(self):
        self.ops, self.names = [], []

    def add(self, name, *takes, heavy=False, weight=1.0, also_writes=(), barrier=False):
        memory = {each: number for number, each in enumerate([*self.names, name])}
        self.names.append(name)
        self.ops.append(
            OpFacts(
                tuple(memory[each] for each in takes), frozenset(memory[each] for each in takes),
                frozenset({memory[name], *(memory[each] for each in also_writes)}), weight, heavy, barrier,
            )
        )  # fmt: skip

    def heavy(self, name, *takes, **options):
        self.add(name, *takes, heavy=True, **options)

    def schedule(self, num_streams):
        made = schedule(self.ops, num_streams)
        assert find_races(self.ops, list(made.commands())) == []
        return made

    def streams(self, num_streams, *, region=0):
        return [self.named(stream) for stream in self.schedule(num_streams).regions[region].streams]

    def named(self, positions):
        return [self.names[position] for position in positions]


def attention_inputs():
    made = Program()
    made.add("x")
    made.add("norm", "x")
    made.add("cos")
    for name in "qkv":
        made.heavy(name, "norm", weight={"q": 4, "k": 2, "v": 1}[name])
        if name != "v":
            made.add(f"{name}_rot", name, "cos")
    return made


def test_q_k_v_are_three_branches_with_their_rotations():
    made = attention_inputs()
    (region,) = made.schedule(3).regions
    assert made.streams(3) == [["q", "q_rot"], ["k", "k_rot"], ["v"]]
    assert made.named(region.before) == ["x", "norm", "cos"] and not region.after
    assert made.schedule(3).num_branches == (3,) and made.schedule(3).num_streams == 3


def test_two_streams_share_three_branches_by_weight():
    assert attention_inputs().streams(2) == [["q", "q_rot"], ["k", "k_rot", "v"]]
    assert attention_inputs().schedule(2).num_branches == (3,)


def test_more_streams_than_branches_leave_some_unused():
    assert len(attention_inputs().streams(8)) == 3


def test_what_needs_several_branches_runs_behind_the_join():
    made = Program()
    made.add("x")
    made.heavy("gate", "x", weight=2)
    made.add("silu", "gate")
    made.heavy("up", "x")
    made.add("product", "silu", "up")
    made.add("scaled", "product")
    made.heavy("down", "scaled")
    (region,) = made.schedule(2).regions
    assert made.streams(2) == [["gate", "silu"], ["up"]]
    assert made.named(region.after) == ["product", "scaled"]
    assert region.stop == made.names.index("down")


def test_a_light_op_that_only_one_branch_needs_is_in_it():
    made = Program()
    made.add("x")
    made.add("cast", "x")
    made.heavy("a", "cast", weight=2)
    made.heavy("b", "x")
    assert made.streams(2) == [["cast", "a"], ["b"]]


def test_a_shared_expert_beside_the_routed_ones_is_a_branch_of_several_matmuls():
    made = Program()
    made.add("x")
    made.heavy("before", "x")
    made.add("norm", "before")
    made.heavy("router", "norm")
    made.add("weights", "router")
    for name, weight in (("routed", 8), ("shared", 2)):
        made.heavy(f"{name}_gate", "norm", weight=weight)
        made.heavy(f"{name}_up", "norm", weight=weight)
        made.add(f"{name}_product", f"{name}_gate", f"{name}_up")
        made.heavy(f"{name}_down", f"{name}_product", weight=weight)
    made.add("weighted", "routed_down", "weights")
    made.add("sum", "weighted", "shared_down")
    made.heavy("next", "sum")
    (region,) = made.schedule(2).regions
    assert region.num_branches == 3, "the router's only use lies behind the routed experts"
    streams = made.streams(2)
    assert [name for name in streams[0] if name.startswith("routed")] == streams[0]
    assert {"router", "weights", "shared_gate", "shared_up", "shared_product", "shared_down"} == set(
        streams[1]
    )
    assert made.named(region.after) == ["weighted", "sum"]


def test_a_chain_has_no_branches():
    made = Program()
    made.add("x")
    for before, name in zip(["x", "a", "b"], "abc", strict=True):
        made.heavy(name, before)
    made.add("y", "x")
    made.add("z", "x")
    assert made.schedule(4).regions == () and made.schedule(4).num_streams == 1


def test_light_branches_alone_are_none():
    made = Program()
    made.add("x")
    made.add("a", "x")
    made.add("b", "x")
    made.heavy("c", "a")
    assert made.schedule(2).regions == ()


def test_two_regions_with_a_cut_between():
    made = Program()
    made.add("x")
    made.heavy("a", "x")
    made.heavy("b", "x")
    made.add("sum", "a", "b")
    made.heavy("cut", "sum")
    made.heavy("c", "cut")
    made.heavy("d", "cut")
    found = made.schedule(2)
    assert found.num_branches == (2, 2) and made.streams(2, region=1) == [["c"], ["d"]]
    kinds = [type(command) for command in found.commands() if not isinstance(command, RunOp)]
    assert kinds == [Fork, Join, Fork, Join]


def test_a_write_orders_branches_that_take_nothing_of_each_other():
    """Without it `a` and `b` would be two branches: the second reads what a light op of the first writes."""

    def build(writes):
        made = Program()
        made.add("x")
        made.heavy("a", "x")
        made.add("in_place", "a", also_writes=("x",) if writes else ())
        made.heavy("b", "x")
        return made

    assert build(False).schedule(2).num_branches == (2,)
    assert build(True).schedule(2).regions == ()


def test_a_read_behind_a_write_of_another_branch_waits_for_the_join():
    made = Program()
    made.add("x")
    made.add("buffer")
    made.heavy("a", "x", weight=2)
    made.add("fill", "a", also_writes=("buffer",))
    made.heavy("b", "x")
    made.add("reads", "b", "buffer")
    (region,) = made.schedule(2).regions
    assert made.named(region.after) == ["reads"] and made.streams(2) == [["a", "fill"], ["b"]]


def test_a_write_behind_a_read_of_another_branch_waits_for_the_join():
    made = Program()
    made.add("x")
    made.add("buffer")
    made.heavy("a", "x", weight=2)
    made.add("reads", "a", "buffer")
    made.heavy("b", "x")
    made.add("fill", "b", also_writes=("buffer",))
    (region,) = made.schedule(2).regions
    assert made.named(region.after) == ["fill"]


def test_nothing_moves_across_a_barrier():
    made = Program()
    made.add("x")
    made.heavy("a", "x")
    made.add("check", barrier=True)
    made.heavy("b", "x")
    made.heavy("c", "x")
    (region,) = made.schedule(2).regions
    assert region.start == 3 and made.streams(2) == [["b"], ["c"]]


def test_the_lane_that_began_last_is_issued_first():
    made = attention_inputs()
    order = made.named([c.op for c in made.schedule(3).commands() if isinstance(c, RunOp)])
    assert order == ["x", "norm", "cos", "v", "k", "k_rot", "q", "q_rot"]


@st.composite
def programs(draw):
    """Ops that take earlier ones, read and write a few shared memories, and are heavy or not."""
    ops = []
    for position in range(draw(st.integers(1, 16))):
        takes = draw(st.sets(st.integers(0, position - 1), max_size=2)) if position else set()
        # Memories from 100 on are shared; each op's own has its position.
        shared = st.sets(st.integers(100, 103), max_size=1)
        is_view = draw(st.integers(0, 5)) == 0
        ops.append(
            OpFacts(
                tuple(sorted(takes)),
                frozenset() if is_view else frozenset(takes) | draw(shared),
                frozenset() if is_view else frozenset({position}) | draw(st.one_of(st.just(set()), shared)),
                draw(st.integers(1, 9)),
                not is_view and draw(st.booleans()),
                draw(st.integers(0, 30)) == 0,
            )
        )  # fmt: skip
    return ops


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(programs(), st.integers(2, 4))
def test_no_random_program_races(ops, num_streams):
    made = schedule(ops, num_streams)
    assert find_races(ops, list(made.commands())) == []
    for region in made.regions:
        assert 2 <= len(region.streams) <= min(num_streams, region.num_branches)
        assert all(any(ops[op].is_heavy for op in stream) for stream in region.streams)


def test_the_random_programs_have_regions():
    """So that the property above says something."""
    found = 0

    @hypothesis.settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @hypothesis.given(programs())
    def count(ops):
        nonlocal found
        found += bool(schedule(ops, 2).regions)

    count()
    assert found > 20


def test_the_oracle_sees_a_missing_join_a_missing_wait_and_a_wrong_order():
    made = attention_inputs()
    commands = list(made.schedule(3).commands())
    assert find_races(made.ops, commands) == []
    assert any("not joined" in fault for fault in find_races(made.ops, commands[:-1]))
    moved = [RunOp(c.op, 1) if isinstance(c, RunOp) and made.names[c.op] == "q_rot" else c for c in commands]
    assert any("does not wait" in fault for fault in find_races(made.ops, moved))
    assert any("never runs" in fault for fault in find_races(made.ops, commands[1:]))
    swapped = [commands[1], commands[0], *commands[2:]]
    assert any("does not wait" in fault for fault in find_races(made.ops, swapped))


@pytest.mark.parametrize(("name", "field"), [("fill", "writes"), ("reads", "reads"), ("reads", "takes")])
def test_the_oracle_sees_a_dependency_that_the_schedule_was_not_told(name, field):
    made = Program()
    made.add("x")
    made.add("buffer")
    made.heavy("a", "x", weight=2)
    made.add("fill", "a", also_writes=("buffer",))
    made.heavy("b", "x")
    made.add("reads", "b", "buffer")
    at = made.names.index(name)
    nothing = () if field == "takes" else frozenset()
    blind = [*made.ops]
    blind[at] = dataclasses.replace(made.ops[at], **{field: nothing})
    # What it takes is read, too, so without the one there is still the other.
    is_seen = field != "takes"
    assert bool(find_races(made.ops, list(schedule(blind, 2).commands()))) == is_seen
