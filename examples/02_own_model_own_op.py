"""Graph your own model, with your own attention op and your own KV cache.

The op writes the new K and V into the cache and its result into `out`, all in place. `slots`, which says
where in the cache each token lives, reaches only that op: it may change at every call and is never frozen
into a graph.
"""

import torch
from torch import nn

import boundary_ops
import piecewise

HIDDEN, HEADS, LAYERS, VOCAB, CACHE_SLOTS = 64, 4, 3, 100, 128
HEAD_DIM = HIDDEN // HEADS


def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Causal attention of one sequence that fills the cache from slot 0 up.

    q, k, v, out are [num_tokens, heads, head_dim]; the caches are [slots, heads, head_dim].
    """
    k_cache[slots], v_cache[slots] = k, v
    length = int(slots[-1]) + 1
    keys, values = k_cache[:length], v_cache[:length]
    scores = torch.einsum("qhd,khd->hqk", q, keys) / HEAD_DIM**0.5
    ahead = torch.arange(length, device=q.device) > slots[:, None]
    out.copy_(torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, float("-inf")).softmax(-1), values))


attention = boundary_ops.define(
    "example02::cached_attention(Tensor q, Tensor k, Tensor v, Tensor slots, Tensor(a!) out,"
    " Tensor(b!) k_cache, Tensor(c!) v_cache) -> ()",
    cached_attention,
    token_args={"q": 0, "k": 0, "v": 0, "slots": 0, "out": 0},
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.project = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.register_buffer("k_cache", torch.zeros(CACHE_SLOTS, HEADS, HEAD_DIM))
        self.register_buffer("v_cache", torch.zeros(CACHE_SLOTS, HEADS, HEAD_DIM))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        out = torch.empty_like(q)
        attention(q, k, v, slots, out, self.k_cache, self.v_cache)
        x = x + self.project(out.flatten(1))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, slots)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    model, reference = Model().eval(), Model().eval()
    reference.load_state_dict(model.state_dict())
    graphed = piecewise.compile(model, buckets=[8, 16], progress=False)
    with torch.no_grad():
        graphed.capture(torch.arange(5), torch.arange(5))

        # One sequence in three chunks: 5 tokens in bucket 8, then 16 in bucket 16, then 3 in bucket 8 again.
        ids, start = torch.randint(VOCAB, (24,)), 0
        for num_tokens in (5, 16, 3):
            slots = torch.arange(start, start + num_tokens)
            found, expected = (each(ids[slots], slots) for each in (graphed, reference))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            start += num_tokens
        for layer, expected_layer in zip(model.layers, reference.layers, strict=True):
            torch.testing.assert_close(layer.k_cache, expected_layer.k_cache, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer.v_cache, expected_layer.v_cache, rtol=1e-4, atol=1e-5)
    print(graphed.report())
    assert graphed.stats.replays == 3 and graphed.stats.eager_calls == 0
    print("3 chunks replayed; results and KV cache equal the model's")


if __name__ == "__main__":
    main()
