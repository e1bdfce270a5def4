"""Defines `piecewise::attn_captured`: paged attention whose lengths, pages and slots are tensors that stay.

The form in which `piecewise::attn_inplace` is captured. Nothing here depends on a host value of the step:
rows may be padded, the step's sequences may be fewer than there is room for, and which rows are real is read
from `cu_seqlens_q` on the device. A padded row is neither read nor written.

The implementation here is written in torch operators on all rows at once, with masks, so that it can be
recorded on any device; it costs room for `max_seq_len` keys per row, however long the sequences are.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from boundary_ops.attention.checks import CapturedCall, attention_shares, check_arguments, check_metadata
from boundary_ops.attention.program import find_program, warm_up, warn_slow
from boundary_ops.attention.step_buffers import StepBuffers
from boundary_ops.declare.boundary_op import CapturedForm, CaptureLimits
from boundary_ops.declare.registry import define

NAME = "piecewise::attn_captured"
SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) k_cache, Tensor(c!) v_cache, "
    "Tensor slot_mapping, Tensor cu_seqlens_q, Tensor seq_lens, Tensor block_tables, "
    "float scale, int window=0, float softcap=0.0, Tensor? sinks=None) -> ()"
)
# Elements of the keys that are gathered at a time.
_CHUNK_ELEMENTS = 1 << 22


def attend_captured(*args: Any, **kwargs: Any) -> None:
    """Attends as `attend_inplace` does for the leading `cu_seqlens_q[-1]` rows; other rows stay."""
    call = CapturedCall(*args, **kwargs)
    program = find_program() if call.q.is_cuda else None
    if program is not None:
        attend_by_program(call, program)
    else:
        check_arguments(call.layer)
        check_metadata(call)
        attend_by_torch(call)


def attend_by_program(call: CapturedCall, program: Any) -> None:
    """Serves a call by the Triton program, or by torch operators where the program has no such call."""
    check_metadata(call)
    why = program.attend_captured(call)
    if why is not None:
        warn_slow(why)
        attend_by_torch(call)


def attend_by_torch(call: CapturedCall) -> None:
    """Serves a call, whose arguments and metadata fit each other, by torch operators."""
    q, k, v, out, k_cache, v_cache, slot_mapping, cu_seqlens_q, seq_lens, block_tables, *_ = call
    rows = q.shape[0]
    if not rows:
        return
    row = torch.arange(rows, device=q.device, dtype=torch.int32)
    ends = cu_seqlens_q[1:]
    is_real = row < ends[-1]
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    position = seq_lens[sequence] - ends[sequence] + row
    for pool, new in ((k_cache, k), (v_cache, v)):
        _write_rows(pool, new, slot_mapping[:rows], is_real)
    width = block_tables.shape[1] * k_cache.shape[1]
    step = max(1, _CHUNK_ELEMENTS // (width * k.shape[1] * k.shape[2]))
    key_position = torch.arange(width, device=q.device, dtype=torch.int32)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        last = position[part].unsqueeze(1)
        seen = (key_position <= last) & is_real[part].unsqueeze(1)
        if call.window:
            seen &= key_position > last - call.window
        pages = block_tables[sequence[part]]
        # What nobody wrote may be NaN, and 0 * NaN is NaN.
        keys, values = (
            pool[pages].flatten(1, 2).float().masked_fill(~seen[..., None, None], 0.0)
            for pool in (k_cache, v_cache)
        )
        result = _attend_rows(q[part], keys, values, seen, call)
        out[part].copy_(torch.where(is_real[part, None, None], result.to(out.dtype), out[part]))


def _write_rows(pool: Tensor, rows: Tensor, slots: Tensor, is_real: Tensor) -> None:
    """Writes real rows to their slots; others repeat the first row's write, or its slot's content."""
    lines = pool.view(-1, *pool.shape[2:])
    first = torch.where(is_real[:1, None, None], rows[:1], lines[slots[:1]])
    rows = torch.where(is_real[:, None, None], rows, first)
    lines.index_copy_(0, torch.where(is_real, slots, slots[:1]), rows)


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, call: CapturedCall) -> Tensor:
    """Attends float32 rows to keys [rows, width, kv_heads, head_dim] of their own; NaN where none is seen."""
    rows, heads, dim = q.shape
    kv_heads = keys.shape[2]
    queries = q.float().view(rows, kv_heads, heads // kv_heads, dim)
    products = torch.matmul(queries, keys.permute(0, 2, 3, 1))
    shares = attention_shares(call, products, seen[:, None, None], (1, kv_heads, heads // kv_heads, 1))
    return torch.matmul(shares, values.transpose(1, 2)).reshape(rows, heads, dim)


def _warm_up(num_tokens: int, *args: Any, **kwargs: Any) -> None:
    """Warms the eager op up, which runs where a step is not captured; this one compiles as it is captured."""
    warm_up(num_tokens, *CapturedCall(*args, **kwargs).layer)


_ROWS = {"q": 0, "k": 0, "v": 0, "out": 0}
attn_captured = define(SCHEMA, attend_captured, token_args=_ROWS, capture_safe=True, warm_up=_warm_up)


def _refusal(call: Mapping[str, Any]) -> str | None:
    """Says why a call cannot be captured: a captured op knows a step by its device metadata alone."""
    if call.get("implied_positions"):
        return "the model numbers the tokens itself; pass position_ids to have it captured"
    if not all(isinstance(call.get(name), Tensor) for name in ("k_cache", "v_cache")):
        return "its pools are not tensors of the model"
    return None


def _metadata(limits: CaptureLimits, calls: Sequence[Mapping[str, Any]]) -> StepBuffers:
    pools = [call[name] for call in calls for name in ("k_cache", "v_cache")]
    return StepBuffers(pools, **dataclasses.asdict(limits))


FORM = CapturedForm(attn_captured, _metadata, _refusal)
