"""[I1, I2] Padding exists only inside graphs, and whatever a graph reads was written for this call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from inspection import inspect
from torch import nn
from toy_models import (
    HIDDEN,
    Block,
    Toy,
    check_sizes,
    compare,
    kinds,
    log,
    make_ids,
    mix,
    poison_copies,
    reasons,
    scatter_rows,
    shift,
)

import boundary_ops
import piecewise
from piecewise.errors.analysis import NoCommonDim, ReshapesInPlace


def _transposed(x, out):
    """out [h, n] becomes the transpose of x [n, h], plus what it held; both must be dense."""
    log.rows.append(x.shape[0])
    log.dense.append(out.is_contiguous())
    out.add_(x.T)


shift_rows = boundary_ops.define(
    "toy_models::shift_rows(Tensor x, Tensor(a!) out) -> ()",
    lambda x, out: out.copy_((x + 1) * 2),
    token_args={"x": 0, "out": 0},
)
transposed = boundary_ops.define("toy_models::transposed(Tensor x, Tensor(a!) out) -> ()", _transposed)


class Model(nn.Module):
    """`how(self, ids)` with an embedding, two linears, a block and a workspace at hand."""

    def __init__(self, how):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.block, self.how = nn.Linear(HIDDEN, 3 * HIDDEN), Block(), how
        self.cache = torch.zeros(64, HIDDEN)

    def forward(self, ids):
        return self.how(self, ids)


def model(how):
    return Model(how).eval()


def check(how, **settings):
    return check_sizes(model(how), arguments=lambda n: (make_ids(n),), **settings)


def num_captures(graphed):
    return sum(runner.num_captures for runner in inspect(graphed).runners)


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_I1_L_boundary_ops_inside_make_L_plus_1_graphs(num_blocks):
    buckets = (4, 8, 16)
    graphed = check_sizes(Toy(num_blocks=num_blocks).eval(), buckets=buckets, sizes=(1, 3, 4, 8, 11))
    assert kinds(graphed) == "gb" * num_blocks + "g"
    assert num_captures(graphed) == len(buckets) * (num_blocks + 1)
    assert graphed.stats.captured == buckets
    layers = {segment.lowering_key for segment in inspect(graphed).plan.graph_segments()}
    assert len(layers) == min(num_blocks + 1, 3)  # first, middle, last


def test_I1_boundary_ops_see_real_rows_only_and_dense_outputs():
    graphed = check_sizes(Toy(num_blocks=2).eval(), sizes=(3,))
    with torch.no_grad():
        for n in (1, 5, 8, 9, 16):
            log.rows.clear(), log.dense.clear()
            graphed(make_ids(n), torch.arange(n))
            assert log.rows == [n, n] and all(log.dense)


def test_I8_capture_calls_no_boundary_op():
    log.rows.clear()
    graphed = piecewise.compile(Toy().eval(), buckets=(8, 16), progress=False)
    graphed.capture(make_ids(5), torch.arange(5))
    assert log.rows == []


def _out_of(m, q, k, v):
    out = torch.empty_like(q)
    mix(q, k, v, out, m.cache)
    return out


def _boundary_first(m, ids):
    x = m.embedding.weight[ids]
    return m.linear(_out_of(m, x, x, x))


def _boundary_last(m, ids):
    x = m.embedding(ids)
    out = torch.empty_like(x)
    mix(x, x, x, out, m.cache)
    return out


def _adjacent(m, ids):
    x = m.embedding(ids)
    first, second = torch.empty_like(x), torch.empty_like(x)
    mix(x, x, x, first, m.cache)
    mix(first, x, x, second, m.cache)
    return m.linear(second)


def _same_out_twice(m, ids):
    x = m.embedding(ids)
    out = torch.empty_like(x)
    mix(x, x, x, out, m.cache)
    y = m.linear(out)
    mix(y, x, x, out, m.cache)
    return y + out


def _only_views_between(m, ids):
    x = m.embedding(ids)
    out = _out_of(m, x, x, x)
    turned = out.view(-1, 4, 4).flatten(1)[:, : HIDDEN // 2]
    wide = torch.empty_like(x)
    both = torch.empty_like(turned)
    shift(wide.zero_(), torch.empty_like(wide))
    shift(turned, both)
    return both


def _qkv_split(m, ids):
    q, k, v = m.wide(m.embedding(ids)).split(HIDDEN, dim=-1)
    return m.linear(_out_of(m, q, k, v)) + q


def _qkv_chunk_of_heads(m, ids):
    q, k, v = m.wide(m.embedding(ids)).view(-1, 3, 4, 4).unbind(1)
    out = torch.empty_like(q)
    shift(q.flatten(1), out.view(-1, HIDDEN))
    return out.flatten(1) * k.flatten(1) + v.flatten(1)


def _half_of_a_buffer(m, ids):
    x = m.embedding(ids)
    big = torch.zeros(x.shape[0], 2 * HIDDEN)
    mix(x, x, x, big[:, :HIDDEN], m.cache)
    y = m.linear(x)
    mix(y, y, y, big[:, HIDDEN:], m.cache)
    return big.sum(-1, keepdim=True) * y + big[:, 3 : 3 + HIDDEN]


def _view_made_early_base_written_late(m, ids):
    x = m.embedding(ids)
    big = torch.zeros(x.shape[0], 2 * HIDDEN)
    left = big[:, :HIDDEN]
    out = _out_of(m, x, x, x)
    big.add_(torch.cat([out, x], -1))
    again = _out_of(m, m.linear(out), x, x)
    return left * again


def _written_between(m, ids):
    x = m.embedding(ids)
    out = _out_of(m, x, x, x)
    out.mul_(2)
    shift(out, again := torch.empty_like(out))
    return out + again


@pytest.mark.parametrize(
    "how, expected",
    [
        (_boundary_first, "gbg"),
        (_boundary_last, "gb"),
        (_adjacent, "gbbg"),
        (_same_out_twice, "gbgbg"),
        (_only_views_between, None),
        (_qkv_split, "gbg"),
        (_qkv_chunk_of_heads, "gbg"),
        (_half_of_a_buffer, "gbgbg"),
        (_view_made_early_base_written_late, "gbgbg"),
        (_written_between, "gbgbg"),
    ],
)
def test_I1_wherever_the_boundary_op_stands(how, expected):
    graphed = check(how)
    assert reasons(graphed) == {}
    if expected is not None:
        assert kinds(graphed) == expected


def test_I1_a_boundary_op_on_inputs_alone_comes_first():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x, out):
            shift_rows(x, out)
            return self.linear(out)

    def arguments(n):
        return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)), torch.zeros(n, HIDDEN)

    graphed = check_sizes(First().eval(), arguments=arguments)
    assert kinds(graphed) == "bg"


def test_I10_inputs_that_nothing_ties_together_are_an_error_that_says_what_to_declare():
    class First(nn.Module):
        def forward(self, x, out):
            shift(x, out)
            return out * 2

    graphed = piecewise.compile(First(), buckets=(8,), progress=False)
    with pytest.raises(NoCommonDim, match="no symbolic dim in common") as error:
        graphed.capture(torch.randn(5, HIDDEN), torch.randn(5, HIDDEN))
    assert "token_args" in str(error.value) and "test_rows.py" in str(error.value)


def test_I1_segments_that_only_make_views_are_not_captured():
    def how(m, ids):
        x = m.embedding(ids)
        big = torch.zeros(x.shape[0], 2, HIDDEN)
        shift(x, big[:, 0])
        view = big.transpose(0, 1)
        shift(x, big[:, 1])
        return view

    graphed = check(how)
    assert kinds(graphed).count("b") == 2
    made = [g for s in inspect(graphed).signatures for a in s.assemblers for g in a.runners]
    views = [segment.index for segment in inspect(graphed).plan.segments if segment.views_only]
    assert not set(made) & set(views) and num_captures(graphed) == 2 * len(made)


# Token dims that are not outermost.


def _token_dim_last(m, ids):
    x = m.linear(m.embedding(ids))
    out = torch.ones(HIDDEN, x.shape[0])
    transposed(x, out)
    return out * 2


def _token_dim_last_read_through_an_early_view(m, ids):
    x = m.linear(m.embedding(ids))
    out = torch.ones(HIDDEN, x.shape[0])
    last = out[:, -1]  # loses the token dim: eager, and looks at memory that the op writes later
    transposed(x, out)
    return out + last[:, None] * 3


def _token_dim_last_written_through_an_early_view(m, ids):
    x = m.linear(m.embedding(ids))
    out = torch.ones(HIDDEN, x.shape[0])
    last = out[:, -1]
    transposed(x, out)
    last.mul_(3)
    return out * 2


def _token_dim_last_as_one_row(m, ids):
    x = m.linear(m.embedding(ids))
    out = torch.ones(HIDDEN, x.shape[0])
    flat = out.view(-1)  # head-major: the real elements do not lead
    transposed(x, out)
    return flat * 2


def _token_dim_last_twice_in_one_call(m, ids):
    x = m.linear(m.embedding(ids))
    out = torch.ones(HIDDEN, x.shape[0])
    transposed(out.T, out)
    transposed(x, out)
    return out * 2


def _token_dim_last_as_two_arguments(m, ids):
    out = m.linear(m.embedding(ids)).T.contiguous()
    shift(out, out)
    return out * 2


@pytest.mark.parametrize(
    "how",
    [
        _token_dim_last,
        _token_dim_last_as_two_arguments,
        _token_dim_last_read_through_an_early_view,
        _token_dim_last_written_through_an_early_view,
        _token_dim_last_as_one_row,
        _token_dim_last_twice_in_one_call,
    ],
)
def test_I1_a_narrowed_inner_dim_is_passed_as_a_dense_copy_and_copied_back(how):
    log.dense.clear()
    check(how)
    assert all(log.dense)


def test_I1_two_token_dims_are_both_narrowed():
    check(lambda m, ids: ((x := m.embedding(ids)) @ x.T, _out_of(m, x, x, x)))


def test_I1_two_views_of_one_inner_dim_stay_views_of_one_memory():
    def how(m, ids):
        x = m.linear(m.embedding(ids))
        both = torch.ones(2 * HIDDEN, x.shape[0])
        transposed(x, both[:HIDDEN])
        transposed(x, both[HIDDEN:])
        return both * 2

    check(how)


# Rows that nobody wrote.


def test_I2_rows_that_a_boundary_op_leaves_alone_are_valid_indices():
    """The inverse permutation of a router: made empty, filled on real rows, used as an index on all rows."""

    def how(m, ids):
        x = m.embedding(ids)
        order = x[:, 0].argsort()
        inverse = torch.empty_like(order)
        scatter_rows(order, torch.arange(ids.shape[0]), inverse)
        out = _out_of(m, x, x, x)
        return m.linear(m.block.cache.new_ones(64, HIDDEN)[inverse]) + out

    check(how)


def test_I2_indices_made_of_floats_that_a_boundary_op_leaves_are_looked_up_on_real_rows():
    def how(m, ids):
        x = m.embedding(ids)
        picked = _out_of(m, x, x, x)
        places = picked[:, 0].nan_to_num(0).abs().clamp(max=63).long()
        return picked + m.block.cache.new_ones(64, HIDDEN)[places]

    assert reasons(check(how)) == {"mixes_tokens": 1}


def test_I2_nothing_of_an_earlier_call_survives():
    toy = Toy(
        lambda m, x: torch.cat([x, x.flip(0)], -1) @ torch.ones(2 * HIDDEN, HIDDEN), num_blocks=2
    ).eval()
    graphed = check_sizes(toy, sizes=(3, 8))
    with torch.no_grad():
        for n in (16, 9, 2, 8, 5, 1):
            with torch.no_grad():
                toy.embedding.weight[49] = float("nan")
                graphed(torch.full((16,), 49), torch.arange(16))
                graphed(torch.full((8,), 49), torch.arange(8))
                toy.embedding.weight[49] = 0.5
            compare(graphed, toy, (make_ids(n), torch.arange(n)), exact=n in (8, 16), where=f"{n} tokens")


def test_I2_an_absent_optional_input_is_not_last_calls_value():
    toy = Toy(num_blocks=1).eval()
    graphed = piecewise.compile(toy, buckets=(8,), progress=False)
    graphed.capture(make_ids(5), torch.arange(5))
    with torch.no_grad():
        compare(graphed, toy, (make_ids(5), torch.arange(5) + 9), exact=False, where="with positions")
        compare(graphed, toy, (make_ids(5),), exact=True, where="without, never captured")
        graphed.capture(make_ids(5))
        compare(graphed, toy, (make_ids(5),), exact=False, where="without")
        compare(graphed, toy, (make_ids(5), torch.arange(5) + 3), exact=False, where="with other ones")
    assert graphed.stats.replays == 3 and len(graphed.report().plans) == 2


def test_I2_padded_ids_are_valid_indices_whatever_the_bucket_held():
    toy = Toy(num_blocks=1).eval()
    graphed = check_sizes(toy, sizes=(5,))
    for signature in inspect(graphed).signatures:
        for served in signature.served.values():
            for shadow in served.steps.copy_ins:
                shadow.buffer.fill_(10**9)
    with torch.no_grad():
        compare(graphed, toy, (make_ids(3), torch.arange(3)), exact=False, where="3 tokens")
    assert graphed.stats.reasons.total() == 0


def test_I1_padded_rows_of_eager_results_are_set_on_each_call():
    toy = Toy(lambda m, x: x.flip(0) * 2, num_blocks=1).eval()
    graphed = check_sizes(toy, sizes=(5, 9))
    poison_copies(graphed, float("inf"))
    with torch.no_grad():
        compare(graphed, toy, (make_ids(5), torch.arange(5)), exact=False, where="5 tokens")


# Regions and nested graphs.


def _autocast_in_two_segments(m, ids):
    x = m.embedding(ids)
    with torch.autocast("cpu", torch.bfloat16):
        y = m.linear(x)
        out = torch.empty_like(x)
        mix(x, x, x, out, m.cache)
        z = m.linear(out)
    return m.linear(x) + y + z


def _boundary_op_sees_the_region(m, ids):
    x = m.embedding(ids)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.empty_like(x)
        ambient_linear(x, m.linear.weight, out)
    ambient_linear(x, m.linear.weight, again := torch.empty_like(x))
    return out, again


def _ambient_linear(x, weight, out):
    out.copy_(F.linear(x, weight))


ambient_linear = boundary_ops.define(
    "toy_models::ambient_linear(Tensor x, Tensor weight, Tensor(a!) out) -> ()", _ambient_linear
)


def _nested_regions(m, ids):
    x = m.embedding(ids)
    with torch.autocast("cpu", torch.bfloat16):
        a = m.linear(x)
        with torch.autocast("cpu", enabled=False):
            b = m.linear(_out_of(m, x, x, x))
        c = m.linear(x.flip(0))
    return a + b, c


@pytest.mark.parametrize("how", [_autocast_in_two_segments, _boundary_op_sees_the_region, _nested_regions])
def test_I10_autocast_regions_that_span_segments(how):
    with torch.no_grad():
        result = model(how)(make_ids(4))
    assert any(t.dtype is torch.bfloat16 for t in result) or how is not _nested_regions
    check_bfloat16(how)


def check_bfloat16(how):
    """Bitwise at bucket size; padded, a bfloat16 matmul may round its last bit otherwise."""
    tested = model(how)
    graphed = piecewise.compile(tested, buckets=(8, 16), progress=False)
    assert graphed.capture(make_ids(5)).ok
    with torch.no_grad():
        for n in (8, 16):
            compare(graphed, tested, (make_ids(n),), exact=True, where=f"{n} tokens")
        for n in (3, 9):
            for mine, theirs in zip(leaves(graphed(make_ids(n))), leaves(tested(make_ids(n))), strict=True):
                assert mine.dtype is theirs.dtype
                torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert graphed.stats.replays == 4


def leaves(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("use_reentrant", [False])
def test_I10_boundary_ops_in_nested_graphs_are_found(use_reentrant):
    def how(m, ids):
        x = m.embedding(ids)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(m.block, x, use_reentrant=use_reentrant)
        return m.linear(x)

    graphed = check(how)
    assert kinds(graphed) == "gbgbg"


def test_I10_nested_graphs_with_several_results():
    def part(m, x):
        out = _out_of(m, x, x, x)
        return m.linear(out), out.flip(0), out[-1]

    def how(m, ids):
        a, b, c = torch.utils.checkpoint.checkpoint(part, m, m.embedding(ids), use_reentrant=False)
        return a + b, c

    graphed = check(how)
    assert "b" in kinds(graphed) and reasons(graphed) == {"mixes_tokens": 1, "consumes_token_dim": 1}


@pytest.mark.parametrize("name", ["unsqueeze_", "squeeze_", "t_"])
def test_I10_reshaping_in_place_is_refused_by_name(name):
    def how(m, ids):
        x = m.linear(m.embedding(ids))
        out = _out_of(m, x, x, x)
        getattr(out, name)(*((0,) if name != "t_" else ()))
        return out * 2

    graphed = piecewise.compile(model(how), buckets=(8,), progress=False)
    with pytest.raises(ReshapesInPlace, match=name) as error:
        graphed.capture(make_ids(5))
    assert "test_rows.py" in str(error.value) and f"'{name[:-1]}'" in str(error.value)
