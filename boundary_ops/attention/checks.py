"""The arguments of the attention ops and their meaning, and what they must fulfil; no check reads a device
tensor back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from boundary_ops.errors import BoundaryOpError
from boundary_ops.step.batch import PrefillBatch

if TYPE_CHECKING:
    from boundary_ops.attention.captured import CapturedCall

__all__ = [
    "NAME",
    "AttentionCall",
    "attention_shares",
    "check_arguments",
    "check_batch",
    "check_implied_positions",
]

NAME = "piecewise::attn_inplace"


class AttentionCall(NamedTuple):
    """The arguments of `piecewise::attn_inplace`, in the order of its schema.

    Attributes:
        q: [num_tokens, heads, head_dim], any strides; query head `h` uses K/V head `h // (heads //
            kv_heads)`.
        k, v: [num_tokens, kv_heads, head_dim], any strides.
        out: like q, any strides; all its rows are written.
        k_cache, v_cache: one layer's pools, [num_blocks, block_size, kv_heads, head_dim]; rows at
            `slot_mapping` are written.
        scale: factor on q @ k.
        window: a token sees the last `window` tokens, itself included; 0 for all.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0 for none.
        sinks: [heads], a score per head that takes part in the softmax and has no value; None for none.
        implied_positions: the caller numbered the tokens 0, 1, 2, ... itself, so only a step of one
            sequence without context is right.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    implied_positions: bool = False


def attention_shares(
    call: AttentionCall | CapturedCall,
    products: torch.Tensor,
    seen: torch.Tensor,
    sinks_shape: tuple[int, ...],
) -> torch.Tensor:
    """The softmax over `products`, q @ k, of the keys seen, with scale, soft cap and sinks."""
    scores = products * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if call.sinks is None:
        return scores.softmax(-1)
    column = call.sinks.float().view(sinks_shape).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def check_arguments(call: AttentionCall) -> None:
    """Raises unless shapes, dtypes and devices agree, and the options are numbers that make sense."""
    q, k, v, out, k_cache, v_cache, scale, window, softcap, sinks, _ = call
    if q.dim() != 3 or k.dim() != 3:
        name, tensor = ("q", q) if q.dim() != 3 else ("k", k)
        raise _mismatch(name, "[num_tokens, heads, head_dim]", str(list(tensor.shape)))
    (num_tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    new_rows = (num_tokens, kv_heads, dim)
    shapes = {"k": (k, new_rows), "v": (v, new_rows), "out": (out, (num_tokens, heads, dim))}
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            fitting = f"{list(shape)}, as q is {list(q.shape)} and k {list(k.shape)}"
            raise _mismatch(name, fitting, str(list(tensor.shape)))
    if not kv_heads or heads % kv_heads:
        raise _mismatch("q", f"a multiple of the {kv_heads} K/V heads", f"{heads} query heads")
    for name, pool in (("k_cache", k_cache), ("v_cache", v_cache)):
        if pool.dim() != 4 or pool.shape[2:] != (kv_heads, dim):
            raise _mismatch(name, f"[num_blocks, block_size, {kv_heads}, {dim}]", str(list(pool.shape)))
    if sinks is not None and sinks.shape != (heads,):
        raise _mismatch("sinks", f"[{heads}], one per query head", str(list(sinks.shape)))
    if not q.dtype.is_floating_point:
        raise _mismatch("q", "a floating dtype", str(q.dtype))
    for name, tensor in (("k", k), ("v", v), ("out", out), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise _mismatch(name, f"{q.dtype} on {q.device}, as q", f"{tensor.dtype} on {tensor.device}")

    if window < 0:
        raise _mismatch("window", "0 (none) or a positive number of tokens", str(window))
    # Written so that NaN is refused too.
    if not 0.0 <= softcap < float("inf"):
        raise _mismatch("softcap", "0.0 (none) or a positive number", str(softcap))
    if not abs(scale) < float("inf"):
        raise _mismatch("scale", "a finite number", str(scale))


def check_batch(batch: PrefillBatch, call: AttentionCall) -> None:
    """Raises unless the call fits the step that is running."""
    if call.q.shape[0] != batch.num_tokens:
        raise BoundaryOpError(
            f"op '{NAME}', argument 'q'",
            expected=f"{batch.num_tokens} rows, the tokens of the current PrefillBatch",
            got=f"{call.q.shape[0]}",
            rule="the op gets exactly the step's tokens, without padding",
            fix="call the model with batch.pack(prompts), inside the `with` block of that same batch",
        )
    for name, pool in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if not batch.cache.owns_pool(pool):
            raise BoundaryOpError(
                f"op '{NAME}', argument '{name}'",
                expected="a pool of the cache that the current PrefillBatch was built for",
                got=f"another tensor, {list(pool.shape)}",
                rule="slots and block tables mean nothing in another cache",
                fix="build the batch with the cache that the model is attached to",
            )
    if call.implied_positions:
        check_implied_positions(batch)


def check_implied_positions(batch: PrefillBatch) -> None:
    """Raises unless numbering the step's tokens 0, 1, 2, ... is what their positions are."""
    if batch.num_seqs > 1 or any(batch.context_lens):
        raise BoundaryOpError(
            "model input 'position_ids'",
            expected="the positions of a packed or continued step",
            got=f"none, with {batch.num_seqs} sequences and context lengths {batch.context_lens}",
            rule="without position_ids a model numbers the tokens 0, 1, 2, ... as one new sequence",
            fix="pass position_ids=batch.positions",
        )


def _mismatch(argument: str, expected: str, got: str) -> BoundaryOpError:
    return BoundaryOpError(
        f"op '{NAME}', argument '{argument}'",
        expected=expected,
        got=got,
        rule="q, k, v, out and the layer's pools agree in heads, head_dim, dtype and device",
        fix="pass this layer's tensors, and make the cache with the model's sizes, dtype and device",
    )
