"""A segment's aten graph on streams: what each op touches, and that the new order computes the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from aten_segments import ROWS, segment_of
from race_oracle import find_races
from torch.nn import functional as F

from piecewise.ir.aten import NotTraceable, trace_aten
from piecewise.streams.streams import ScheduledFunction, facts_of, is_heavy

WIDTH = 6


class Noted:
    """Streams that note what they are told, and what was alive at each join."""

    def __init__(self):
        self.told, self.held = [], []

    def opened(self):
        return torch.no_grad()

    def fork(self, num_streams):
        self.told.append(("fork", num_streams))

    def enter(self, stream):
        self.told.append(("enter", stream))

    def join(self, *held):
        self.told.append(("join",))
        self.held.append(held)


def scheduled(function, *tensors, num_streams=2, memories=None):
    """The function on streams, after a look at races; `memories` says which inputs share memory."""
    segment, values = segment_of(function, tensors)
    if memories is not None:
        values = tuple(dataclasses.replace(v, memory=m) for v, m in zip(values, memories, strict=True))
    made = ScheduledFunction.of(segment, values, num_rows=ROWS, num_streams=num_streams)
    graph = trace_aten(segment, values, num_rows=ROWS).module.graph
    assert find_races(facts_of(graph, segment, values), list(made.schedule.commands())) == []
    return segment, made


def check_same(function, *tensors, rows=(ROWS, 5, 2), **options):
    """That streams give the same bits and write the same into the inputs, for several row counts."""
    segment, made = scheduled(function, *tensors, **options)
    assert made.schedule.regions, "no branches"
    for count in rows:
        assert made.is_valid(count)
        given = [t[:count].clone() if t.shape[0] == ROWS else t.clone() for t in tensors]
        again = [tensor.clone() for tensor in given]
        expected, found = segment.function(count, *given), made.run(Noted(), count, *again)
        for one, other in zip([*expected, *given], [*found, *again], strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()
    return made


def weights(num):
    return [torch.randn(WIDTH, WIDTH) for _ in range(num)]


def x():
    return torch.randn(ROWS, WIDTH)


def test_q_k_v_and_gate_up_are_regions_and_compute_the_same():
    def block(x, q, k, v, o, gate, up, down):
        y = F.rms_norm(x, (WIDTH,))
        mixed = F.linear(y, q).sigmoid() * F.linear(y, k) + F.linear(y, v)
        x = x + F.linear(mixed, o)
        y = F.rms_norm(x, (WIDTH,))
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    made = check_same(block, x(), *weights(7), num_streams=3)
    assert made.schedule.num_branches == (3, 2) and made.schedule.num_streams == 3
    assert check_same(block, x(), *weights(7)).schedule.num_streams == 2


def test_a_shared_expert_beside_the_routed_ones():
    def moe(x, router, routed, routed_down, shared, shared_down):
        picked = torch.softmax(F.linear(x, router), -1)
        ours = F.linear(F.silu(F.linear(x, routed)), routed_down) * picked
        return ours + F.linear(F.silu(F.linear(x, shared)), shared_down)

    assert check_same(moe, x(), *weights(5)).schedule.num_branches == (3,)


def test_a_chain_has_nothing_to_run_at_the_same_time():
    _, made = scheduled(lambda x, a, b: F.linear(F.linear(x, a), b) + 1, x(), *weights(2))
    assert made.schedule.regions == ()


@pytest.mark.parametrize("as_view", [False, True], ids=["itself", "through a view"])
def test_a_write_that_another_branch_reads_orders_the_two(as_view):
    def writes(x, a, b):
        first = F.linear(x, a)
        (x.view(-1, WIDTH) if as_view else x).mul_(2)
        return first, F.linear(x, b)

    segment, made = scheduled(writes, x(), *weights(2))
    assert made.schedule.regions == ()


def test_a_write_in_one_branch_is_seen_behind_the_join():
    def writes(x, buffer, a, b):
        buffer.copy_(F.linear(x, a))
        return F.linear(x, b) + buffer

    made = check_same(writes, x(), x(), *weights(2))
    assert made.schedule.num_branches == (2,)


def test_inputs_that_share_memory_are_one_memory():
    """Their fakes are two: only the plan knows."""

    def writes(x, y, a, b):
        first = F.linear(x, a)
        y.add_(first)
        return first, F.linear(x, b)

    tensors = (x(), x(), *weights(2))
    _, apart = scheduled(writes, *tensors)
    assert apart.schedule.num_branches == (2,)
    _, one = scheduled(writes, *tensors, memories=(0, 0, 2, 3))
    assert one.schedule.regions == ()


def test_results_of_one_op_are_one_memory_each_and_items_are_no_ops():
    def splits(x, a, b):
        first, second = F.linear(x, a).split(WIDTH // 2, dim=-1)
        values, indices = F.linear(x, b).topk(WIDTH // 2, dim=-1)
        return first * values + second, indices

    check_same(splits, x(), *weights(2))


def test_sizes_are_no_barrier_and_casts_of_autocast_are_in_the_graph():
    def sized(x, a, b):
        with torch.autocast("cpu", torch.bfloat16):
            first = F.linear(x, a).reshape(x.shape[0], 2, -1)
            return first.float().flatten(1) + F.linear(x, b).float() * x.shape[0]

    made = check_same(sized, x(), *weights(2))
    assert made.schedule.num_branches == (2,)
    segment, values = segment_of(sized, (x(), *weights(2)))
    made = ScheduledFunction.of(segment, values, num_rows=ROWS, num_streams=2)
    given = [torch.randn(v.sizes(ROWS)) for v in values]
    with torch.autocast("cpu", torch.bfloat16):
        (found,), (expected,) = made.run(Noted(), ROWS, *given), segment.function(ROWS, *given)
    assert torch.equal(found, expected)


def test_autocast_around_a_call_changes_no_op():
    """What it would have changed is in the trace, or was not on when that was made."""
    segment, values = segment_of(lambda x, a, b: F.linear(x, a) * F.linear(x, b), (x(), *weights(2)))
    made = ScheduledFunction.of(segment, values, num_rows=ROWS, num_streams=2)
    given = [torch.randn(value.sizes(ROWS)) for value in values]
    (expected,) = segment.function(ROWS, *given)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = made.run(Noted(), ROWS, *given)
    assert torch.equal(found, expected)


def test_random_numbers_and_checks_stay_where_they_are():
    def draws(x, a, b):
        first = F.linear(x, a)
        noise = torch.rand_like(x)
        return first + noise, F.linear(x, b)

    assert scheduled(draws, x(), *weights(2))[1].schedule.regions == ()

    def checks(x, a, b):
        first = F.linear(x, a)
        torch._assert_async(x.abs().sum() >= 0)
        return first, F.linear(x, b)

    assert scheduled(checks, x(), *weights(2))[1].schedule.regions == ()


@torch.library.custom_op("stream_graph_tests::touch", mutates_args={"out"})
def touch(out: torch.Tensor, given: torch.Tensor) -> None:
    out.copy_(given * 2)


@touch.register_fake
def _(out, given):
    pass


def test_a_custom_op_touches_what_its_schema_says():
    def calls(x, out, a, b):
        first = F.linear(x, a)
        touch(out, first)
        return first, F.linear(x, b)

    assert check_same(calls, x(), x(), *weights(2)).schedule.num_branches == (2,)

    def reads(x, out, a, b):
        first = F.linear(x, a)
        touch(out, first)
        return first, F.linear(out, b)

    assert scheduled(reads, x(), x(), *weights(2))[1].schedule.regions == ()


def test_everything_made_or_read_in_a_region_is_held_until_its_join():
    def block(x, a, b):
        y = x * 2
        return F.linear(F.linear(y, a).exp().exp(), a) + F.linear(y + 1, b)

    segment, values = segment_of(block, (x(), *weights(2)))
    made = ScheduledFunction.of(segment, values, num_rows=ROWS, num_streams=2)
    streams = Noted()
    made.run(streams, ROWS, *(torch.randn(value.sizes(ROWS)) for value in values))
    (held,) = streams.held
    assert [step for step in streams.told if step[0] != "enter"] == [("fork", 2), ("join",)]
    # y; two weights, of which there are views; four results in one branch, two in the other.
    storages = {tensor.untyped_storage().data_ptr() for tensor in held}
    assert len(storages) == 1 + 2 + 4 + 2


def test_streams_are_entered_once_each_and_left_by_the_join():
    streams = Noted()
    segment, values = segment_of(lambda x, a, b: F.linear(x, a).exp() + F.linear(x, b), (x(), *weights(2)))
    made = ScheduledFunction.of(segment, values, num_rows=ROWS, num_streams=2)
    made.run(streams, ROWS, *(torch.randn(value.sizes(ROWS)) for value in values))
    assert streams.told in (
        [("fork", 2), ("enter", 1), ("enter", 0), ("join",)],
        [("fork", 2), ("enter", 1), ("join",)],
    )


def test_a_segment_that_cannot_be_traced_says_so():
    def reads_back(x, a, b):
        return F.linear(x, a) * float(x.sum()), F.linear(x, b)

    segment, values = segment_of(reads_back, (x(), *weights(2)))
    with pytest.raises(NotTraceable):
        ScheduledFunction.of(segment, values, num_rows=ROWS, num_streams=2)


def test_which_ops_are_heavy():
    aten = torch.ops.aten
    heavy = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default)
    assert all(map(is_heavy, heavy))
    assert not any(map(is_heavy, (aten.mul.Tensor, aten.embedding.default, aten.sum.default)))


def test_ops_that_consist_of_others_keep_their_bits():
    def block(x, norm, bias, a, b):
        y = F.linear(F.layer_norm(x, (WIDTH,), norm), a, bias).relu()
        return y + F.linear(F.rms_norm(x, (WIDTH,)), b)

    check_same(block, x(), torch.randn(WIDTH), torch.randn(WIDTH), *weights(2))
