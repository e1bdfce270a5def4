"""[I3] What an example's values hide: ops whose rows look apart in the call that was captured and are not in
another, indices that name padded rows, and shapes that only some calls have.

Each model is captured with an example that hides what it does, and called with inputs that show it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from toy_models import HIDDEN, Toy, check_sizes, compare, kinds, make_ids, mix, reasons

import boundary_ops
import piecewise

EXPERTS = 4


class Given(nn.Module):
    """`how(model, x, *others)` of embedded ids, behind a boundary op; `others` are inputs of the call."""

    def __init__(self, how):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.3)
        self.cache, self.how = torch.zeros(64, HIDDEN), how

    def forward(self, ids, *others):
        x = self.embedding(ids)
        out = torch.empty_like(x)
        mix(x, x, x, out, self.cache)
        return self.how(self, self.linear(out), ids, *others)


def check(how, example, calls, *, buckets=(8, 16)):
    """Captures `how` with the example's inputs, and compares each call with the model's own."""
    torch.manual_seed(0)
    model = Given(how).eval()
    graphed = piecewise.compile(model, buckets=buckets, progress=False)
    report = graphed.capture(*example)
    assert report.ok, report
    with torch.no_grad():
        for number, call in enumerate(calls):
            replays = graphed.stats.replays
            compare(graphed, model, call, exact=False, where=f"call {number}")
            assert graphed.stats.replays == replays + 1, graphed.stats
    return graphed


def same_ids(n):
    return torch.full((n,), 7)


COUNTS = (2, 3, 5, 7, 8, 9, 13, 16)
FROM_IDS = [(make_ids(n, seed=3),) for n in COUNTS] + [(make_ids(n, seed=4).flip(0),) for n in COUNTS]


def _sorted_experts(m, x, ids):
    chosen = m.router(F.normalize(x, dim=-1)).argmax(-1)
    ordered, places = chosen.sort(stable=True)
    picked = torch.bmm(x[places].unsqueeze(1), m.experts[ordered]).squeeze(1)
    back = torch.empty_like(places)
    back[places] = torch.arange(len(places))
    return picked[back] + x


def _sorted_experts_by_argsort(m, x, ids):
    chosen = m.router(x).argmax(-1)
    places = chosen.argsort(stable=True)
    picked = torch.bmm(x[places].unsqueeze(1), m.experts[chosen[places]]).squeeze(1)
    return picked[places.argsort()] + x


def _searched(m, x, ids):
    ordered = ids.sort()[0]
    return x + torch.searchsorted(ordered, ids)[:, None]


def _searched_in_itself(m, x, ids):
    ordered = ids.sort()[0]
    return x + torch.searchsorted(ordered, ordered, right=True)[:, None]


def _bucketized(m, x, ids):
    ordered = ids.sort()[0]
    return x + torch.bucketize(ids, ordered)[:, None]


def _found_among(m, x, ids):
    return x * torch.isin(ids + 1, ids)[:, None]


def _least_of_table(m, x, ids):
    return x + (ids[:, None] - ids[None]).amin(1, keepdim=True)


def _most_of_table(m, x, ids):
    return x + (ids[:, None] * ids[None]).amax(1, keepdim=True)


def _all_of_table(m, x, ids):
    return x * (ids[:, None] >= ids[None] - 3).all(1, keepdim=True)


def _any_of_table(m, x, ids):
    return x * (ids[:, None] == ids[None] + 1).any(1, keepdim=True)


def _argmax_of_table(m, x, ids):
    return x + (ids[:, None] - ids[None]).abs().argmax(1, keepdim=True)


def _count_of_table(m, x, ids):
    return x + (ids[:, None] == ids[None]).cumsum(1)[:, -1:]


def _adapter_segments(m, x, ids):
    """Rows sorted by adapter id; where each adapter's begin is counted over all rows."""
    adapter = ids % EXPERTS
    places = adapter.argsort(stable=True)
    starts = F.one_hot(adapter, EXPERTS).sum(0).cumsum(0)
    ordered = x[places] + starts[adapter[places], None] * 0.1
    back = torch.empty_like(places)
    back[places] = torch.arange(len(places))
    return ordered[back]


def _ranks(m, x, ids):
    return x + ids.argsort(stable=True).argsort()[:, None]


def _unique_first(m, x, ids):
    first = (ids[:, None] == ids[None]).int().argmax(1)
    return x + first[:, None]


@pytest.mark.parametrize(
    "how",
    [
        _sorted_experts, _sorted_experts_by_argsort, _searched, _searched_in_itself, _bucketized,
        _found_among, _least_of_table, _most_of_table, _all_of_table, _any_of_table, _argmax_of_table,
        _count_of_table, _adapter_segments, _ranks, _unique_first,
    ],
)  # fmt: skip
def test_I3_an_example_whose_rows_are_all_alike_hides_nothing(how):
    check(how, (same_ids(5),), FROM_IDS)


def test_I3_the_way_back_of_sorted_rows_stays_in_graphs():
    graphed = check(_sorted_experts, (same_ids(5),), FROM_IDS)
    # The sort, and the write at the places of a permutation, whose bounds let `picked[back]` stay.
    assert kinds(graphed) == "gbgegeg" and reasons(graphed) == {"mixes_tokens": 2}


def _previous(m, x, ids, previous):
    return x + x[previous]


def test_I3_an_index_of_minus_one_means_the_last_real_row():
    def inputs(n, first):
        return make_ids(n), torch.arange(n) - 1 if first else (torch.arange(n) - 1).clamp(min=0)

    graphed = check(
        _previous, inputs(5, False), [inputs(n, first) for n in COUNTS for first in (True, False)]
    )
    assert "mixes_tokens" in reasons(graphed)


def test_I6_an_index_beyond_the_real_rows_is_eagers_error():
    model = Given(_previous).eval()
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    graphed.capture(make_ids(5), torch.arange(5))
    with torch.no_grad(), pytest.raises(IndexError):
        graphed(make_ids(5), torch.tensor([0, 1, 2, 3, 6]))
    with torch.no_grad():
        compare(graphed, model, (make_ids(5), torch.arange(5)), exact=False, where="afterwards")


def test_I3_an_index_of_the_token_rows_that_the_model_holds():
    model = Given(lambda m, x, ids: x + x[m.picked])
    model.register_buffer("picked", torch.tensor([0, 1]))
    model.eval().picked = torch.tensor([-1])
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    assert graphed.capture(make_ids(5)).ok
    with torch.no_grad():
        compare(graphed, model, (make_ids(6),), exact=False, where="the last row")
    assert graphed.stats.replays == 1


def _first_mended(m, x, ids, previous):
    previous = previous * 1
    previous[0] = 0
    return x + m.embedding(previous)


def _first_mended_through_a_view(m, x, ids, previous):
    previous = previous * 1
    first = previous[:1]
    first.clamp_(min=0)
    return x + m.embedding(previous)


@pytest.mark.parametrize("how", [_first_mended, _first_mended_through_a_view])
def test_I3_a_write_to_one_row_is_none_to_the_rows_that_repeat_it(how):
    """Padded rows repeat what the first row was before: −1, which is no index."""
    calls = [(make_ids(n), torch.arange(n) - 1) for n in COUNTS]
    check(how, (make_ids(5), torch.arange(5)), calls)


def test_I3_a_position_behind_the_end_of_a_table_leaves_its_bucket_out():
    class Placed(Toy):
        def __init__(self):
            super().__init__(lambda m, x: x + m.few[torch.arange(x.shape[0])], num_blocks=1)
            self.few = nn.Parameter(torch.randn(10, HIDDEN))

    model = Placed().eval()
    graphed = piecewise.compile(model, buckets=(8, 16), progress=False)
    report = graphed.capture(make_ids(5), torch.arange(5))
    assert report.captured == (8,) and "table of 10 rows" in str(report)
    with torch.no_grad():
        for n in (3, 8, 9, 10):
            compare(graphed, model, (make_ids(n), torch.arange(n)), exact=n >= 8, where=f"{n} tokens")
        with pytest.raises(IndexError):
            graphed(make_ids(11), torch.arange(11))
    assert graphed.stats.replays == 2


def _tiled(x, out):
    """Writes zeros to the rows, and garbage behind them, as a kernel that works on whole tiles may."""
    memory = out.untyped_storage()
    out.as_strided((memory.nbytes() // 8,), (1,)).fill_(1 << 40)
    out.zero_()


tiled = boundary_ops.define("hard_rows::tiled(Tensor x, Tensor(a!) out) -> ()", _tiled)


def test_I2_what_a_boundary_op_leaves_behind_the_rows_is_no_zero():
    def how(m, x, ids):
        back = torch.empty(x.shape[0], dtype=torch.long)
        tiled(x, back)
        places = ids.argsort(stable=True)
        back[places] = torch.arange(len(places))
        return x + x[back]

    check(how, (make_ids(5),), FROM_IDS)


def test_I2_every_second_row_repeats_another_row_than_all_do():
    """The ids at odd places are none, and eager never looks them up."""

    def inputs(n):
        others = torch.full((n,), 3)
        others[1::2] = 999
        return make_ids(n), others

    graphed = check(
        lambda m, x, ids, others: x[::2] + m.embedding((others + ids * 0)[::2]),
        inputs(5),
        [inputs(n) for n in COUNTS if n > 2],
    )
    with torch.no_grad():
        assert graphed.verify(*inputs(5)).ok


def test_I3_declared_ops_see_no_padded_integers_that_are_no_real_ones():
    with torch.library._scoped_library("hard_rows_lookup", "FRAGMENT") as library:
        library.define("look_up(Tensor table, Tensor index) -> Tensor")
        library.impl("look_up", lambda table, index: table[index], "CompositeExplicitAutograd")
        fake = lambda table, index: table.new_empty(index.shape[0], table.shape[1])  # noqa: E731
        torch.library.register_fake("hard_rows_lookup::look_up", fake, lib=library)
        boundary_ops.declare_rows("hard_rows_lookup::look_up", token_args={"index": 0})
        look_up = torch.ops.hard_rows_lookup.look_up
        graphed = check(
            lambda m, x, ids: x + look_up(m.embedding.weight, (x[:, 0].sigmoid() * 40).long()),
            (make_ids(5),), FROM_IDS,
        )  # fmt: skip
        assert "mixes_tokens" in reasons(graphed)
        graphed = check(lambda m, x, ids: x + look_up(m.embedding.weight, ids), (make_ids(5),), FROM_IDS)
        assert reasons(graphed) == {}


def test_I8_rows_that_a_repeated_example_would_break_cost_no_bucket():
    """At 16 rows, made of the example's five in turn, the ids at even places are no ids."""
    others = torch.tensor([3, 999, 3, 999, 3])
    model = Given(lambda m, x, ids, others: x[::2] + m.embedding((others + ids * 0)[::2])).eval()
    graphed = piecewise.compile(model, buckets=(16,), progress=False)
    assert graphed.capture(make_ids(5), others).ok
    with torch.no_grad():
        others = torch.full((16,), 3)
        others[1::2] = 999
        compare(graphed, model, (make_ids(16), others), exact=True, where="sixteen")
    assert graphed.stats.replays == 1


# Served calls whose shapes the example does not show.


class Kept(nn.Module):
    """A head on the rows that an input names."""

    def __init__(self):
        super().__init__()
        self.toy = Toy(num_blocks=2, project=False)
        self.head = nn.Linear(HIDDEN, 11)

    def forward(self, ids, keep):
        return self.head(self.toy(ids)[keep])


def test_I10_rows_kept_by_an_index_that_names_late_ones():
    model = Kept().eval()
    graphed = piecewise.compile(model, buckets=(4, 8, 16), progress=False)
    assert graphed.capture(make_ids(8), torch.tensor([3, 7])).ok
    with torch.no_grad():
        for n, keep in ((3, [0, 2]), (4, [1, 3]), (9, [8, 0, 4]), (16, [15, 3]), (5, [4, -1])):
            arguments = make_ids(n), torch.tensor(keep)
            compare(graphed, model, arguments, exact=False, where=f"{n} tokens, {keep}")
    assert graphed.stats.replays == 5


class Pooled(nn.Module):
    """The mean of each sequence, by the rows at which sequences begin and end."""

    def __init__(self):
        super().__init__()
        self.toy = Toy(num_blocks=2, project=False)

    def forward(self, ids, cu_seqlens):
        x = self.toy(ids).cumsum(0)
        ends = x[cu_seqlens[1:] - 1]
        begins = torch.where(cu_seqlens[:-1, None] > 0, x[cu_seqlens[:-1] - 1], 0.0)
        return (ends - begins) / (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]


def test_I10_sequences_pooled_by_their_bounds_one_or_several():
    model = Pooled().eval()
    graphed = piecewise.compile(model, buckets=(8, 16), progress=False)
    assert graphed.capture(make_ids(6), torch.tensor([0, 2, 6])).ok
    several = [torch.tensor(bounds) for bounds in ([0, 3, 7], [0, 1, 4, 9], [0, 2, 16])]
    with torch.no_grad():
        for bounds in several:
            arguments = make_ids(int(bounds[-1])), bounds
            compare(graphed, model, arguments, exact=False, where=f"{bounds}")
        assert graphed.stats.replays == 3
        assert graphed.capture(make_ids(6), torch.tensor([0, 6])).ok, "another kind of call"
        for bounds in (torch.tensor([0, 5]), torch.tensor([0, 13]), *several):
            arguments = make_ids(int(bounds[-1])), bounds
            compare(graphed, model, arguments, exact=False, where=f"{bounds}, one captured, too")
    assert graphed.stats.replays == 8, graphed.stats


# Ops that return several views, and those under a transform.


def _flex(m, x):
    n = x.shape[0]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, device="cpu")
    heads = x.view(1, n, 4, HIDDEN // 4).transpose(1, 2)
    return flex_attention(heads, heads, heads, block_mask=mask).transpose(1, 2).reshape(n, HIDDEN)


SEVERAL = {
    "broadcast": lambda m, x: sum(torch.broadcast_tensors(x, x[:, :1])),
    "broadcast_of_weights": lambda m, x: sum(torch.broadcast_tensors(x, m.blocks[0].norm.weight)),
    "meshgrid": lambda m, x: x @ torch.meshgrid(x[0], x[0], indexing="ij")[0],
    "mesh_of_rows": lambda m, x: sum(torch.meshgrid(x[:, 0], x[:, 1], indexing="ij"))[:, :1] + x,
    "atleast": lambda m, x: sum(torch.atleast_2d(x, x * 2)),
    "vmap": lambda m, x: torch.vmap(lambda row: row.softmax(-1) * 2)(x) + 1,
    "vmap_with_weights": lambda m, x: torch.vmap(lambda r, w: r @ w, (0, None))(x, m.blocks[0].o.weight),
    "nested_vmap": lambda m, x: torch.vmap(torch.vmap(lambda a: a.sin() + 1))(x),
}
MIXED = {
    "vmap_over_tokens": lambda m, x: torch.vmap(lambda column: column.flip(0))(x.T).T.contiguous(),
    "flex_attention": _flex,
}


@pytest.mark.parametrize("name", SEVERAL)
def test_I3_views_of_several_tensors_and_vmaps_are_served(name):
    graphed = check_sizes(Toy(SEVERAL[name], num_blocks=1).eval(), sizes=(2, 7, 8, 9, 15, 16, 17))
    assert kinds(graphed)[-1] == "g" and graphed.report().coverage > 0.9


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_I3_vmaps_over_tokens_and_higher_order_ops_are_eager_steps(name):
    graphed = check_sizes(Toy(MIXED[name], num_blocks=1).eval(), sizes=(2, 7, 8, 9, 15, 16, 17))
    assert "e" in kinds(graphed)


@pytest.mark.parametrize("how", ["result", "items"])
def test_I7_views_of_weights_and_rows_that_the_caller_is_given(how):
    def head(m, x):
        both = torch.atleast_2d(x, m.projection.weight)
        return both if how == "result" else both[0] * 2 + both[1].sum()

    check_sizes(Toy(head, num_blocks=1, project=False).eval())


def test_I3_an_op_that_nobody_declared_is_eager_and_the_message_says_what_to_do():
    with torch.library._scoped_library("hard_rows", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("hard_rows::twice", lambda x: torch.empty_like(x), lib=library)
        toy = Toy(lambda m, x: torch.ops.hard_rows.twice(x), num_blocks=1).eval()
        graphed = check_sizes(toy)
        (reason,) = [r for s in graphed.report().plans[0].segments for r in s.reasons]
        assert reason.code == "unknown_op" and 'declare_rows("hard_rows::twice"' in reason.detail
        assert "test_hard_rows.py" in reason.source
        boundary_ops.declare_rows("hard_rows::twice", token_args={"x": 0})
        assert kinds(check_sizes(toy)) == "gbg"
