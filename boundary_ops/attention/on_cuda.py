"""The way from the attention ops to their CUDA half, which alone needs triton, and what is compiled ahead."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from boundary_ops.attention.checks import NAME, AttentionCall
from boundary_ops.backends.library import LibraryAttention
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache

__all__ = ["cuda_module", "warm_up"]

_log = logging.getLogger("boundary_ops")


@functools.cache
def cuda_module() -> Any:
    """The module of the CUDA implementation, or None without triton; triton is imported by the first call."""
    try:
        from boundary_ops.attention.triton import prefill
    except ImportError as error:
        _log.warning("op '%s' runs as torch operators on CUDA, which is slow: %s", NAME, error)
        return None
    return prefill


def warm_up(num_tokens: int, *args: Any, **kwargs: Any) -> None:
    """Compiles what a call with `num_tokens` new tokens launches on CUDA, so that no later call does.

    Args:
        args, kwargs: the arguments of such a call, looked at and not touched; the back end is that of the
            cache that `k_cache` belongs to. Without them, every layer shape that the Triton program has been
            called or warmed up with is warmed up.

    Raises:
        BoundaryOpError: the cache has named a back end that cannot serve such a call.
    """
    call = AttentionCall(*args, **kwargs) if args or kwargs else None
    cache = None if call is None else PagedKVCache.owner_of(call.k_cache)
    if call is not None and cache is not None and cache.library is not None:
        _run_on_scratch(cache.library, num_tokens, call)
        return
    if cache is not None and cache.attention_backend == "torch":
        return
    # A machine that has a CUDA device may serve a model on the CPU, too.
    is_on_cuda = torch.cuda.is_available() if call is None else call.q.is_cuda
    module = cuda_module() if is_on_cuda else None
    if module is not None:
        from boundary_ops.attention.triton.warm_up import warm_up as compile_ahead

        compile_ahead(num_tokens, call)


def _run_on_scratch(library: LibraryAttention, num_tokens: int, call: AttentionCall) -> None:
    """Makes a library compile what it compiles on first use: one call for a new sequence, on own memory."""
    library.check_call(call)
    _, block_size, kv_heads, head_dim = call.k_cache.shape
    cache = PagedKVCache(
        num_layers=1,
        num_blocks=-(-num_tokens // block_size),
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=call.k_cache.dtype,
        device=call.k_cache.device,
    )
    with torch.inference_mode(False), torch.no_grad():
        rows = call.q.new_zeros((num_tokens, *call.q.shape[1:]))
        batch = PrefillBatch.build(cache, ["new"], [num_tokens])
        out = torch.empty_like(rows)
        own = call._replace(q=rows, out=out, k_cache=cache.k[0], v_cache=cache.v[0])
        library.attend(batch, own)
