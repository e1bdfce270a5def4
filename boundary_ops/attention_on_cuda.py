"""The way from the attention ops to their CUDA half, which alone needs triton, and what is compiled ahead."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from boundary_ops.attention_checks import NAME
from boundary_ops.kv_cache import PagedKVCache

__all__ = ["cuda_module", "warm_up"]

_log = logging.getLogger("boundary_ops")


@functools.cache
def cuda_module() -> Any:
    """The module of the CUDA implementation, or None without triton; triton is imported by the first call."""
    try:
        from boundary_ops.kernels import prefill
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
    pool = kwargs["k_cache"] if "k_cache" in kwargs else args[4] if len(args) > 4 else None
    cache = None if pool is None else PagedKVCache.owner_of(pool)
    if cache is not None and cache.library is not None:
        from boundary_ops.backends.scratch import run_on_scratch

        run_on_scratch(cache.library, num_tokens, *args, **kwargs)
        return
    if cache is not None and cache.attention_backend == "torch":
        return
    module = cuda_module() if torch.cuda.is_available() else None
    if module is not None:
        from boundary_ops.kernels.tuning import warm_up as compile_ahead

        compile_ahead(num_tokens, *args, **kwargs)
