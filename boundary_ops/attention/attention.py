"""Defines `piecewise::attn_inplace`: causal attention over a paged cache, for a packed step of prefill.

It writes the step's new K and V to their pages, then attends: each new token sees its own sequence's
context in the pages and the new tokens up to itself. Lengths, pages and slots come from the current
`PrefillBatch`, so the op's arguments are tensors that the model computed and constants of the layer.

Three ways serve a call, by what the step's cache has chosen: a library, the Triton program, or the torch
operators here, one sequence at a time, with float32 accumulation; none of them reads a device tensor back.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from boundary_ops.attention.captured import FORM
from boundary_ops.attention.checks import attention_shares, check_arguments, check_batch
from boundary_ops.attention.program import find_program, warm_up, warn_slow
from boundary_ops.backends.library import NAME, AttentionCall, AttentionLibrary
from boundary_ops.declare.registry import define
from boundary_ops.errors.backends import CallNotServed
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache

SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) k_cache, Tensor(c!) v_cache, "
    "float scale, int window=0, float softcap=0.0, Tensor? sinks=None, bool implied_positions=False) -> ()"
)


def attend_inplace(*args: Any, **kwargs: Any) -> None:
    """Writes the step's K and V to the pages and its attention to `out`: the implementation of the op.

    The same inputs give the same bits at each call. Nothing is written when an argument is wrong.

    Raises:
        BoundaryOpError: no batch is running, an argument does not fit the batch, the cache or the others, or
            the cache has named a back end that lacks what the layer asks for.
    """
    call, batch = AttentionCall(*args, **kwargs), PrefillBatch.current(NAME)
    cache = batch.cache
    program = _program_for(cache)
    if cache.library is not None:
        attend_by_library(batch, call, cache.library)
    elif program is not None:
        attend_by_program(batch, call, program)
    else:
        check_arguments(call)
        attend_by_torch(batch, call)


def _program_for(cache: PagedKVCache) -> Any:
    goes_there = cache.library is None and cache.attention_backend != "torch"
    return find_program() if goes_there and cache.device.type == "cuda" else None


def attend_by_library(
    batch: PrefillBatch, call: AttentionCall, library: AttentionLibrary, *, is_known: bool = False
) -> None:
    """Serves a call by a library; only what depends on the step is checked where its geometry is known."""
    if not is_known:
        check_arguments(call)
        library.check_call(call)
    check_batch(batch, call)
    if batch.num_tokens:
        _write_pages(batch, call)
        library.attend(batch, call)


def attend_by_program(batch: PrefillBatch, call: AttentionCall, program: Any) -> None:
    """Serves a call by the Triton program, or by torch operators where the program has no such call."""
    why = program.attend(batch, call)
    if why is None:
        return
    if batch.cache.attention_backend == "triton" and batch.num_tokens:
        raise CallNotServed(name="triton", argument="q", expected="a call that the program serves", got=why)
    warn_slow(why)
    attend_by_torch(batch, call)


def attend_by_torch(batch: PrefillBatch, call: AttentionCall) -> None:
    """Serves a call, whose arguments fit each other, by torch operators."""
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
    for pool, rows in ((call.k_cache, call.k), (call.v_cache, call.v)):
        pool.view(-1, *rows.shape[1:]).index_copy_(0, batch.slot_mapping, rows)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attends from a sequence's last `len(q)` tokens to all `len(k)`, float32 [len(q), heads, head_dim]."""
    new, heads, dim = q.shape
    total, kv_heads, _ = k.shape
    # Heads that share a K/V head form one group, so that K and V are never repeated in memory.
    queries = q.float().view(new, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    keys, values = (rows.float().transpose(0, 1).unsqueeze(1) for rows in (k, v))
    by_hand = call.softcap or call.sinks is not None  # fused attention has neither
    mask = None
    if by_hand or new < total or 0 < call.window < total:
        last = torch.arange(total - new, total, device=q.device).unsqueeze(1)
        column = torch.arange(total, device=q.device).unsqueeze(0)
        mask = column <= last
        if call.window:
            mask &= column > last - call.window
    if by_hand:
        assert mask is not None
        products = torch.matmul(queries, keys.transpose(-1, -2))
        shares = attention_shares(call, products, mask, (*queries.shape[:2], 1, 1))
        result = torch.matmul(shares, values)
    else:
        shape = (kv_heads, heads // kv_heads, total, dim)
        result = F.scaled_dot_product_attention(
            queries, keys.expand(shape), values.expand(shape),
            attn_mask=mask, is_causal=mask is None, scale=call.scale,
        )  # fmt: skip
    return result.permute(2, 0, 1, 3).reshape(new, heads, dim)


def bind(*args: Any) -> Callable[..., object] | None:
    """Returns `attend_inplace` for calls that repeat; None where that is torch operators."""
    call = AttentionCall(*args)
    cache = PagedKVCache.owner_of(call.k_cache)
    if cache is None:
        return None
    if (library := cache.library) is None:
        program = _program_for(cache)
        return None if program is None else program.bind(call, cache.attention_backend, attend_inplace)

    def attend_again(*args: Any) -> None:
        batch = PrefillBatch.current(NAME)
        if batch.cache.library is library:
            attend_by_library(batch, AttentionCall(*args), library, is_known=True)
        else:
            attend_inplace(*args)

    return attend_again


attn_inplace = define(
    SCHEMA, attend_inplace, token_args={"q": 0, "k": 0, "v": 0, "out": 0}, capture_safe=True, warm_up=warm_up,
    bind={"cpu": bind, "cuda": bind}, repeatable=True, captured_form=FORM, any_strides=("q", "k", "v"),
)  # fmt: skip
