"""[I3] No padded row reaches a real row and nothing depends on the padded count, for one op after another.

Each head sits between the last block and the projection of a toy model. A head that works row by row must
stay in the graph (kinds "gbg"); one that does not must run eagerly on real rows, alone ("gbgeg"). Values
are compared at all sizes around the buckets, with NaN and 1e4 in the padding.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from toy_models import HIDDEN, Toy, check_sizes, compare, kinds, make_ids, mix, reasons

import piecewise
from piecewise import TraceError
from piecewise.errors.analysis import FixedTokenCount
from piecewise.errors.capture import StrictRefusal

EAGER_ONE = "gbgeg"


def _set_last_to_zero(model, x):
    x = x * 1
    x[-1] = 0
    return x


def _write_through_view(model, x):
    last = x[-1]
    last.mul_(5)
    return x


def _write_through_view_of_copy(model, x):
    x = x * 1
    last = x[-1]
    last.mul_(5)
    return x + last


def _capacity(model, x):
    expert = F.one_hot(x.argmax(-1) % 4, 4)
    return x * (expert.cumsum(0) * expert <= 2).all(-1, keepdim=True)


def _int8_per_tensor(model, x):
    scale = x.abs().max() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8).float() * scale


def _int8_per_row(model, x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8).float() * scale


def _fp8(x, scale):
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _route_by_topk(model, x):
    weights, experts = x.softmax(-1).topk(2, -1)  # a padded row of NaN has experts, too
    return (model.places.weight[experts] * weights[..., None]).sum(1)


def _experts_choose(model, x):
    weights, rows = x[:, :4].topk(1, 0)
    return x.index_add(0, rows.flatten(), weights.flatten()[:, None].expand(-1, HIDDEN))


def _attention(model, x):
    causal = torch.ones(x.shape[0], x.shape[0]).tril()
    return (x @ x.T).masked_fill(causal == 0, float("-inf")).softmax(-1) @ x


def _causal_conv(model, x):
    return F.conv1d(F.pad(x.T[None], (2, 0)), torch.full((HIDDEN, HIDDEN, 3), 0.1))[0].T


def _rotary(model, x):
    angles = torch.arange(x.shape[0])[:, None] * 0.1
    left, right = x.chunk(2, -1)
    return torch.cat(
        [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1
    )


# Rows-only work: in graphs, whatever it is called.
ROW_WISE = {
    "nothing": lambda m, x: x,
    "first_row": lambda m, x: x - x[0],
    "activation": lambda m, x: F.silu(x) * x.tanh(),
    "softmax_in_rows": lambda m, x: x.softmax(-1),
    "sort_in_rows": lambda m, x: x.sort(-1)[0],
    "topk_in_rows": lambda m, x: x.topk(2, -1)[0] @ torch.ones(2, HIDDEN),
    "rotary": _rotary,
    "gather_by_position": lambda m, x: x + m.places.weight[torch.arange(x.shape[0])],
    "gather_by_value": lambda m, x: x + m.places.weight[x.argmax(-1)],
    "forward_cumsum": lambda m, x: x.cumsum(0) * 0.1,
    "forward_cummax": lambda m, x: x.cummax(0)[0],
    "capacity_by_cumsum": _capacity,
    "causal_conv": _causal_conv,
    "int8_per_row": _int8_per_row,
    "fp8_per_row": lambda m, x: _fp8(x, x.abs().amax(-1, keepdim=True) / 448),
    "route_by_topk": _route_by_topk,
    "rms_norm": lambda m, x: F.rms_norm(x, (HIDDEN,)),
    "forward_logcumsumexp": lambda m, x: x.logcumsumexp(0) * 0.1,
    "forward_cumprod": lambda m, x: x.tanh().cumprod(0),
    "front_row_added": lambda m, x: torch.cat([torch.ones(1, HIDDEN), x]),
    "rows_repeated_in_place": lambda m, x: x.repeat_interleave(2, 0),
    "heads_swapped_twice": lambda m, x: x.view(-1, 4, 4).transpose(0, 1).transpose(0, 1).flatten(1),
    "two_gathers": lambda m, x: m.places(m.embedding.weight[make_index(x)].argmax(-1)),
}


def make_index(x):
    return x.abs().argmax(-1) % 7


# (head, codes of what must be eager)
MIXING = {
    "last": (lambda m, x: x[-1:], {"consumes_token_dim": 1}),
    "view_of_last": (lambda m, x: x + x[-1:][:, 2:3], {"consumes_token_dim": 1}),
    "views_of_last_two": (lambda m, x: x + x.flip(0)[:, 4:6].sum(-1, keepdim=True), {"mixes_tokens": 1}),
    "amax": (lambda m, x: x - x.amax(0), {"consumes_token_dim": 1}),
    "sum": (lambda m, x: x - x.sum(0) * 0.1, {"consumes_token_dim": 1}),
    "logsumexp": (lambda m, x: x - x.logsumexp(0), {"consumes_token_dim": 1}),
    "norm_of_all": (lambda m, x: x / x.norm(), {"consumes_token_dim": 1}),
    "quantile": (lambda m, x: x - x.quantile(0.5, dim=0), {"consumes_token_dim": 1}),
    "fp8_per_tensor": (lambda m, x: _fp8(x, x.abs().amax() / 448), {"consumes_token_dim": 1}),
    "experts_choose_rows": (_experts_choose, {"consumes_token_dim": 1}),
    "expert_load": (
        lambda m, x: x * F.one_hot(x.argmax(-1), HIDDEN).float().mean(0),
        {"consumes_token_dim": 1},
    ),
    "attention": (_attention, {"mixes_tokens": 2}),
    "fused_attention": (
        lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0],
        {"mixes_tokens": 1},
    ),
    "einsum": (lambda m, x: torch.einsum("nh,mh,mk->nk", x, x, x) * 0.01, {"mixes_tokens": 1}),
    "distances": (lambda m, x: torch.cdist(x, x) @ x * 0.01, {"mixes_tokens": 1}),
    "renorm": (lambda m, x: x.renorm(2, 1, 1.0), {"mixes_tokens": 1}),
    "all_but_the_last": (
        lambda m, x: x * (torch.arange(x.shape[0])[:, None] < x.shape[0] - 1),
        {"token_count_as_value": 1},
    ),
    "clamped_positions": (
        lambda m, x: x + m.places(torch.arange(1, x.shape[0] + 1).clamp(max=x.shape[0] - 1)),
        {"token_count_as_value": 1},
    ),
    "places_by_share": (
        lambda m, x: x + (torch.arange(x.shape[0]) / x.shape[0])[:, None],
        {"token_count_as_value": 1},
    ),
    "full_like_of_count": (lambda m, x: x + torch.full_like(x, x.shape[0]), {"token_count_as_value": 1}),
    "over_num_elements": (lambda m, x: x / x.numel(), {"token_count_as_value": 1}),
    "times_len": (lambda m, x: x * len(x), {"token_count_as_value": 1}),
    "mean": (lambda m, x: x - x.mean(0, keepdim=True), {"consumes_token_dim": 1}),
    "median": (lambda m, x: x - x.median(0)[0], {"consumes_token_dim": 1}),
    "std_of_all": (lambda m, x: x / x.std(), {"consumes_token_dim": 1}),
    "softmax_over_tokens": (lambda m, x: x.softmax(0), {"mixes_tokens": 1}),
    "normalize_over_tokens": (lambda m, x: F.normalize(x, dim=0), {"mixes_tokens": 1}),
    "sort_ascending": (lambda m, x: x.sort(0)[0], {"mixes_tokens": 1}),
    "sort_descending": (lambda m, x: x.sort(0, descending=True)[0], {"mixes_tokens": 1}),
    "argsort": (lambda m, x: x[x[:, 0].argsort()], {"mixes_tokens": 1}),
    "flip": (lambda m, x: x.flip(0), {"mixes_tokens": 1}),
    "roll": (lambda m, x: x.roll(1, 0), {"mixes_tokens": 1}),
    "gram": (lambda m, x: (x @ x.T) @ x * 0.01, {"mixes_tokens": 1}),
    "masked_attention": (lambda m, x: torch.ones(x.shape[0], x.shape[0]).tril() @ x, {"mixes_tokens": 1}),
    "cat_to_2n": (lambda m, x: torch.cat([x, x * 2]), {"mixes_tokens": 1}),
    "back_row_added": (lambda m, x: torch.cat([x, torch.ones(1, HIDDEN)]), {"mixes_tokens": 1}),
    "group_norm": (lambda m, x: F.group_norm(x.T[None], 4)[0].T, {"mixes_tokens": 1}),
    "conv": (
        lambda m, x: F.conv1d(x.T[None], torch.full((HIDDEN, HIDDEN, 3), 0.1), padding=1)[0].T,
        {"mixes_tokens": 1},
    ),
    "index_add": (
        lambda m, x: x.index_add(0, torch.zeros(x.shape[0], dtype=torch.long), x),
        {"mixes_tokens": 1},
    ),
    "last_set_to_zero": (_set_last_to_zero, {"mixes_tokens": 1}),
    "float_to_index": (lambda m, x: m.places((x[:, 0].sigmoid() * 40).long()), {"mixes_tokens": 1}),
    "arange_flipped": (lambda m, x: x + torch.arange(x.shape[0]).flip(0)[:, None], {"mixes_tokens": 1}),
    "times_count": (lambda m, x: x * x.shape[0], {"token_count_as_value": 1}),
    "over_count": (lambda m, x: x / x.shape[0], {"token_count_as_value": 1}),
    "root_of_count": (lambda m, x: x * x.shape[0] ** -0.5, {"token_count_as_value": 1}),
    "full_of_count": (lambda m, x: x + torch.full((x.shape[0], 1), x.shape[0]), {"token_count_as_value": 1}),
    "mean_by_hand": (
        lambda m, x: x - x.sum(0, keepdim=True) / x.shape[0],
        {"consumes_token_dim": 1, "token_count_as_value": 1},
    ),
    "dropout": (lambda m, x: F.dropout(x, 0.5, True), {"random": 1}),
    "noise": (lambda m, x: x + torch.rand_like(x), {"random": 1}),
    "item": (
        lambda m, x: x * x.sum().item(),
        {"consumes_token_dim": 1, "reads_back": 1, "data_dependent": 1},
    ),
    "write_through_view": (_write_through_view, {"consumes_token_dim": 1, "shared_with_eager": 1}),
    "write_through_view_of_copy": (
        _write_through_view_of_copy,
        {"consumes_token_dim": 1, "shared_with_eager": 1},
    ),
}


def toy(head, **settings):
    return Toy(head, num_blocks=1, **settings).eval()


@pytest.mark.parametrize("name", ROW_WISE)
def test_I3_rows_only_work_stays_in_the_graph(name):
    graphed = check_sizes(toy(ROW_WISE[name]))
    assert kinds(graphed) == "gbg" and reasons(graphed) == {}
    assert graphed.report().coverage == 1.0


@pytest.mark.parametrize("name", MIXING)
def test_I3_what_mixes_rows_runs_eagerly_on_real_rows(name):
    head, codes = MIXING[name]
    if name == "quantile" and torch.__version__ < "2.12":
        # Its kernel takes sizes as numbers there, so torch.compile cannot trace it for any count either.
        with pytest.raises(TraceError, match="quantile.*symbolic sizes.*test_token_mixing.py"):
            check_sizes(toy(head))
        return
    if name == "quantile" and torch.__version__ >= "2.14":
        codes = {"token_count_as_value": 1}  # it computes ranks from the count before it looks at rows
    graphed = check_sizes(toy(head))
    assert reasons(graphed) == codes
    assert kinds(graphed) == EAGER_ONE


def test_I3_a_scale_over_all_tokens_is_the_only_eager_part_of_int8_quantisation():
    graphed = check_sizes(toy(_int8_per_tensor))
    assert reasons(graphed) == {"consumes_token_dim": 1}
    assert kinds(graphed) == EAGER_ONE


def test_I3_a_norm_over_all_rows_takes_the_count_as_a_value():
    graphed = check_sizes(toy(lambda m, x: F.layer_norm(x, x.shape)))
    assert reasons(graphed) == {"token_count_as_value": 1} and kinds(graphed) == EAGER_ONE


def test_I3_a_boolean_mask_makes_the_rest_data_dependent():
    graphed = check_sizes(toy(lambda m, x: x[x[:, 0] > 0]))
    assert kinds(graphed) == "gbge" and reasons(graphed) == {"data_dependent": 2}


def test_I3_batch_statistics_over_tokens():
    head = lambda m, x: F.batch_norm(x, None, None, training=True)  # noqa: E731
    # One row has no statistics: eager raises, so one token is left out.
    graphed = check_sizes(toy(head), sizes=(2, 7, 8, 9, 16, 17))
    assert kinds(graphed) == EAGER_ONE


@pytest.mark.parametrize(
    "name, head, expected",
    [
        ("transpose", lambda m, x: x.T, "gbg"),
        ("flatten", lambda m, x: x.flatten(), "gbg"),
        ("columns", lambda m, x: x[:, ::2], "gbg"),
        ("two_token_dims", lambda m, x: x @ x.T, "gbg"),
        ("new_dim", lambda m, x: x[None].expand(3, -1, -1), "gbg"),
        ("heads_first", lambda m, x: x.view(-1, 4, 4).transpose(0, 1), "gbg"),
        ("heads_first_flat", lambda m, x: x.view(-1, 4, 4).transpose(0, 1).reshape(4, -1), "gbg"),
        ("head_major_flat", lambda m, x: x.T.reshape(-1), "gbge"),
        ("repeated", lambda m, x: x.repeat(2, 1), "gbge"),
        ("padded_behind", lambda m, x: F.pad(x, (0, 0, 0, 2)), "gbge"),
    ],
)
def test_I1_a_result_is_narrowed_where_its_real_elements_lead(name, head, expected):
    graphed = check_sizes(toy(head, project=False))
    assert kinds(graphed) == expected


@pytest.mark.parametrize(
    "head, eager", [(lambda m, x: x[1:], (2,)), (lambda m, x: x[-2:], (1,)), (lambda m, x: x[::2], (1, 2))]
)
def test_I10_sizes_at_which_a_slice_is_special_run_eagerly(head, eager):
    # torch treats a dim of size 1 as a case of its own, so one row left of two is another trace.
    check_sizes(toy(head), eager=eager)


def test_I3_the_logarithm_of_the_count_through_a_tensor():
    check_sizes(toy(lambda m, x: x * torch.log(torch.tensor(float(x.shape[0])) + 1)), eager=(1,))


@pytest.mark.parametrize(
    "head",
    [lambda m, x: x * math.log(x.shape[0]), lambda m, x: x * torch.linspace(0, 1, x.shape[0])[:, None]],
)
def test_I10_a_count_that_the_model_fixes_is_an_error_that_names_the_line(head):
    graphed = piecewise.compile(toy(head), buckets=(8,), progress=False)
    with pytest.raises(FixedTokenCount, match="test_token_mixing.py") as error:
        graphed.capture(make_ids(5), torch.arange(5))
    assert "token count" in str(error.value) and "Fix:" in str(error.value)


def test_I3_strict_names_the_op_and_its_line():
    graphed = piecewise.compile(toy(lambda m, x: x.flip(0)), buckets=(8,), progress=False, strict=True)
    with pytest.raises(StrictRefusal, match="flip") as error:
        graphed.capture(make_ids(5), torch.arange(5))
    assert "test_token_mixing.py" in str(error.value) and "Rule: no padded row" in str(error.value)


# Memory: what a padded run writes, or looks at, where no row of the result shows it.


def _rows_of_workspace(model, x):
    workspace = torch.zeros(64, HIDDEN)
    workspace[: x.shape[0]].copy_(x)
    return x + workspace.sum(0)


def _halves_of_buffer(model, x):
    n = x.shape[0]
    both = torch.zeros(2 * n, HIDDEN)
    both[n:].copy_(x)
    both[:n].copy_(x * 2)
    return both


def _boundary_writes_second_half(model, x):
    n = x.shape[0]
    both = torch.zeros(2 * n, HIDDEN)
    mix(x, x, x, both[n:], model.blocks[0].cache)
    return both * 2


def _boundary_writes_end_of_workspace(model, x):
    workspace = torch.zeros(64, HIDDEN)
    mix(x, x, x, workspace[-x.shape[0] :], model.blocks[0].cache)
    return workspace * 2


@pytest.mark.parametrize(
    "head",
    [_rows_of_workspace, _halves_of_buffer, _boundary_writes_second_half, _boundary_writes_end_of_workspace],
)
def test_I3_padded_rows_are_not_written_over_other_memory(head):
    check_sizes(toy(head))


def test_I3_a_view_that_repeats_is_refused_each_time():
    once, twice = (
        reasons(check_sizes(toy(head)))["mixes_tokens"]
        for head in (_halves_of_buffer, lambda m, x: _halves_of_buffer(m, x) + _halves_of_buffer(m, x * 3))
    )
    assert twice == 2 * once > 0


class WithWorkspace(Toy):
    """Adds rows of a workspace that is all zeros when the graphs are captured."""

    def __init__(self, head):
        super().__init__(head, num_blocks=1)
        self.register_buffer("workspace", torch.zeros(64, HIDDEN))
        self.register_buffer("numbers", torch.zeros(64, dtype=torch.long))


@pytest.mark.parametrize(
    "head, expected",
    [
        (lambda m, x: x + m.workspace[: x.shape[0]], "gbg"),
        (lambda m, x: x + m.workspace[-x.shape[0] :], "gbgeg"),
        (lambda m, x: x + m.workspace[: x.shape[0]].flip(0), "gbgeg"),
        (lambda m, x: x + m.numbers[: x.shape[0], None], "gbg"),
        (lambda m, x: x + m.numbers[-x.shape[0] :, None], "gbgeg"),
    ],
)
def test_I3_rows_of_a_constant_table_are_told_apart(head, expected):
    model = WithWorkspace(head).eval()
    graphed = piecewise.compile(model, buckets=(8, 16), progress=False)
    graphed.capture(make_ids(5), torch.arange(5))
    assert kinds(graphed) == expected
    with torch.no_grad():
        model.workspace.normal_()
        model.numbers.random_(10)
        for n in (3, 8, 11):
            compare(graphed, model, (make_ids(n), torch.arange(n)), exact=n == 8, where=f"{n} tokens")
    assert graphed.stats.replays == 3


def test_I3_state_keeps_the_rows_that_eager_leaves_alone():
    def head(model, x):
        model.workspace[: x.shape[0]].copy_(x)
        return x

    check_sizes(WithWorkspace(head).eval())


class Counting(Toy):
    """Keeps a call counter, a token counter and a histogram of token ids, as expert-load counters do."""

    def __init__(self):
        super().__init__(num_blocks=1)
        for name, size in (("calls", 1), ("tokens", 1), ("load", 50)):
            self.register_buffer(name, torch.zeros(size))

    def forward(self, ids, positions=None):
        self.calls.add_(1)
        self.tokens.add_(ids.shape[0])
        self.load.index_add_(0, ids, torch.ones(ids.shape[0]))
        return super().forward(ids, positions) + self.calls + self.load.sum()


def test_I3_counters_count_real_rows_once_per_call():
    graphed = check_sizes(Counting().eval())
    with torch.no_grad():
        model = graphed.model
        for n in (3, 8, 13):
            graphed(make_ids(n), torch.arange(n))
    assert (model.calls.item(), model.tokens.item(), model.load.sum().item()) == (3, 24, 24)
    assert graphed.stats.eager_calls == 3  # 17 tokens, in each of the rounds


def test_I3_random_ops_draw_the_numbers_that_eager_draws():
    model = Toy(lambda m, x: F.dropout(x, 0.3, True) + torch.randn(x.shape[0], 1), num_blocks=1).train()
    graphed = check_sizes(model)
    assert reasons(graphed) == {"random": 2}


def test_I3_inputs_whose_values_are_all_equal_hide_nothing():
    model = Toy(num_blocks=1).eval()
    model.embedding.register_forward_pre_hook(lambda module, given: (given[0].flip(0),))
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    graphed.capture(torch.full((5,), 3), torch.arange(5))
    with torch.no_grad():
        compare(graphed, model, (make_ids(6), torch.arange(6)), exact=False, where="6 tokens")
    assert graphed.stats.replays == 1 and "mixes_tokens" in reasons(graphed)
