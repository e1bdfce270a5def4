"""[I1, I2, I3, I7] Random programs of views, writes, ops that mix rows and boundary ops equal eager ones.

Each program keeps a list of tensors [n, h] that its ops pick from, views of each other among them, so that
writes reach what was made long before. What is right for each op alone (`test_token_mixing.py`) must be right
for any sequence of them, wherever that cuts the graph.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from toy_models import CACHE_ROWS, HIDDEN, compare, make_ids, mix, op_poison, poison_copies, shift

import piecewise

OPS = {}


def op(function):
    OPS[function.__name__] = function
    return function


@op
def linear(m, a, b):
    return [torch.tanh(m.linear(a))]


@op
def average(m, a, b):
    return [a * 0.5 + b * 0.5]


@op
def scale_in_place(m, a, b):
    a.mul_(0.5).add_(0.1)
    return []


@op
def copy_in_place(m, a, b):
    a.copy_(torch.tanh(a + b))
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
    a = a * 1.0
    a.view(-1)[-1] = 0.5
    a.view(-1)[::3].mul_(0.5)
    return [a]


@op
def flip(m, a, b):
    return [a.flip(0)]


@op
def sort(m, a, b):
    values, order = a.sort(0)
    return [values + order]


@op
def cumsum(m, a, b):
    return [torch.tanh(a.cumsum(0) * 0.1)]


@op
def center(m, a, b):
    return [a - a.mean(0)]


@op
def over_count(m, a, b):
    return [a / a.shape[0]]


@op
def gram(m, a, b):
    return [torch.tanh(a @ a.T @ b)]


@op
def read_back(m, a, b):
    return [a * torch.tanh(a.sum()).item()]


@op
def masked_sum(m, a, b):
    return [a + torch.tanh(a[a[:, 0] > 0].sum(0))]


@op
def dropout(m, a, b):
    return [nn.functional.dropout(a, 0.2, True)]


@op
def noise_in_place(m, a, b):
    a.add_(torch.rand_like(a) * 0.1)
    return []


@op
def boundary(m, a, b):
    out = torch.empty_like(a)
    mix(a, b, torch.tanh(b), out, m.cache)
    return [out]


@op
def boundary_writes_operand(m, a, b):
    out = torch.zeros(a.shape[0], HIDDEN)
    shift(a, out)
    return [torch.tanh(out)]


@op
def boundary_writes_half(m, a, b):
    both = torch.zeros(a.shape[0], 2 * HIDDEN)
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


@op
def halves(m, a, b):
    both = torch.cat([a, b])
    return [both[: a.shape[0]], both[a.shape[0] :]]


@op
def interleaved(m, a, b):
    both = torch.zeros(2 * a.shape[0], HIDDEN)
    both[::2].copy_(a)
    both[1::2] = b
    return [both[::2], both[1::2]]


@op
def shifted_rows(m, a, b):
    row = torch.zeros(1, HIDDEN)
    return [torch.cat([row, a])[:-1], torch.cat([b, row])[1:]]


@op
def made_in_two_parts(m, a, b):
    made = torch.empty(a.shape[0], HIDDEN)
    made[:, :8] = a[:, 8:]
    made[:, 8:] = b[:, :8]
    return [made]


@op
def index_written(m, a, b):
    index = torch.arange(a.shape[0])
    index.add_(1)
    index[-1] = 0
    return [a[index]]


@op
def gather_by_value(m, a, b):
    return [a + m.embedding.weight[(a[:, 0].sigmoid() * 5).long()]]


@op
def heads(m, a, b):
    by_head = a.view(-1, 4, 4).transpose(0, 1)
    by_head[:, -1].mul_(0.5)
    return [by_head.transpose(0, 1).reshape(-1, HIDDEN)]


@op
def write_workspace(m, a, b):
    m.workspace[: a.shape[0]].copy_(torch.tanh(a))
    return []


@op
def scatter_workspace(m, a, b):
    m.workspace[torch.arange(a.shape[0])] = torch.tanh(a)
    return []


@op
def read_workspace(m, a, b):
    return [torch.tanh(m.workspace[: a.shape[0]] + a), a + torch.tanh(m.workspace.sum(0))]


@op
def count(m, a, b):
    m.calls.add_(1)
    return [a / (1 + m.calls)]


class Program(nn.Module):
    """Runs `steps`: (name of an op, two numbers that pick its operands)."""

    def __init__(self, steps):
        super().__init__()
        self.linear, self.embedding = nn.Linear(HIDDEN, HIDDEN), nn.Embedding(50, HIDDEN)
        self.register_buffer("workspace", torch.zeros(CACHE_ROWS, HIDDEN))
        self.register_buffer("calls", torch.zeros(1))
        self.cache, self.steps = torch.zeros(CACHE_ROWS, HIDDEN), steps

    def forward(self, ids, x):
        made = [self.embedding(ids), x]
        for name, first, second in self.steps:
            made += OPS[name](self, made[first % len(made)], made[second % len(made)])
        out = torch.empty_like(made[0])
        mix(made[-1], made[0], made[-1], out, self.cache)
        return [out, *made[-5:]]


def arguments(n):
    return make_ids(n), torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("seed", range(len(OPS)))
def test_I3_random_programs_equal_eager_ones(seed):
    chance = random.Random(seed)
    # Each op is at the front of one program at least.
    names = [list(OPS)[seed % len(OPS)], *chance.choices(list(OPS), k=chance.randint(3, 9))]
    model = Program([(name, chance.randrange(1000), chance.randrange(1000)) for name in names]).eval()
    graphed = piecewise.compile(model, buckets=(8, 12), progress=False)
    report = graphed.capture(*arguments(5))
    assert report.ok, (report, model.steps)
    with torch.no_grad():
        for poison in (None, float("nan")):
            if poison is not None:
                poison_copies(graphed, poison)
            with op_poison(poison):
                for n in (3, 8, 12, 9, 1):
                    where = f"{n} tokens, poison {poison}, {model.steps}"
                    compare(graphed, model, arguments(n), exact=False, where=where)
    assert graphed.stats.replays >= 8
