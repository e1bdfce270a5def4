"""Checks the arguments of the attention ops against each other and the step; reads no device tensor back."""

from typing import NamedTuple

import torch

from boundary_ops.backends.library import NAME, AttentionCall
from boundary_ops.errors.attention import PositionsMissing, WrongArgument, WrongMetadata
from boundary_ops.errors.step import OtherCache, WrongNumTokens
from boundary_ops.step.batch import PrefillBatch

_POOL = "a pool of the cache that the current PrefillBatch was built for"


class CapturedCall(NamedTuple):
    """Holds the arguments of `piecewise::attn_captured`, in the order of its schema.

    Attributes:
        q, k, v, out, k_cache, v_cache, scale, window, softcap, sinks: as in `AttentionCall`, with rows that
            may be padded.
        slot_mapping: int64 [rows or more]; entries of real rows are slots of the pools.
        cu_seqlens_q: int32 [max_num_seqs + 1]; entries beyond the step's sequences repeat its token count.
        seq_lens: int32 [max_num_seqs].
        block_tables: int32 [max_num_seqs, max_blocks]; every entry is a valid block.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def metadata(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.slot_mapping, self.cu_seqlens_q, self.seq_lens, self.block_tables

    @property
    def layer(self) -> AttentionCall:
        return AttentionCall(*self[:6], *self[10:])  # type: ignore[arg-type]


def attention_shares(
    call: AttentionCall | CapturedCall, products: torch.Tensor, seen: torch.Tensor, sinks_as: tuple[int, ...]
) -> torch.Tensor:
    """Returns the softmax of `products`, q @ k, over the keys seen, with scale, soft cap and sinks."""
    scores = products * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if call.sinks is None:
        return scores.softmax(-1)
    column = call.sinks.float().view(sinks_as).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def check_arguments(call: AttentionCall) -> None:
    """Raises unless shapes, dtypes and devices agree, and the options are numbers that make sense."""
    q, k, v, out, k_cache, v_cache, scale, window, softcap, sinks, _ = call
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 3:
            raise _wrong(name, "[num_tokens, heads, head_dim]", list(tensor.shape))
    (num_tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    rows = (num_tokens, kv_heads, dim)
    for name, tensor, shape in (("k", k, rows), ("v", v, rows), ("out", out, q.shape)):
        if tensor.shape != shape:
            fitting = f"{list(shape)}, as q is {list(q.shape)} and k {list(k.shape)}"
            raise _wrong(name, fitting, list(tensor.shape))
    if not kv_heads or heads % kv_heads:
        raise _wrong("q", f"a multiple of the {kv_heads} K/V heads", f"{heads} query heads")
    for name, pool in (("k_cache", k_cache), ("v_cache", v_cache)):
        if pool.dim() != 4 or pool.shape[2:] != (kv_heads, dim):
            raise _wrong(name, f"[num_blocks, block_size, {kv_heads}, {dim}]", list(pool.shape))
    if sinks is not None and sinks.shape != (heads,):
        raise _wrong("sinks", f"[{heads}], one per query head", list(sinks.shape))
    if not q.dtype.is_floating_point:
        raise _wrong("q", "a floating dtype", q.dtype)
    for name, tensor in (("k", k), ("v", v), ("out", out), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise _wrong(name, f"{q.dtype} on {q.device}, as q", f"{tensor.dtype} on {tensor.device}")
    if window < 0:
        raise _wrong("window", "0 (none) or a positive number of tokens", window)
    # Written so that NaN is refused too.
    if not 0.0 <= softcap < float("inf"):
        raise _wrong("softcap", "0.0 (none) or a positive number", softcap)
    if not abs(scale) < float("inf"):
        raise _wrong("scale", "a finite number", scale)


def _wrong(argument: str, expected: str, got: object) -> WrongArgument:
    return WrongArgument(argument=argument, expected=expected, got=str(got))


def check_batch(batch: PrefillBatch, call: AttentionCall) -> None:
    if call.q.shape[0] != batch.num_tokens:
        where, found = f"op '{NAME}', argument 'q'", f"{call.q.shape[0]} rows"
        raise WrongNumTokens(where, num_tokens=batch.num_tokens, got=found)
    for name, pool in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if not batch.cache.owns_pool(pool):
            where, found = f"op '{NAME}', argument '{name}'", f"another tensor, {list(pool.shape)}"
            raise OtherCache(where, expected=_POOL, got=found)
    if call.implied_positions:
        check_positions(batch)


def check_positions(batch: PrefillBatch) -> None:
    """Raises unless numbering the step's tokens 0, 1, 2, ... is what their positions are."""
    if batch.num_seqs > 1 or any(batch.context_lens):
        raise PositionsMissing(num_seqs=batch.num_seqs, context_lens=batch.context_lens)


def check_metadata(call: CapturedCall) -> None:
    """Raises unless shapes, dtypes and devices of the metadata fit each other and the rows."""
    (slot_mapping, cu_seqlens_q, seq_lens, block_tables), device = call.metadata, call.q.device
    seqs, rows, tables = seq_lens.shape[0], call.q.shape[0], block_tables.shape
    for name, tensor, dtype, shape, fits in (
        ("slot_mapping", slot_mapping, torch.int64, f"[{rows} or more]",
         slot_mapping.dim() == 1 and slot_mapping.shape[0] >= rows),
        ("cu_seqlens_q", cu_seqlens_q, torch.int32, f"[{seqs + 1}]", cu_seqlens_q.shape == (seqs + 1,)),
        ("seq_lens", seq_lens, torch.int32, "[max_num_seqs]", seq_lens.dim() == 1 and seqs > 0),
        ("block_tables", block_tables, torch.int32, f"[{seqs}, max_blocks]",
         len(tables) == 2 and tables[0] == seqs and tables[1] > 0),
    ):  # fmt: skip
        is_dense = tensor.is_contiguous()
        if not fits or not is_dense or tensor.dtype != dtype or tensor.device != device:
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            found += "" if is_dense else ", not contiguous"
            expected = f"{dtype} {shape} on {device}, contiguous"
            raise WrongMetadata(argument=name, expected=expected, got=found)
