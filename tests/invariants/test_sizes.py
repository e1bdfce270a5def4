"""[I6, I10] Every token count, every way to pass tokens, and models that branch on the count."""

from __future__ import annotations

import pytest
import torch
from inspection import inspect
from torch import nn
from toy_models import (
    CACHE_ROWS,
    HIDDEN,
    Toy,
    assert_same,
    check_sizes,
    compare,
    kinds,
    log,
    make_ids,
    mix,
    pack,
    reasons,
)

import boundary_ops
import piecewise
from piecewise.errors.analysis import FixedTokenCount, SeveralDims
from runners.stats import FallbackReason

BUCKETS = (4, 8, 32)
ALL_SIZES = (0, 1, 3, 4, 5, 7, 8, 9, 31, 32, 33)


def toy(head=None, **settings):
    return Toy(head, num_blocks=1, **settings).eval()


@pytest.mark.parametrize("example", [2, 5, 8, 40])
def test_I10_every_size_from_any_example(example):
    graphed = check_sizes(Toy(num_blocks=2).eval(), buckets=BUCKETS, example=example, sizes=ALL_SIZES)
    assert graphed.stats.reasons == {FallbackReason.ZERO_TOKENS: 3, FallbackReason.ABOVE_LARGEST_BUCKET: 3}
    assert graphed.stats.calls_by_bucket == {4: 9, 8: 9, 32: 9}


def test_I10_an_example_of_one_token_is_an_error_that_says_so():
    graphed = piecewise.compile(toy(), buckets=(8,), progress=False)
    with pytest.raises(FixedTokenCount, match="two or more tokens"):
        graphed.capture(make_ids(1), torch.arange(1))


# One token.


def _branch(m, x):
    return x * 2 if x.shape[0] == 1 else x * 3


def _squeeze(m, x):
    return x.squeeze(0) + 1 if x.squeeze(0).dim() == 1 else x - 1


def _broadcast(m, x):
    return x + x[1:2]


def _branch_of_constants(m, x):
    return x, "one" if x.shape[0] == 1 else "many"


def _branch_of_structure(m, x):
    return (x,) if x.shape[0] == 1 else [x, None]


def _branch_of_dropped_result(m, x):
    return (x, None) if x.shape[0] == 1 else (x, x * 2)


@pytest.mark.parametrize(
    "head",
    [_branch, _squeeze, _branch_of_constants, _branch_of_structure, _branch_of_dropped_result],
)
def test_I10_one_token_runs_eagerly_where_the_model_branches_on_it(head):
    graphed = check_sizes(toy(head, project=False), eager=(1,))
    assert graphed.stats.reasons[FallbackReason.ONE_TOKEN_BRANCH] == 3


def _copy_that_is_none_for_one_row(m, x):
    x = x * 1
    columns = x.T.contiguous()  # one row is contiguous already: the same memory
    columns.mul_(2)
    return x + columns.T


def test_I10_one_token_runs_eagerly_where_a_write_would_reach_another_tensor():
    graphed = check_sizes(toy(_copy_that_is_none_for_one_row), eager=(1,))
    assert graphed.stats.reasons[FallbackReason.ONE_TOKEN_BRANCH] == 3


def test_I10_one_token_runs_eagerly_where_a_write_would_reach_an_input():
    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.cache = nn.Linear(HIDDEN, HIDDEN), torch.zeros(CACHE_ROWS, HIDDEN)

        def forward(self, x):
            columns = x.T.contiguous()  # of one row, this is the caller's memory
            columns[:, -1].mul_(2)
            out = torch.empty_like(x)
            mix(x, x, x, out, self.cache)
            return self.linear(out), x

    rows = lambda n: (torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)),)  # noqa: E731
    graphed = check_sizes(Columns().eval(), arguments=rows, sizes=(1, 2, 8), eager=(1,))
    assert graphed.stats.reasons == {FallbackReason.ONE_TOKEN_BRANCH: 3}


def test_I10_one_token_runs_eagerly_where_rows_broadcast():
    check_sizes(toy(_broadcast), eager=(1,))


@pytest.mark.parametrize(
    "head",
    [
        lambda m, x: x,
        lambda m, x: x - x.mean(0),
        lambda m, x: x[-1:],
        lambda m, x: (x.T.contiguous() * 2).T,
        lambda m, x: (x, x.shape[0], x.shape[0] + 1),
        lambda m, x: {"hidden": x, "name": "toy", "half": x.shape[0] / 2},
    ],
)
def test_I10_one_token_replays_where_the_program_is_the_same(head):
    check_sizes(toy(head, project=False), sizes=(1, 2))


# Branches on the count.


def _above_twelve(m, x):
    return x * 2 if x.shape[0] > 12 else x * 3


@pytest.mark.parametrize("example", [5, 20])
def test_I10_a_branch_on_the_count_gives_each_bucket_its_own_trace(example):
    graphed = piecewise.compile(toy(_above_twelve), buckets=(8, 16, 32), progress=False)
    assert graphed.capture(make_ids(example), torch.arange(example)).captured == (8, 16, 32)
    with torch.no_grad():
        for n in (2, 7, 8, 9, 12, 13, 16, 17, 32):
            compare(
                graphed, graphed.model, (make_ids(n), torch.arange(n)), exact=n in (8, 16, 32), where=f"{n}"
            )
    # 9 and 12 lie in bucket 16, whose graph holds the other branch.
    assert graphed.stats.reasons == {FallbackReason.SHAPE_GUARD: 2} and graphed.stats.replays == 7


def test_I10_a_bucket_of_one_that_the_trace_excludes_is_no_failed_capture():
    def head(model, x):
        unused = x * 2 if x.shape[0] > 2 else x * 3  # leaves a guard, and the same program  # noqa: F841
        return x

    graphed = piecewise.compile(toy(head), buckets=(1, 8), progress=False, strict=True)
    report = graphed.capture(make_ids(5), torch.arange(5))
    assert {bucket.bucket: bucket.status for bucket in report.buckets} == {8: "captured", 1: "eager"}
    assert "branches on the token count" in report.buckets[-1].reason
    with torch.no_grad():
        for n in (1, 3):
            compare(graphed, graphed.model, (make_ids(n), torch.arange(n)), exact=n == 1, where=f"{n}")
    assert graphed.stats.reasons == {FallbackReason.SHAPE_GUARD: 1}


def _in_fours(m, x):
    if x.shape[0] % 4 == 0:
        return x.view(-1, 4, HIDDEN).amax(1).repeat_interleave(4, 0)
    return x * 3


def test_I10_an_example_that_would_exclude_every_bucket():
    graphed = piecewise.compile(toy(_in_fours), buckets=(8, 16), progress=False)
    assert graphed.capture(make_ids(5), torch.arange(5)).captured == (8, 16)
    with torch.no_grad():
        for n in (2, 4, 7, 8, 12, 13, 16):
            compare(graphed, graphed.model, (make_ids(n), torch.arange(n)), exact=n in (8, 16), where=f"{n}")
    # With 4 rows there is one group of four, which is another trace to torch.
    assert graphed.stats.reasons == {FallbackReason.SHAPE_GUARD: 4} and graphed.stats.replays == 3


def _in_nines(m, x):
    if x.shape[0] % 9 == 0:
        return x.view(-1, 9, HIDDEN).flip(0).view(-1, HIDDEN)
    return x * 3


def test_I3_the_probes_find_a_count_that_the_branch_allows():
    graphed = piecewise.compile(toy(_in_nines), buckets=(27,), progress=False)
    assert graphed.capture(make_ids(5), torch.arange(5)).captured == (27,)
    with torch.no_grad():
        for n in (9, 18, 20, 27):
            compare(graphed, graphed.model, (make_ids(n), torch.arange(n)), exact=n == 27, where=f"{n}")
    assert graphed.stats.replays == 2 and graphed.stats.reasons == {FallbackReason.SHAPE_GUARD: 2}


def _structure_above_twelve(m, x):
    return {"long": x} if x.shape[0] > 12 else (x, "short")


def test_I7_a_branch_on_the_count_may_change_the_structure():
    graphed = piecewise.compile(toy(_structure_above_twelve, project=False), buckets=(8, 16), progress=False)
    graphed.capture(make_ids(5), torch.arange(5))
    with torch.no_grad():
        for n in (5, 14, 8, 16, 10):
            compare(graphed, graphed.model, (make_ids(n), torch.arange(n)), exact=n in (8, 16), where=f"{n}")


class Workspace(Toy):
    def __init__(self):
        super().__init__(num_blocks=1)
        self.register_buffer("workspace", torch.randn(64, HIDDEN))

    def forward(self, ids, positions=None):
        return super().forward(ids, positions) * self.workspace[: ids.shape[0], :1]


def test_I10_a_workspace_bounds_the_buckets():
    graphed = piecewise.compile(Workspace().eval(), buckets=(16, 64, 128), progress=False)
    report = graphed.capture(make_ids(5), torch.arange(5) % 50)
    assert report.captured == (16, 64) or report.captured == (16, 64, 128)
    with torch.no_grad():
        for n in (9, 16, 60, 64):
            compare(graphed, graphed.model, (make_ids(n), torch.arange(n)), exact=n in (16, 64), where=f"{n}")
    assert graphed.stats.replays == 4


# Where tokens are.


class Shaped(nn.Module):
    """Takes tokens in one shape or another; `positions` may be [n], [1, n] or [3, n]."""

    def __init__(self):
        super().__init__()
        self.embedding, self.places = nn.Embedding(50, HIDDEN), nn.Embedding(64, HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.cache = torch.zeros(CACHE_ROWS, HIDDEN)

    def forward(self, ids=None, positions=None, inputs_embeds=None):
        x = self.embedding(ids) if inputs_embeds is None else inputs_embeds
        batched = x.dim() == 3
        if positions is not None:
            places = self.places(positions)
            x = x + (places.sum(0) if positions.dim() == 2 and positions.shape[0] == 3 else places)
        flat = x.reshape(-1, HIDDEN)
        out = torch.empty_like(flat)
        pack_free(flat, out)
        y = self.linear(out.view(1, -1, HIDDEN) if batched else out)
        return y, x


def _double(x, out):
    log.rows.append(x.shape[0])
    out.copy_(x * 2)


pack_free = boundary_ops.define(
    "toy_models::pack_free(Tensor x, Tensor(a!) out) -> ()", _double, token_args={"x": 0, "out": 0}
)


def _row(n):
    return make_ids(n)


def _embeds(n):
    return torch.randn(1, n, HIDDEN, generator=torch.Generator().manual_seed(n))


INPUTS = {
    "n": lambda n: (_row(n),),
    "1_n": lambda n: (_row(n)[None],),
    "n_and_n": lambda n: (_row(n), torch.arange(n)),
    "1_n_and_1_n": lambda n: (_row(n)[None], torch.arange(n)[None]),
    "n_and_3_n": lambda n: (_row(n), torch.arange(3 * n).view(3, n) % 60),
    "embeds": lambda n: (None, None, _embeds(n)),
    "embeds_and_positions": lambda n: (None, torch.arange(n)[None], _embeds(n)),
    "flat_embeds": lambda n: (None, None, _embeds(n)[0]),
}


@pytest.mark.parametrize("example", [2, 3, 5, HIDDEN])
@pytest.mark.parametrize("name", INPUTS)
def test_I10_tokens_are_found_wherever_they_are(name, example):
    """Also where the example has as many tokens as there are hidden channels, or as there are positions."""
    embedded = name in ("embeds", "flat_embeds")
    graphed = check_sizes(
        Shaped().eval(),
        arguments=INPUTS[name],
        example=example,
        sizes=(1, 2, 3, 5, 8, 9, 17),
        # A view that flattens tokens before the hidden size is known has guards that exclude one row.
        eager=(1,) if name == "embeds" else (),
        poison=example == 3,
    )
    # A view of the caller's own tensor is made anew on each call.
    assert kinds(graphed) == ("egbg" if embedded else "gbg")
    assert reasons(graphed) == ({"view_for_boundary": 1} if embedded else {})


def test_I10_a_batch_and_a_sequence_are_refused():
    graphed = piecewise.compile(Shaped().eval(), buckets=(8,), progress=False)
    with pytest.raises(SeveralDims, match="Fix:"):
        graphed.capture(torch.randint(0, 50, (2, 3)))


# Metadata as inputs.


class Packed(nn.Module):
    """Two blocks whose op takes slots [n], cu_seqlens [B + 1] and an int from the caller."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, HIDDEN)
        self.first, self.second = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.cache = torch.zeros(CACHE_ROWS, HIDDEN)

    def forward(self, ids, slots, cu_seqlens, scale):
        x = self.embedding(ids)
        for linear in (self.first, self.second):
            q, k, v = linear(x).chunk(3, -1)
            out = torch.empty_like(q)
            pack(q, k, v, out, self.cache, slots, cu_seqlens, scale)
            x = x + out
        return x


def packed(lengths, *, seed=0, scale=2):
    n = sum(lengths)
    slots = torch.randperm(CACHE_ROWS, generator=torch.Generator().manual_seed(seed + n))[:n]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return make_ids(n, seed=seed), slots, bounds, scale


@pytest.mark.parametrize("example", [[3, 2], [2, 2, 2], [4, 1, 3, 2]])
def test_I10_metadata_that_only_boundary_ops_read_may_change_on_each_call(example):
    model = Packed().eval()
    graphed = piecewise.compile(model, buckets=(8, 16), progress=False)
    graphed.capture(*packed(example))
    assert kinds(graphed) == "gbgbg"
    cases = [[1], [5, 3], [1, 1], [9], [2, 2, 2, 2, 2], [16], [1] * 7, [7, 8], [4, 4]]
    with torch.no_grad():
        for seed, lengths in enumerate(cases):
            arguments = packed(lengths, seed=seed, scale=seed)
            compare(graphed, model, arguments, exact=sum(lengths) in (8, 16), where=str(lengths))
        log.numbers.clear()
        graphed(*packed([5], scale=1000))
    assert log.numbers == [1000, 1000]
    assert graphed.stats.replays == len(cases) + 1


@pytest.mark.parametrize("scale", [0, 1, 2, 7])
def test_I10_an_int_that_reaches_boundary_ops_only_is_not_burned_in(scale):
    model = Packed().eval()
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    graphed.capture(*packed([3, 2], scale=scale))
    with torch.no_grad():
        for other in (0, 1, 3, -4, 10**6):
            compare(graphed, model, packed([2, 4], scale=other), exact=False, where=f"{scale} then {other}")
    assert graphed.stats.replays == 5


class Scaled(Packed):
    def forward(self, ids, slots, cu_seqlens, scale):
        return super().forward(ids, slots, cu_seqlens, scale) * scale + cu_seqlens.shape[0]


def test_I10_ints_and_other_sizes_that_rows_depend_on_are_todays():
    model = Scaled().eval()
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    graphed.capture(*packed([3, 2], scale=3))
    with torch.no_grad():
        for lengths, scale in (([1, 4], 3), ([6], 5), ([2, 2, 2], -1), ([5, 2], 0), ([8], 1)):
            compare(graphed, model, packed(lengths, scale=scale), exact=lengths == [8], where=f"{lengths}")


class BranchOnSequences(Packed):
    def forward(self, ids, slots, cu_seqlens, scale):
        x = super().forward(ids, slots, cu_seqlens, scale)
        return x * 2 if ids.shape[0] >= 4 * (cu_seqlens.shape[0] - 1) else x * 3


def test_I10_guards_on_other_sizes_are_checked_for_each_call():
    model = BranchOnSequences().eval()
    graphed = piecewise.compile(model, buckets=(8, 16), progress=False)
    graphed.capture(*packed([3, 3, 1]))
    with torch.no_grad():
        for lengths in ([1, 1], [5, 5], [9], [2, 2, 2], [3, 3, 3, 3], [4] * 4, [1] * 8):
            compare(graphed, model, packed(lengths), exact=sum(lengths) in (8, 16), where=f"{lengths}")


def test_I10_a_count_that_inputs_disagree_about_is_the_models_own_error():
    graphed = piecewise.compile(toy(), buckets=(8,), progress=False)
    graphed.capture(make_ids(5), torch.arange(5))
    with torch.no_grad(), pytest.raises(RuntimeError, match="must match"):
        graphed(make_ids(5), torch.arange(6))
    with torch.no_grad():  # one row of positions for all tokens is right in eager, by broadcasting
        compare(graphed, graphed.model, (make_ids(5), torch.arange(1)), exact=True, where="broadcast")
    assert graphed.stats.reasons == {FallbackReason.TOKEN_COUNT_MISMATCH: 2}


def test_I1_a_count_of_tokens_in_eager_ops_is_the_real_one():
    def head(m, x):
        return x + torch.arange(x.shape[0]).flip(0)[:, None] * x.shape[0]

    check_sizes(toy(head), sizes=(1, 3, 8, 12))


def test_I6_results_are_the_same_in_any_order_of_sizes():
    graphed = check_sizes(toy(), buckets=BUCKETS, sizes=(5,))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for n in torch.randint(1, 36, (60,), generator=generator).tolist():
            arguments = make_ids(n, seed=n), torch.arange(n)
            assert_same(graphed(*arguments), graphed.model(*arguments), exact=n in BUCKETS, where=f"{n}")


def test_I6_many_row_counts_keep_a_bounded_number_of_views():
    graphed = piecewise.compile(toy(), buckets=(256,), progress=False)
    graphed.capture(make_ids(5), torch.arange(5))
    with torch.no_grad():
        for n in range(1, 200):
            graphed(make_ids(min(n, 64)), torch.arange(min(n, 64)))
    steps = inspect(graphed).steps(256)
    assert 0 < len(steps._bound) <= steps.max_bound


class KeepLast(Toy):
    """`keep` rows of the result from the end, as `logits_to_keep` of transformers; 0 keeps all."""

    def forward(self, ids, positions, keep=0):
        return super().forward(ids, positions)[-keep:]


def test_I10_an_int_that_decides_on_shapes_is_part_of_the_signature():
    model = KeepLast(num_blocks=1).eval()
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    graphed.capture(make_ids(5), torch.arange(5), 0)
    assert kinds(graphed) == "gbg"  # all rows, as with no slice at all
    graphed.capture(make_ids(5), torch.arange(5), keep=2)
    assert kinds(graphed, 1) == "gbge"
    with torch.no_grad():
        for n, keep in ((5, 0), (5, 2), (8, 2), (1, 0), (3, 1), (8, 0)):
            compare(
                graphed,
                model,
                (make_ids(n), torch.arange(n), keep),
                exact=n == 8 or keep == 1,
                where=f"{n}, {keep}",
            )
    assert graphed.stats.replays == 5 and graphed.stats.reasons == {FallbackReason.UNSEEN_SIGNATURE: 1}
