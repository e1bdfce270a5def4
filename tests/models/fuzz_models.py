"""Random programs of views, writes, ops that mix rows and boundary ops, and what is done with them.

A program keeps a list of tensors [n, h] that its ops pick from, views of each other among them, so that
writes reach what was made long before. Ops in `JUMPY` turn a last bit into another row or expert; they are
drawn for float64 alone, where two values practically never come as close as that.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import random

import fuzz_changes
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from toy_models import CACHE_ROWS, HIDDEN, VOCAB, make_ids, mix, pack, shift

# Where models live: taken out of the environment, as names with this prefix are settings.
DEVICE = os.environ.pop("PIECEWISE_FUZZ_DEVICE", "cpu")
OPS = {}
JUMPY, COUNTING = set(), set()


def op(function, *marks):
    OPS[function.__name__] = function
    for mark in marks:
        mark.add(function.__name__)
    return function


def jumpy(function):
    return op(function, JUMPY)


def counting(function):
    """Branches on the token count, so that a trace serves one side of it alone."""
    return op(function, COUNTING)


# Rows alone ------------------------------------------------------------------------------------------------


@op
def linear(m, a, b):
    return [torch.tanh(m.linear(a))]


@op
def average(m, a, b):
    return [a * 0.5 + b * 0.5]


@op
def norms(m, a, b):
    scale = b.square().mean(-1, keepdim=True).add(0.5).rsqrt()
    return [torch.tanh(m.norm(a + 1.0)), b * scale]


@op
def softmax_in_rows(m, a, b):
    return [a.softmax(-1) + F.silu(b)]


@op
def gather(m, a, b):
    return [a + m.places.weight[torch.arange(a.shape[0], device=a.device)], m.places(m.ids % 7)]


@op
def rotate(m, a, b):
    angles = torch.arange(a.shape[0], dtype=a.dtype, device=a.device)[:, None] * 0.1
    left, right = a.chunk(2, -1)
    return [torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin()], -1)]


@jumpy
def gather_by_value(m, a, b):
    return [a + m.embedding.weight[(a[:, 0].sigmoid() * 5).long()]]


@jumpy
def int8_per_row(m, a, b):
    scale = a.abs().amax(-1, keepdim=True).clamp(min=0.1) / 127
    return [(a / scale).round().clamp(-128, 127).to(torch.int8).to(a.dtype) * scale]


@jumpy
def route_by_topk(m, a, b):
    weights, experts = m.linear(a).softmax(-1).topk(2, -1)
    return [(m.places.weight[experts] * weights[..., None]).sum(1)]


@jumpy
def expert_capacity(m, a, b):
    expert = F.one_hot(a.argmax(-1) % 4, 4)
    return [b * ((expert.cumsum(0) * expert) <= 2).all(-1, keepdim=True)]


@op
def branch_on_flag(m, a, b):
    return [a + 1 if m.flag else a * 0.5]


@op
def dropout_module(m, a, b):
    return [m.dropout(a)]


@op
def given_bias(m, a, b):
    return [a if m.bias is None else torch.tanh(a + m.bias)]


# Rows and what came before them ----------------------------------------------------------------------------


@op
def cumsum(m, a, b):
    return [torch.tanh(a.cumsum(0) * 0.1)]


@op
def causal_conv(m, a, b):
    kernel = a.new_full((HIDDEN, 1, 3), 0.2)
    return [torch.tanh(F.conv1d(F.pad(a.T[None], (2, 0)), kernel, groups=HIDDEN)[0].T)]


# All rows --------------------------------------------------------------------------------------------------


@op
def flip(m, a, b):
    return [a.flip(0), b.roll(1, 0)]


@jumpy
def sort(m, a, b):
    values, order = a.sort(dim=0, stable=True)
    return [values + order]


@op
def center(m, a, b):
    return [a - a.mean(0), b - b.amax(0)]


@op
def over_count(m, a, b):
    return [a / a.shape[0], b * b.new_full((b.shape[0], 1), 1.0 / b.shape[0])]


@op
def gram(m, a, b):
    return [torch.tanh(a @ a.T @ b)]


@op
def attention(m, a, b):
    causal = a.new_ones(a.shape[0], a.shape[0]).tril()
    scores = (a @ b.T).masked_fill(causal == 0, float("-inf"))
    return [scores.softmax(-1) @ b]


@op
def softmax_over_tokens(m, a, b):
    return [a.softmax(0) + b]


@op
def statistics(m, a, b):
    return [(a - a.mean(0)) / (a.var(0, correction=0) + 0.5).sqrt()]


@jumpy
def int8_per_tensor(m, a, b):
    scale = a.abs().max().clamp(min=0.1) / 127
    return [(a / scale).round().clamp(-128, 127).to(torch.int8).to(a.dtype) * scale]


@op
def read_back(m, a, b):
    return [a * torch.tanh(a.sum()).item()]


@jumpy
def masked_sum(m, a, b):
    return [a + torch.tanh(a[a[:, 0] > 0].sum(0))]


@op
def dropout(m, a, b):
    return [F.dropout(a, 0.2, True)]


@op
def index_add(m, a, b):
    # Whole numbers, whose sums are the same in any order.
    added = torch.zeros_like(a).index_add(0, m.ids % a.shape[0], (b * 64).round())
    return [torch.tanh(a + added / 64)]


@counting
def branch_on_count(m, a, b):
    return [a + 1 if a.shape[0] > 5 else a - 1]


# What values hide: which rows meet is told by ids, which may all be the same in an example -----------------


@op
def searched(m, a, b):
    ordered = m.ids.sort()[0]
    found = torch.searchsorted(ordered, m.ids) + torch.bucketize(m.ids, ordered, right=True)
    return [a + 0.01 * found[:, None]]


@op
def found_among(m, a, b):
    return [a * torch.isin(m.ids + 1, m.ids)[:, None], b]


@op
def table_of_ids(m, a, b):
    table = m.ids[:, None] - m.ids[None]
    least, most = table.amin(1, keepdim=True), (table > 3).any(1, keepdim=True)
    return [a + 0.01 * least, torch.where(most, a, b), a + 0.01 * table.eq(0).cumsum(1)[:, -1:]]


@op
def sorted_by_id(m, a, b):
    chosen = m.ids % 4
    ordered, places = chosen.sort(stable=True)
    picked = torch.tanh(a[places] * m.places.weight[ordered])
    back = torch.empty_like(places)
    back[places] = torch.arange(places.shape[0], device=a.device)
    return [picked[back] + b]


@op
def ranked(m, a, b):
    return [a + 0.01 * m.ids.argsort(stable=True).argsort()[:, None]]


@op
def neighbours(m, a, b):
    """The row that an index names, which is the last one for −1."""
    return [a + b[(m.ids % 3 - 1).clamp(max=a.shape[0] - 1)]]


@op
def segments(m, a, b):
    begins = F.one_hot(m.ids % 4, 4).sum(0).cumsum(0)
    return [torch.tanh(a + 0.01 * begins[m.ids % 4, None])]


@op
def one_hots(m, a, b):
    return [a + F.one_hot(m.ids % 5, HIDDEN).to(a.dtype), b]


@op
def placed_in_rows(m, a, b):
    columns = torch.arange(a.shape[0], device=a.device)[:, None] % HIDDEN
    return [a.scatter(1, columns, 0.5), a.gather(1, columns).expand(-1, HIDDEN) * 0.5]


@op
def clamped_lookup(m, a, b):
    return [a + m.places((m.ids - 3).clamp(0, 9)), b + m.places((m.ids + 60) // 4)]


@jumpy
def lookup_by_comparison(m, a, b):
    return [a + m.places((a > b).sum(-1))]


# Blocks, tails and tables ----------------------------------------------------------------------------------


@op
def blocks(m, a, b):
    both = torch.cat([a, a * 2])
    return [both.view(2, -1, HIDDEN).sum(0) * 0.3 + b, both.tanh()[: a.shape[0]]]


@op
def padded_conv(m, a, b):
    kernel = a.new_full((HIDDEN, 1, 3), 0.3)
    rows = F.conv1d(a.T[None], kernel, padding=2, groups=HIDDEN)[0].T
    return [torch.tanh(rows[: a.shape[0]]), torch.tanh(F.pad(b, (0, 0, 0, 2))[:-2])]


@op
def repeated(m, a, b):
    return [a.repeat_interleave(2, 0)[::2] + 1, b.repeat(2, 1)[: b.shape[0]]]


@op
def front_row(m, a, b):
    return [torch.cat([a.new_ones(1, HIDDEN), a])[1:], b - b[:1]]


@op
def windows(m, a, b):
    wide = torch.cat([a.new_zeros(2, HIDDEN), a])
    return [wide.unfold(0, 3, 1).mean(-1), b]


@op
def vmapped(m, a, b):
    return [torch.vmap(lambda row, other: row.sin() * other)(a, b)]


# Writes ----------------------------------------------------------------------------------------------------


@op
def scale_in_place(m, a, b):
    a.mul_(0.5).add_(0.1)
    return []


@op
def copy_in_place(m, a, b):
    a.copy_(torch.tanh(a + b))
    return []


@op
def noise_in_place(m, a, b):
    a.add_(torch.rand_like(a) * 0.1)
    return []


@op
def write_last_row(m, a, b):
    last = a[-1]
    last.mul_(0.5)
    return [b + last]


@op
def set_last_row(m, a, b):
    a[-1] = 0.25
    return []


@op
def set_first_row(m, a, b):
    a[0] = 0.75
    return []


@op
def write_columns(m, a, b):
    left = a[:, :4]
    left.copy_(torch.tanh(b[:, 4:8]))
    return []


@op
def write_one_column(m, a, b):
    columns = a.unbind(1)
    columns[3].mul_(0.5)
    return [torch.stack(columns[::-1], 1)]


@op
def write_in_memory_order(m, a, b):
    a = (a * 1.0).contiguous()
    a.view(-1)[-1] = 0.5
    a.view(-1)[::3].mul_(0.5)
    return [a]


@op
def heads(m, a, b):
    by_head = a.view(-1, 4, 4).transpose(0, 1)
    by_head[:, -1].mul_(0.5)
    return [by_head.transpose(0, 1).reshape(-1, HIDDEN)]


@op
def halves(m, a, b):
    both = torch.cat([a, b])
    return [both[: a.shape[0]], both[a.shape[0] :]]


@op
def interleaved(m, a, b):
    both = a.new_zeros(2 * a.shape[0], HIDDEN)
    both[::2].copy_(a)
    both[1::2] = b
    return [both[::2], both[1::2]]


@op
def shifted_rows(m, a, b):
    row = a.new_zeros(1, HIDDEN)
    return [torch.cat([row, a])[:-1], torch.cat([b, row])[1:]]


@op
def made_in_two_parts(m, a, b):
    made = torch.empty_like(a)
    made[:, :8] = a[:, 8:]
    made[:, 8:] = b[:, :8]
    return [made]


@op
def index_written(m, a, b):
    index = torch.arange(a.shape[0], device=a.device)
    index.add_(1)
    index[-1] = 0
    return [a[index]]


# State -----------------------------------------------------------------------------------------------------


@op
def write_workspace(m, a, b):
    m.workspace[: a.shape[0]].copy_(torch.tanh(a))
    return []


@op
def scatter_workspace(m, a, b):
    m.workspace[torch.arange(a.shape[0], device=a.device)] = torch.tanh(a)
    return []


@op
def read_workspace(m, a, b):
    return [torch.tanh(m.workspace[: a.shape[0]] + a), a + torch.tanh(m.workspace.sum(0))]


@op
def count(m, a, b):
    m.calls.add_(1)
    return [a / (1 + m.calls)]


@op
def count_rows(m, a, b):
    m.load.add_(a.shape[0])
    m.load.index_add_(0, m.ids % 3, a.new_ones(a.shape[0]))
    return [torch.tanh(a + m.load[0])]


for function in fuzz_changes.OPS:
    op(function)


# Boundary ops ----------------------------------------------------------------------------------------------


@op
def boundary(m, a, b):
    out = torch.empty_like(a)
    mix(a, b, torch.tanh(b), out, m.cache)
    return [out]


@op
def packed_boundary(m, a, b):
    if m.slots is None:
        return []
    out = torch.empty_like(a)
    pack(a, b, torch.tanh(b), out, m.cache, m.slots, m.cu_seqlens, 2)
    return [torch.tanh(out)]


@op
def boundary_writes_operand(m, a, b):
    out = a.new_zeros(a.shape[0], HIDDEN)
    shift(a, out)
    return [torch.tanh(out)]


@op
def boundary_writes_half(m, a, b):
    both = a.new_zeros(a.shape[0], 2 * HIDDEN)
    shift(torch.tanh(a), both[:, HIDDEN:])
    return [both[:, HIDDEN:], both[:, :HIDDEN]]


@op
def boundary_on_columns(m, a, b):
    columns = a.T.contiguous()
    out = torch.empty_like(columns)
    shift(columns, out)
    last = columns[:, -1]
    last.mul_(0.5)
    return [torch.tanh(out).T, columns.T]


@op
def nested_boundary(m, a, b):
    def inner(a):
        out = torch.empty_like(a)
        mix(a, a, torch.tanh(a), out, m.cache)
        return torch.tanh(out), a.flip(0)

    return list(torch.utils.checkpoint.checkpoint(inner, a, use_reentrant=False))


# Programs --------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "first rest")
RESULTS = {
    "list": lambda ids, out, made: [out, *made[-5:]],
    "single": lambda ids, out, made: out,
    "dict": lambda ids, out, made: {"rows": ids.shape[0], "out": out, "none": None, "last": made[-1]},
    "named": lambda ids, out, made: Pair(made[1], (out, ids, out)),
    "views": lambda ids, out, made: (out[:, :4], out.T, made[-1].view(-1, 4, 4), made[0][0]),
}


PARAMETERS = ("ids", "x", "bias", "slots", "cu_seqlens")


class Program(nn.Module):
    """Runs `steps`: (name of an op, two numbers that pick its operands); `results` names one of `RESULTS`."""

    def __init__(self, steps, *, dtype=torch.float64, results="list", device="cpu"):
        super().__init__()
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.embedding, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(CACHE_ROWS, HIDDEN)
        self.dropout = nn.Dropout(0.2)
        for name, sizes in (("workspace", (CACHE_ROWS, HIDDEN)), ("calls", (1,)), ("load", (3,))):
            self.register_buffer(name, torch.zeros(sizes))
        self.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self.cache = torch.zeros(CACHE_ROWS, HIDDEN, dtype=dtype, device=device)
        self.held = fuzz_changes.Held(dtype=dtype, device=device)
        self.steps, self.results, self.flag = steps, results, False

    def forward(self, ids, x, bias=None, slots=None, cu_seqlens=None):
        at_hand = _AtHand(self, ids, bias, slots, cu_seqlens)
        made = [self.embedding(ids), x]
        for name, first, second in self.steps:
            made += OPS[name](at_hand, made[first % len(made)], made[second % len(made)])
        out = torch.empty_like(made[0])
        mix(made[-1], made[0], made[-1], out, self.cache)
        return RESULTS[self.results](ids, out, made)


class _AtHand:
    """The model's parts and the call's inputs, as ops name them."""

    def __init__(self, model, ids, bias, slots, cu_seqlens):
        self.linear, self.norm, self.embedding = model.linear, model.norm, model.embedding
        self.places, self.dropout, self.flag = model.places, model.dropout, model.flag
        self.workspace, self.calls, self.load = model.workspace, model.calls, model.load
        self.cache, self.ids, self.bias = model.cache, ids, bias
        self.model, self.held = model, model.held
        self.slots, self.cu_seqlens = slots, cu_seqlens


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, how it is graphed, and what happens to it.

    Attributes:
        steps, dtype, results: of the `Program`.
        has_bias, is_packed: which optional inputs calls have.
        buckets, example, outputs, capture, max_padding_ratio: how it is captured.
        poison: what padded rows behind boundary ops hold, or None.
        changes: which of `fuzz_changes.CHANGES` the actions that change state take, in turn.
        hides: whether all ids of the example are the same.
        actions: (what, token count) in order.
    """

    steps: tuple
    dtype: torch.dtype
    results: str
    has_bias: bool
    is_packed: bool
    buckets: tuple
    example: int
    outputs: str
    capture: str
    max_padding_ratio: float | None
    poison: float | None
    actions: tuple
    hides: bool = False
    changes: tuple = ()

    def model(self):
        return Program(self.steps, dtype=self.dtype, results=self.results, device=DEVICE)

    def example_arguments(self):
        """Inputs for a capture."""
        found = self.arguments(max(self.example, 2))
        return (torch.full_like(found[0], 7) if self.hides else found[0], *found[1:])

    def arguments(self, n, *, has_bias=None):
        """Inputs of `n` tokens; the same for the same count."""
        generator = torch.Generator().manual_seed(n)
        found = [make_ids(n), torch.randn(n, HIDDEN, generator=generator, dtype=self.dtype), None, None, None]
        if self.has_bias if has_bias is None else has_bias:
            found[2] = torch.randn(HIDDEN, generator=generator, dtype=self.dtype)
        if self.is_packed:
            found[3] = torch.randperm(CACHE_ROWS, generator=generator)[:n]
            found[4] = torch.tensor(sorted({0, n // 3, n}) if n > 2 else [0, n // 2, n])
        return tuple(tensor.to(DEVICE) if tensor is not None else None for tensor in found)


ACTIONS = (
    *["call"] * 20, "eager_only", "grad", "other_signature", "update", "rebind", "rebind_buffer", "flag",
    "train", *["change_state"] * 3, "refresh", "release", "capture", "verify", "hook", "keywords",
)  # fmt: skip


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    names = sorted(set(OPS) - (JUMPY if dtype is torch.float32 else set()))
    steps = st.lists(
        st.tuples(st.sampled_from(names), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7
    )
    buckets = draw(st.lists(st.integers(1, 16), min_size=1, max_size=3, unique=True))
    edges = sorted({max(bucket + d, 0) for bucket in buckets for d in (-1, 0, 1)})
    sizes = st.one_of(st.sampled_from(edges), st.integers(0, 20))
    return Case(
        steps=tuple(draw(steps)),
        dtype=dtype,
        results=draw(st.sampled_from(sorted(RESULTS))),
        has_bias=draw(st.booleans()),
        is_packed=draw(st.booleans()),
        changes=tuple(draw(st.lists(st.integers(0, len(fuzz_changes.CHANGES) - 1), min_size=3, max_size=3))),
        buckets=tuple(sorted(buckets)),
        example=draw(st.integers(2, 9)),
        outputs=draw(st.sampled_from(["copy", "copy", "view"])),
        capture=draw(st.sampled_from(["startup", "startup", "lazy"])),
        max_padding_ratio=draw(st.sampled_from([None, None, 2.0])),
        poison=draw(st.sampled_from([float("nan"), 1e4, None])),
        actions=tuple(draw(st.lists(st.tuples(st.sampled_from(ACTIONS), sizes), min_size=4, max_size=12))),
        hides=draw(st.booleans()),
    )


def case_with(name, *, seed):
    """A case whose program begins with the op `name`, and goes on at random."""
    chance = random.Random(seed)
    names = [name, *chance.choices(sorted(OPS), k=chance.randint(2, 5))]
    return Case(
        steps=tuple((name, chance.randrange(10), chance.randrange(10)) for name in names),
        dtype=torch.float64,
        results="list",
        has_bias=True,
        is_packed=True,
        buckets=(8, 12),
        example=5,
        outputs="copy",
        capture="startup",
        max_padding_ratio=None,
        poison=(float("nan"), 1e4)[seed % 2],
        actions=tuple(("call", n) for n in (3, 8, 12, 9, 1, 2, 13, 0, 7)),
        hides=seed % 2 == 0,
    )
