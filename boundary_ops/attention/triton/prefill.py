"""Launches the attention program: one launch, no copy, nothing read back, and little host time.

A call of known geometry is not checked again: its plan is found by one look-up, which leaves the batch, the
pools' addresses and the launch itself. What depends on the batch alone is made by the first layer and shared
by the others. Calls that the program cannot run are left to the op, with the reason.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from boundary_ops.attention.checks import CapturedCall, check_batch
from boundary_ops.attention.scratch import ScratchLayer
from boundary_ops.attention.triton.configs import BlockConfig, Geometry
from boundary_ops.attention.triton.launcher import (
    compiling_together,
    current_device,
    current_stream,
    is_interpreted,
    jit_launch,
)
from boundary_ops.attention.triton.plans import Plan, Plans
from boundary_ops.attention.triton.programs import prefill_program
from boundary_ops.attention.triton.tiles import tiles_of
from boundary_ops.backends.library import NAME, AttentionCall
from boundary_ops.step.batch import PrefillBatch

# The one state of this module: programs are compiled once per process, whoever calls the op.
plans = Plans()


def attend(batch: PrefillBatch, call: AttentionCall) -> str | None:
    """Serves a call of `attn_inplace` on CUDA, or does nothing and returns why the program cannot."""
    plan = plans.plan_for(call)
    if plan.unsupported is not None:
        return plan.unsupported
    check_batch(batch, call)
    if batch.num_tokens:
        stream = current_stream(plan.geometry.device_index)
        tiles = tiles_of(batch, plan.tile_tokens, plan.window, stream)
        metadata = (batch.slot_mapping, tiles.records, batch.seq_lens, batch.block_tables)
        _launch(plan, tiles.num_tiles, tiles.has_context, 0, stream, call, metadata)
    return None


def bind(call: AttentionCall, backend: str, general: Callable[..., None]) -> Callable[..., None] | None:
    """Returns `attend` for calls that repeat with this geometry, or None where torch operators serve them.

    Args:
        backend: the one that the cache has named; a step of a cache with another one goes to `general`.
        general: the op's implementation, for calls that differ in what the program depends on.
    """
    plan = plans.plan_for(call)
    num_tokens, device = call.q.shape[0], plan.geometry.device_index
    if plan.unsupported is not None or call.implied_positions or not num_tokens:
        return None
    has_sinks = call.sinks is not None
    tail = (num_tokens, *plan.tail)

    # Of the options only the sinks' address may be another one than in `call`.
    def attend_again(q: Any, k: Any, v: Any, out: Any, k_cache: Any, v_cache: Any, *options: Any) -> None:
        batch = PrefillBatch.current(NAME)
        if batch.cache.attention_backend != backend:
            general(q, k, v, out, k_cache, v_cache, *options)
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
            general(q, k, v, out, k_cache, v_cache, *options)
            return
        launch, constants = found
        arguments = (*new, k_pool, v_pool, *tiles.addresses, last, tiles.table_stride, *tail, *constants)
        launch(plan.programs_per_tile, tiles.num_tiles, stream, arguments)

    return attend_again


def attend_captured(call: CapturedCall) -> str | None:
    """Serves a call of `attn_captured` on CUDA, whose metadata fit; returns why the program cannot."""
    plan = plans.plan_for(call.layer)
    rows, max_num_seqs = call.q.shape[0], call.seq_lens.shape[0]
    if rows and plan.unsupported is None:
        num_tiles = rows // plan.tile_tokens + min(max_num_seqs, rows)
        stream = current_stream(plan.geometry.device_index)
        _launch(plan, num_tiles, True, max_num_seqs, stream, call.layer, call.metadata)
    return plan.unsupported


def _launch(
    plan: Plan, num_tiles: int, has_context: bool, max_seqs: int, stream: int, call: AttentionCall,
    metadata: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
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
    geometry, config = plan.geometry, plan.config
    constants = geometry.constants(config, has_context=has_context, max_seqs=max_seqs)
    index = geometry.device_index
    with torch.cuda.device(index) if index >= 0 else contextlib.nullcontext():
        arguments = (*tensors, *scalars, *constants)
        compiled = jit_launch(prefill_program, grid, arguments, config.num_warps, config.num_stages)
    # A program compiled for arguments that are not all aligned serves only those.
    if compiled is not None and is_aligned:
        plans.compiled[geometry, config, has_context, max_seqs] = (compiled, constants)


def compile_ahead(num_tokens: int, call: AttentionCall | None = None) -> None:
    """Compiles all that a step of up to `num_tokens` new tokens launches, for one call or all shapes seen."""
    for geometry in [Geometry.of(call)] if call is not None else list(plans.geometries):
        # A smaller step may take other block sizes; each choice holds for some power of two.
        counts = sorted({1 << bit for bit in range(num_tokens.bit_length())} | {num_tokens} - {0})
        chosen: dict[BlockConfig, int] = {}
        for count in counts:
            chosen.setdefault(plans.config_for(geometry, count), count)
        missing = [
            (count, has_context)
            for config, count in chosen.items()
            for has_context in (False, True)
            if (geometry, config, has_context, 0) not in plans.compiled
        ]
        scratches = {count: ScratchLayer(geometry, count) for count, _ in missing}
        runs = [(scratches[count], has_context) for count, has_context in missing]
        if not is_interpreted(prefill_program):
            with compiling_together():
                for scratch, has_context in runs:
                    _run(scratch, has_context)
        for scratch, has_context in runs:
            _run(scratch, has_context)


def _run(scratch: ScratchLayer, has_context: bool) -> None:
    with torch.no_grad():
        attend(scratch.new_step(has_context=has_context), scratch.call)
