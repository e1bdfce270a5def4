"""A library's call on memory of its own: what it compiles on first use, it compiles here."""

from __future__ import annotations

import torch

from boundary_ops.backends.library import LibraryAttention
from boundary_ops.batch import PrefillBatch
from boundary_ops.kv_cache import PagedKVCache

__all__ = ["run_on_scratch"]


def run_on_scratch(
    library: LibraryAttention,
    num_tokens: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    implied_positions: bool = False,
) -> None:
    """One call for a new sequence of so many tokens.

    Args:
        q, ...: the arguments of a call, looked at and not touched.

    Raises:
        BoundaryOpError: the library lacks what the call asks for.
    """
    library.check_call(q, out, scale, softcap, sinks)
    _, block_size, kv_heads, head_dim = k_cache.shape
    cache = PagedKVCache(
        num_layers=1,
        num_blocks=-(-num_tokens // block_size),
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=k_cache.dtype,
        device=k_cache.device,
    )
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.zeros((num_tokens, q.shape[1], head_dim), dtype=q.dtype, device=q.device)
        batch = PrefillBatch.build(cache, ["new"], [num_tokens])
        library.attend(batch, rows, torch.empty_like(rows), cache.k[0], cache.v[0], scale, window, softcap)
