"""Finds the Triton program of the attention ops, which alone needs triton, and compiles ahead of calls."""

import functools
import warnings
from typing import Any

import torch

from boundary_ops.attention.scratch import Geometry, ScratchLayer
from boundary_ops.backends.library import NAME, AttentionCall
from boundary_ops.step.kv_cache import PagedKVCache


@functools.cache
def find_program() -> Any:
    """Returns the module that launches the program, or None without triton, which the first call imports."""
    try:
        from boundary_ops.attention.triton import prefill
    except ImportError as error:
        warnings.warn(f"op '{NAME}' runs as torch operators on CUDA, which is slow: {error}", stacklevel=2)
        return None
    return prefill


@functools.cache
def warn_slow(why: str) -> None:
    """Warns once for each reason that torch operators serve calls which the program cannot run."""
    warnings.warn(f"{NAME} runs as torch operators, which is slow: {why}", stacklevel=2)


def warm_up(num_tokens: int, *args: Any, **kwargs: Any) -> None:
    """Compiles what a call with `num_tokens` new tokens launches on CUDA, so that no later call does.

    Such a call's arguments are inspected, not written. Without them, every layer shape is compiled that the
    Triton program has served or warmed up.

    Raises:
        BoundaryOpError: the cache has named a back end that cannot serve such a call.
    """
    call = AttentionCall(*args, **kwargs) if args or kwargs else None
    cache = None if call is None else PagedKVCache.owner_of(call.k_cache)
    if call is not None and cache is not None and cache.library is not None:
        cache.library.check_call(call)
        scratch = ScratchLayer(Geometry.of(call), num_tokens)
        own = scratch.call._replace(scale=call.scale, window=call.window, softcap=call.softcap)
        with torch.no_grad():
            cache.library.attend(scratch.new_step(), own)
        return
    if cache is not None and cache.attention_backend == "torch":
        return
    # A machine that has a CUDA device may serve a model on the CPU, too.
    is_on_cuda = torch.cuda.is_available() if call is None else call.q.is_cuda
    program = find_program() if is_on_cuda else None
    if program is not None:
        program.compile_ahead(num_tokens, call)
