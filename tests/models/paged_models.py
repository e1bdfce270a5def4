"""A small model on the paged cache and `piecewise::attn_inplace`, and one step of it, compared with eager.

Steps run inside `with PrefillBatch`, packed; `serve_step` runs one twice from the same pools, once without
graphs and once as it is served, and compares results and all pools.
"""

from __future__ import annotations

import torch
from torch import nn

import boundary_ops
import piecewise
from boundary_ops import PagedKVCache, PrefillBatch

HEADS, KV_HEADS, DIM, VOCAB, PAGE = 4, 2, 8, 40, 4
HIDDEN = HEADS * DIM
BUCKETS = (4, 8, 16)
LIMITS = dict(max_num_seqs=2, max_seq_len=20)


def new_cache(num_layers=2, *, blocks=24, device="cpu", dtype=torch.float32):
    return PagedKVCache(
        num_layers=num_layers, num_blocks=blocks, block_size=PAGE, num_kv_heads=KV_HEADS, head_dim=DIM,
        dtype=dtype, device=device,
    )  # fmt: skip


class Layer(nn.Module):
    """norm · qkv · attention · output projection, with a residual."""

    def __init__(self, k_cache, v_cache, options):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM)
        self.o = nn.Linear(HIDDEN, HIDDEN)
        self.k_cache, self.v_cache, self.options = k_cache, v_cache, options

    def forward(self, x):
        rows = self.qkv(self.norm(x)).unflatten(-1, (-1, DIM))
        q, k, v = rows.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        out = torch.empty((q.shape[0], HEADS, DIM), dtype=q.dtype, device=q.device)
        boundary_ops.attn_inplace(q, k, v, out, self.k_cache, self.v_cache, DIM**-0.5, **self.options)
        return x + self.o(out.flatten(1))


class Paged(nn.Module):
    """Embedding of ids and positions · one `Layer` per layer of the cache · `between` each · projection."""

    def __init__(self, cache, *, between=None, after=None, **options):
        super().__init__()
        self.cache, self.between, self.after = cache, between, after
        self.embedding, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Layer(k, v, options) for k, v in zip(cache.k, cache.v, strict=True))
        self.projection = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids, positions):
        x = self.embedding(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
            if self.between is not None:
                x = self.between(x)
        if self.after is not None:
            x = self.after(x)
        return self.projection(x)


def new_paged(num_layers=2, *, cache=None, **parts):
    torch.manual_seed(2)
    return Paged(new_cache(num_layers) if cache is None else cache, **parts).eval()


def capture(model, **config):
    """`piecewise.compile`, captured with an example of seven tokens and no step running."""
    settings = {"buckets": BUCKETS, "progress": False, "boundary": "captured", **LIMITS, **config}
    graphed = piecewise.compile(model, **settings)
    with torch.no_grad():
        report = graphed.capture(torch.arange(7) % VOCAB, torch.arange(7))
    assert report.ok, str(report)
    return graphed


def captured_paged(**config):
    return capture(new_paged(), **config)


def pools_of(cache):
    return [*cache.k, *cache.v]


def serve_step(graphed, names, lens, *, cache=None, close=1e-5):
    """One step, without graphs and as it is served, from the same pools; results and pools must agree.

    Returns:
        "replay", or the code of the one reason that was counted.
    """
    cache = graphed.model.cache if cache is None else cache
    batch = PrefillBatch.build(cache, names, lens)
    ids = torch.randint(0, VOCAB, (batch.num_tokens,), device=cache.device)
    former = [pool.clone() for pool in pools_of(cache)]
    before = graphed.stats.snapshot()
    with torch.no_grad():
        with batch:
            want = graphed._forward(ids, batch.positions[0])
        wanted = [pool.clone() for pool in pools_of(cache)]
        for pool, content in zip(pools_of(cache), former, strict=True):
            pool.copy_(content)
        for name, context in zip(names, batch.context_lens, strict=True):
            cache.truncate(name, context)
        with batch:
            got = graphed(ids, batch.positions[0])
    torch.testing.assert_close(got, want, rtol=close, atol=close)
    for pool, content in zip(pools_of(cache), wanted, strict=True):
        torch.testing.assert_close(pool, content, rtol=close, atol=close, equal_nan=True)
    for name, context, new in zip(names, batch.context_lens, lens, strict=True):
        assert cache.context_len(name) == context + new
    after = graphed.stats
    assert after.replays + after.eager_calls == before.replays + before.eager_calls + 1
    if after.replays > before.replays:
        return "replay"
    (reason,) = (after.reasons - before.reasons).elements()
    return reason.value


def kinds(graphed):
    """The kinds of the segments, such as "gbg", and how many boundary ops are in graphs."""
    segments = graphed.report().plans[0].segments
    return "".join(segment.kind[0] for segment in segments), sum(s.captured_ops for s in segments)
