"""A small model whose Python state, weights and arguments the tests change, and `serve`, which checks one
call.

`state_models::attend` mixes tokens causally: row i of `out` is ``q[i] + 0.1 * (v[0] + ... + v[i])``, and row
i of `cache` becomes ``k[i]``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum

import torch
import torch.utils._pytree as pytree
from torch import nn

import boundary_ops
import piecewise

HIDDEN, VOCAB, CACHE_ROWS = 8, 32, 64
BUCKETS = (4, 8, 16)


@dataclasses.dataclass
class OpCalls:
    """How often the boundary op ran, and what it does first."""

    count: int = 0
    before: object = None


calls = OpCalls()


def _attend(q, k, v, out, cache):
    calls.count += 1
    if calls.before is not None:
        calls.before()
    cache[: k.shape[0]] = k
    out.copy_(q + 0.1 * v.cumsum(0))


attend = boundary_ops.define(
    "state_models::attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) cache) -> ()", _attend
)


@contextlib.contextmanager
def before_each_attend(action):
    """Runs `action` at the start of each boundary call in this block."""
    calls.before = action
    try:
        yield
    finally:
        calls.before = None


class Block(nn.Module):
    """norm · qkv · attend · output projection, with a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.o = (
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 3 * HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
        )
        self.cache = torch.zeros(CACHE_ROWS, HIDDEN)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        out = torch.empty_like(q)
        attend(q, k, v, out, self.cache)
        return x + self.o(out)


class Model(nn.Module):
    """Embedding · `before(model, x)` · a block · `after(model, x, **options)` · projection."""

    def __init__(self, *, before=None, after=None):
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCAB, HIDDEN), Block()
        self.projection = nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("scale", torch.ones(HIDDEN))
        self.before, self.after = before, after

    def forward(self, ids, **options):
        x = self.embedding(ids) * self.scale
        if self.before is not None:
            x = self.before(self, x)
        x = self.block(x)
        if self.after is not None:
            x = self.after(self, x, **options)
        return self.projection(x)


class Mood(enum.Enum):
    CALM = 1.0
    LOUD = 3.0


def tokens(num_tokens, *, seed=0):
    """int64 [num_tokens]."""
    return torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def new_model(**parts):
    """A model in eval mode, with the same weights each time."""
    torch.manual_seed(1)
    return Model(**parts).eval()


def graph(model, *example, captured=True, **config):
    """`piecewise.compile`, captured with the example (seven tokens where none is given)."""
    graphed = piecewise.compile(model, **{"buckets": BUCKETS, "progress": False, **config})
    if captured:
        report = graphed.capture(*(example or (tokens(7),)))
        assert report.ok, str(report)
    return graphed


def clone(value):
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def caches(model):
    return [
        module.cache for module in model.modules() if isinstance(getattr(module, "cache", None), torch.Tensor)
    ]


def assert_equal(got, want):
    """Same structure, same types, same values to rounding."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    assert got_spec == want_spec
    for left, right in zip(got_leaves, want_leaves, strict=True):
        if not isinstance(right, torch.Tensor):
            assert type(left) is type(right) and left == right
            continue
        assert left.dtype == right.dtype and left.shape == right.shape
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6, equal_nan=True)


def serve(graphed, *args, **kwargs):
    """Calls the model and its replacement with the same arguments and compares results, caches and arguments.

    Returns:
        "replay", or the code of the one reason that was counted.
    """
    modes = contextlib.nullcontext() if torch.is_inference_mode_enabled() else torch.no_grad()
    with modes:
        return serve_as_is(graphed, *args, **kwargs)


def serve_as_is(graphed, *args, **kwargs):
    """As `serve`, in the caller's grad mode."""
    model, before = graphed.model, graphed.stats.snapshot()
    with torch.no_grad():
        for cache in caches(model):
            cache.zero_()
        eager_args, eager_kwargs = clone(args), clone(kwargs)
    want = graphed._forward(*eager_args, **eager_kwargs)
    with torch.no_grad():
        want_caches = [cache.clone() for cache in caches(model)]
        for cache in caches(model):
            cache.zero_()
    got = graphed(*args, **kwargs)
    assert_equal(got, want)
    assert_equal(caches(model), want_caches)
    assert_equal((args, kwargs), (eager_args, eager_kwargs))
    return what_was_counted(graphed, before)


def what_was_counted(graphed, before):
    """The one call since `before`: "replay" or a reason's code."""
    after = graphed.stats
    assert sum(after.reasons.values()) == after.eager_calls
    assert sum(after.calls_by_bucket.values()) == after.replays
    assert after.replays + after.eager_calls == before.replays + before.eager_calls + 1
    if after.replays > before.replays:
        return "replay"
    (reason,) = (after.reasons - before.reasons).elements()
    return reason.value
