"""`piecewise::attn_inplace`: causal attention over a paged cache, for a packed step of prefill.

It writes the step's new K and V to their pages, then attends: each new token sees its own sequence's
context in the pages and the new tokens up to itself. Lengths, pages and slots come from the current
`PrefillBatch`, so the op's arguments are tensors that the model computed and constants of the layer.

The implementation here is written in torch operators, one sequence at a time, with float32 accumulation; it
reads no device tensor back. Which program attends where, docs/DESIGN.md says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from boundary_ops.attention.captured import FORM
from boundary_ops.attention.checks import NAME, AttentionCall, attention_shares, check_arguments, check_batch
from boundary_ops.attention.on_cuda import cuda_module, warm_up
from boundary_ops.backends.library import LibraryAttention
from boundary_ops.declare.registry import define
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache

__all__ = ["attn_inplace"]

SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) k_cache, Tensor(c!) v_cache, "
    "float scale, int window=0, float softcap=0.0, Tensor? sinks=None, bool implied_positions=False) -> ()"
)


def attend_inplace(*args: Any, **kwargs: Any) -> None:
    """Writes the step's K and V to the pages and its attention to `out`; the implementation of the op.

    The same inputs give the same bits at each call. Nothing is written when an argument is wrong.

    Args:
        args, kwargs: those of an `AttentionCall`.

    Raises:
        BoundaryOpError: no batch is running, or an argument does not fit the batch, the cache or the others.
    """
    call, batch = AttentionCall(*args, **kwargs), PrefillBatch.current(NAME)
    check_arguments(call)
    check_batch(batch, call)
    if not batch.num_tokens:
        return
    _write_pages(batch, call)
    start = 0
    for at, (new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        rows = slice(start, start + new)
        keys, values = call.k[rows], call.v[rows]
        if context:
            pages = batch.block_tables[at, : -(-context // batch.cache.block_size)].to(torch.int64)
            keys = torch.cat((call.k_cache[pages].flatten(0, 1)[:context], keys))
            values = torch.cat((call.v_cache[pages].flatten(0, 1)[:context], values))
        call.out[rows].copy_(_attend(call, call.q[rows], keys, values))
        start += new


def _write_pages(batch: PrefillBatch, call: AttentionCall) -> None:
    """Writes one layer's new K and V to the step's slots of its pools."""
    for pool, rows in ((call.k_cache, call.k), (call.v_cache, call.v)):
        pool.view(-1, *rows.shape[1:]).index_copy_(0, batch.slot_mapping, rows)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of a sequence's last `len(q)` tokens over all `len(k)`, float32 [len(q), heads, head_dim]."""
    new, heads, dim = q.shape
    total, kv_heads, _ = k.shape
    # Heads that share a K/V head form one group, so that K and V are never repeated in memory.
    queries = q.float().view(new, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    keys = k.float().transpose(0, 1).unsqueeze(1)
    values = v.float().transpose(0, 1).unsqueeze(1)
    mask = None
    if new < total or 0 < call.window < total:
        last = torch.arange(total - new, total, device=q.device).unsqueeze(1)
        column = torch.arange(total, device=q.device).unsqueeze(0)
        mask = column <= last
        if call.window:
            mask &= column > last - call.window
    if call.softcap or call.sinks is not None:
        result = _attend_by_hand(call, queries, keys, values, mask)
    else:
        shape = (kv_heads, heads // kv_heads, total, dim)
        result = F.scaled_dot_product_attention(
            queries,
            keys.expand(shape),
            values.expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
            scale=call.scale,
        )
    return result.permute(2, 0, 1, 3).reshape(new, heads, dim)


def _attend_by_hand(
    call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """What fused attention lacks: a soft cap and sinks.

    q is [kv_heads, group, new, dim], k and v [kv_heads, 1, total, dim], all float32.
    """
    if mask is None:
        mask = torch.ones((q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).tril()
    products = torch.matmul(q, k.transpose(-1, -2))
    return torch.matmul(attention_shares(call, products, mask, (*q.shape[:2], 1, 1)), v)


def attend_on_cuda(*args: Any, **kwargs: Any) -> None:
    """`attend_inplace` as one Triton program; as torch operators where there is no triton."""
    module = cuda_module()
    (attend_inplace if module is None else module.attend)(*args, **kwargs)


def attend_by_library(*args: Any, **kwargs: Any) -> None:
    """`attend_inplace` by the library that the running step's cache has named.

    Raises:
        BoundaryOpError: as `attend_inplace`, and where the library lacks what the layer asks for.
    """
    call, batch = AttentionCall(*args, **kwargs), PrefillBatch.current(NAME)
    library = batch.cache.library
    assert library is not None, "the cache has named a library"
    check_arguments(call)
    check_batch(batch, call)
    library.check_call(call)
    if batch.num_tokens:
        _write_pages(batch, call)
        library.attend(batch, call)


def _bind_library(library: LibraryAttention) -> Callable[..., object]:
    """`attend_by_library` for calls that repeat: only what depends on the step is checked."""

    def attend_again(*args: Any) -> None:
        batch = PrefillBatch.current(NAME)
        if batch.cache.library is not library:
            attend_by_choice(*args)
            return
        call = AttentionCall(*args)
        check_batch(batch, call)
        if batch.num_tokens:
            _write_pages(batch, call)
            library.attend(batch, call)

    return attend_again


def attend_by_choice(*args: Any, **kwargs: Any) -> None:
    """The op's implementation: the back end that the running step's cache has chosen."""
    cache = PrefillBatch.current(NAME).cache
    if cache.library is not None:
        attend_by_library(*args, **kwargs)
    elif cache.device.type == "cuda" and cache.attention_backend != "torch":
        attend_on_cuda(*args, **kwargs)
    else:
        attend_inplace(*args, **kwargs)


def bind(*args: Any) -> Callable[..., object] | None:
    """`attend_by_choice` for calls that repeat; None where that is torch operators."""
    cache = PagedKVCache.owner_of(args[4])
    if cache is None or cache.attention_backend == "torch":
        return None
    if cache.library is not None:
        return _bind_library(cache.library)
    if cache.device.type != "cuda":
        return None
    module = cuda_module()
    return None if module is None else module.bind(*args)


attn_inplace = define(
    SCHEMA,
    dict.fromkeys(("cpu", "cuda", "xpu", "mps"), attend_by_choice),
    token_args={"q": 0, "k": 0, "v": 0, "out": 0},
    capture_safe=True,
    warm_up=warm_up,
    bind={"cpu": bind, "cuda": bind},
    repeatable=True,
    captured_form=FORM,
    any_strides=("q", "k", "v"),
)
