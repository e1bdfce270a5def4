"""A model for CUDA graphs, with ops inside that wait, read back, ask for too much memory or fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import boundary_ops
import piecewise

HIDDEN, VOCAB, CACHE_ROWS = 64, 50, 4096
SIZES = (2, 7, 8, 9, 16, 17, 31, 32)


def _mix(q: Tensor, k: Tensor, out: Tensor, cache: Tensor) -> None:
    cache[: k.shape[0]] = k
    torch.add(q, k.cumsum(0), alpha=0.1, out=out)


_mix_op = boundary_ops.define(
    "cuda_models::mix(Tensor q, Tensor k, Tensor(a!) out, Tensor(b!) cache) -> ()", _mix
)

_library = torch.library.Library("cuda_models_inner", "DEF")


def _define(name: str, kernel: Any) -> Any:
    _library.define(f"{name}(Tensor x) -> Tensor")
    _library.impl(name, kernel, "CUDA")
    _library.impl(name, lambda x: torch.empty_like(x), "Meta")
    boundary_ops.declare_rows(f"cuda_models_inner::{name}", token_args={"x": 0})
    return getattr(torch.ops.cuda_models_inner, name)


def _waiting(x: Tensor) -> Tensor:
    torch.cuda.synchronize()
    return x * 2


def _reading(x: Tensor) -> Tensor:
    return x * (2 if x[0].abs().sum().item() >= 0 else 3)  # row 0 is a real one


def _greedy(x: Tensor) -> Tensor:
    # Only the bucket of 16 asks for more than there is.
    torch.empty(1 << 45 if x.shape[0] == 16 else 1, dtype=torch.uint8, device=x.device)
    return x * 2


def _failing(x: Tensor) -> Tensor:
    if x.shape[0] == 16:
        raise ValueError("sixteen rows are too many")
    return x * 2


INNER = {
    f.__name__.strip("_"): _define(f.__name__.strip("_"), f) for f in (_waiting, _reading, _greedy, _failing)
}


class Model(nn.Module):
    """Embedding, and `num_layers` of norm, linear, boundary op, linear and `inner`; one cache per layer."""

    def __init__(self, *, num_layers: int = 3, inner: Any = None, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, hidden), nn.Embedding(CACHE_ROWS, hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(num_layers))
        self.first = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in range(num_layers))
        self.second = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_layers))
        self.caches = [torch.zeros(CACHE_ROWS, hidden, device="cuda") for _ in range(num_layers)]
        self.inner = inner

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places(positions)
        for norm, first, second, cache in zip(self.norms, self.first, self.second, self.caches, strict=True):
            q, k = first(norm(x)).chunk(2, dim=-1)
            out = torch.empty_like(q)
            _mix_op(q, k, out, cache)
            x = x + second(out)
            if self.inner is not None:
                x = self.inner(x)
        return x


def make(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).cuda().eval()


def inputs(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCAB, (n,), device="cuda"), torch.arange(n, device="cuda")


def compiled(model: nn.Module, buckets: tuple[int, ...] = (8, 16, 32), **options: Any) -> Any:
    graphed = piecewise.compile(model, buckets=buckets, progress=False, **options)
    with torch.no_grad():
        report = graphed.capture(*inputs(5))
    return graphed, report


def check_equal(graphed: Any, n: int, *, replayed: bool = True) -> None:
    args = inputs(n)
    with torch.no_grad():
        with piecewise.eager_only():
            expected = graphed(*args)
            caches = [cache.clone() for cache in graphed.model.caches]
        before = graphed.stats.replays
        found = graphed(*args)
    assert (graphed.stats.replays == before + 1) is replayed, graphed.report()
    if n in graphed.stats.captured:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for cache, wanted in zip(graphed.model.caches, caches, strict=True):
        torch.testing.assert_close(cache, wanted, rtol=1e-4, atol=1e-4)
