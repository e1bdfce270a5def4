"""Naive oracles of the attention ops: slow, in float64, one row and one head at a time, sharing no code with
the ops. Read them to learn what an op computes."""

from __future__ import annotations

import math

import torch

from boundary_ops.step.batch import PrefillBatch


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a sequence's last tokens, by the definition.

    Args:
        q: [new, heads, head_dim], the queries of the last `new` tokens.
        k, v: [total, kv_heads, head_dim], all tokens of the sequence.
        scale, window, softcap, sinks: as for `piecewise::attn_inplace`.

    Returns:
        float64 [new, heads, head_dim], a new tensor.
    """
    new, heads, dim = q.shape
    total, kv_heads, _ = k.shape
    result = torch.zeros(new, heads, dim, dtype=torch.float64)
    for row in range(new):
        position = total - new + row
        first = max(0, position - window + 1) if window else 0
        for head in range(heads):
            kv_head = head * kv_heads // heads
            scores = []
            for other in range(first, position + 1):
                score = scale * float(torch.dot(q[row, head].double(), k[other, kv_head].double()))
                scores.append(softcap * math.tanh(score / softcap) if softcap else score)
            terms = scores if sinks is None else [*scores, float(sinks[head])]
            peak = max(terms)
            norm = sum(math.exp(term - peak) for term in terms)
            for other, score in zip(range(first, position + 1), scores, strict=True):
                result[row, head] += math.exp(score - peak) / norm * v[other, kv_head].double()
    return result


def naive_attn_inplace(
    batch: PrefillBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `piecewise::attn_inplace` leaves behind, computed without touching its arguments.

    Works from the batch's device metadata alone (`cu_seqlens_q`, `seq_lens`, `block_tables`), so that it
    also checks that these agree with `slot_mapping` and the host lengths, which the op reads.

    Returns:
        (out, k_cache, v_cache): float64 [num_tokens, heads, head_dim] and the two pools as they should be
        afterwards; new tensors.
    """
    keys, values = k_cache.clone(), v_cache.clone()
    block_size = k_cache.shape[1]
    starts, lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    outputs = [torch.zeros(0, *q.shape[1:], dtype=torch.float64)]
    for at, length in enumerate(lens):
        start, end = starts[at], starts[at + 1]
        places = [(int(batch.block_tables[at, i // block_size]), i % block_size) for i in range(length)]
        for row, (block, offset) in zip(range(start, end), places[length - (end - start) :], strict=True):
            keys[block, offset], values[block, offset] = k[row], v[row]
        if not places:
            continue
        dense_k = torch.stack([keys[block, offset] for block, offset in places])
        dense_v = torch.stack([values[block, offset] for block, offset in places])
        outputs.append(
            naive_attention(
                q[start:end], dense_k, dense_v, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
        )
    return torch.cat(outputs), keys, values


# Of errors relative to float64 attention, by norm.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 5e-6}


def check_close(found, expected):
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[found.dtype], f"relative error {error:.2e}"


def exact(batch, q, k, v, k_pool, v_pool, *, scale, window=0, softcap=0.0, sinks=None):
    """Float64 attention of each sequence, context from the pages."""
    results, start = [], 0
    group = q.shape[1] // k.shape[1]
    for at, (new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        rows, pages = slice(start, start + new), batch.block_tables[at].long()
        start += new
        keys, values = (
            torch.cat((pool[pages].flatten(0, 1)[:context], tensor[rows])).double().transpose(0, 1)
            for pool, tensor in ((k_pool, k), (v_pool, v))
        )
        keys, values = (tensor.repeat_interleave(group, dim=0) for tensor in (keys, values))
        scores = q[rows].double().transpose(0, 1) @ keys.transpose(1, 2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        last = torch.arange(context, context + new, device=q.device).unsqueeze(1)
        column = torch.arange(context + new, device=q.device).unsqueeze(0)
        visible = column <= last
        if window:
            visible &= column > last - window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            extra = sinks.double().view(-1, 1, 1).expand(-1, new, 1)
            scores = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
        else:
            scores = scores.softmax(-1)
        results.append((scores @ values).transpose(0, 1))
    return torch.cat(results)
