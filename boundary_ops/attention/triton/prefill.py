"""`piecewise::attn_inplace` on CUDA: one launch, no copy, nothing read back, and little host time.

A call that looks like an earlier one is not checked again: its plan is found by one look-up, which leaves
the batch, the pools' addresses and the launch itself. What depends on the batch alone is made by the first
layer and shared by the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from boundary_ops.attention import captured as captured_attention
from boundary_ops.attention.attention import attend_by_choice, attend_inplace
from boundary_ops.attention.checks import NAME, AttentionCall, check_arguments, check_batch
from boundary_ops.attention.triton.launcher import current_device, current_stream, jit_launch
from boundary_ops.attention.triton.plans import Plan, Plans
from boundary_ops.attention.triton.programs import prefill_program
from boundary_ops.attention.triton.tiles import tiles_of
from boundary_ops.backends.library import refuse_call
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache

__all__ = ["attend", "attend_captured", "bind", "plans"]

# The one state of this module: programs are compiled once per process, whoever calls the op.
plans = Plans()


def attend(*args: Any, **kwargs: Any) -> None:
    """The op's implementation on CUDA. Arguments, effects and errors are those of `attend_inplace`."""
    call, batch = AttentionCall(*args, **kwargs), PrefillBatch.current(NAME)
    plan = _plan_for(call)
    check_batch(batch, call)
    if not batch.num_tokens:
        return
    if plan.unsupported is not None:
        if batch.cache.attention_backend == "triton":
            refuse_call("triton", "q", "a call that the program serves", plan.unsupported)
        plans.warn(plan.unsupported)
        attend_inplace(*call)
        return
    stream = current_stream(plan.geometry.device_index)
    tiles = tiles_of(batch, plan.tile_tokens, plan.window, stream)
    metadata = (batch.slot_mapping, tiles.records, batch.seq_lens, batch.block_tables)
    _launch(plan, tiles.num_tiles, tiles.has_context, 0, stream, call, metadata)


def bind(*args: Any) -> Callable[..., None] | None:
    """`attend` for calls that repeat with arguments that look like these: no look-up and no check of shapes
    is left, only those of the batch, the pools and the addresses. None where torch operators serve them.

    A step of a cache with another back end than these pools' goes to that one.
    """
    call = AttentionCall(*args)
    plan = _plan_for(call)
    num_tokens, device = call.q.shape[0], plan.geometry.device_index
    if plan.unsupported is not None or call.implied_positions or not num_tokens:
        return None
    cache = PagedKVCache.owner_of(call.k_cache)
    backend = None if cache is None else cache.attention_backend
    has_sinks = call.sinks is not None
    tail = (num_tokens, *plan.tail)

    # Of the options only the sinks' address may be another one than in `call`.
    def attend_again(q: Any, k: Any, v: Any, out: Any, k_cache: Any, v_cache: Any, *options: Any) -> None:
        batch = PrefillBatch.current(NAME)
        if batch.cache.attention_backend != backend:
            attend_by_choice(q, k, v, out, k_cache, v_cache, *options)
            return
        new, pools = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()), batch.cache.pool_addresses
        k_pool, v_pool = k_cache.data_ptr(), v_cache.data_ptr()
        if batch.num_tokens != num_tokens or k_pool not in pools or v_pool not in pools:
            check_batch(batch, AttentionCall(q, k, v, out, k_cache, v_cache, *options))
        stream = current_stream(device)
        tiles = tiles_of(batch, plan.tile_tokens, plan.window, stream)
        last = options[3].data_ptr() if has_sinks else new[0]
        bits = plan.bits | new[0] | new[1] | new[2] | new[3] | k_pool | v_pool | last
        found = plan.launches.get((tiles.has_context, 0))
        if found is None or (bits | tiles.address_bits) & 15 or current_device() != device:
            attend(q, k, v, out, k_cache, v_cache, *options)
            return
        launch, constants = found
        arguments = (*new, k_pool, v_pool, *tiles.addresses, last, tiles.table_stride, *tail, *constants)
        launch(plan.programs_per_tile, tiles.num_tiles, stream, arguments)

    return attend_again


def _plan_for(call: AttentionCall) -> Plan:
    """The plan of calls that look like this one; they are checked where there is none yet."""
    sinks = call.sinks
    look = (
        *((tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()) for tensor in call[:6]),
        call.scale, call.window, call.softcap,
        None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.get_device()),
    )  # fmt: skip
    plan = plans.by_look.get(look)
    if plan is None:
        check_arguments(call)
        plan = plans.make(call)
        plans.add(look, plan)
    return plan


def attend_captured(*args: Any, **kwargs: Any) -> None:
    """The captured form on CUDA. Arguments, effects and errors are those of the one in torch operators."""
    call = captured_attention.CapturedCall(*args, **kwargs)
    captured_attention.check_metadata(call)
    plan = _plan_for(call.layer)
    if plan.unsupported is not None:
        plans.warn(plan.unsupported)
        captured_attention.attend_captured(*call)
        return
    rows, max_num_seqs = call.q.shape[0], call.seq_lens.shape[0]
    if rows:
        num_tiles = rows // plan.tile_tokens + min(max_num_seqs, rows)
        stream = current_stream(plan.geometry.device_index)
        _launch(plan, num_tiles, True, max_num_seqs, stream, call.layer, call.metadata)


def _launch(
    plan: Plan,
    num_tiles: int,
    has_context: bool,
    max_seqs: int,
    stream: int,
    call: AttentionCall,
    metadata: tuple[torch.Tensor, ...],
) -> None:
    """Launches directly where a program is compiled that fits the addresses, else through the JIT."""
    # The program does not look at `sinks` where there are none; any address serves.
    tensors = (*call[:6], *metadata, call.q if call.sinks is None else call.sinks)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    bits = functools.reduce(int.__or__, addresses, plan.bits)
    is_aligned = not bits & 15
    grid = (plan.programs_per_tile, num_tiles)
    scalars = (metadata[3].stride(0), call.q.shape[0], *plan.tail)
    if is_aligned:
        found = plan.launches.get((has_context, max_seqs)) or plans.adopt(plan, has_context, max_seqs)
        if found is not None and current_device() == plan.geometry.device_index:
            launch, constants = found
            launch(*grid, stream, (*addresses, *scalars, *constants))
            return
    _launch_by_jit(plan, grid, has_context, max_seqs, (*tensors, *scalars), is_aligned)


def _launch_by_jit(
    plan: Plan,
    grid: tuple[int, int],
    has_context: bool,
    max_seqs: int,
    arguments: tuple[Any, ...],
    is_aligned: bool,
) -> None:
    geometry, config = plan.geometry, plan.config
    constants = geometry.constants(config, has_context=has_context, max_seqs=max_seqs)
    index = geometry.device_index
    with torch.cuda.device(index) if index >= 0 else contextlib.nullcontext():
        launch = jit_launch(
            prefill_program, grid, (*arguments, *constants), config.num_warps, config.num_stages
        )
    # A program compiled for arguments that are not all aligned serves only those.
    if launch is not None and is_aligned:
        plans.compiled[geometry, config, has_context, max_seqs] = (launch, constants)
