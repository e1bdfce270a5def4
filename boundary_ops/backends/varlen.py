"""torch's own flash attention over pages: `torch.nn.attention.varlen.varlen_attn_out`.

Source: the docstring of that function, and the checks of torch's flash attention 2 (pages of a multiple of
256 tokens, head sizes that are multiples of 8 up to 256, `cu_seq_k` also with pages).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from boundary_ops.backends.library import PoolLook, check_gpu_pools, check_rows, refuse_backend, refuse_call

if TYPE_CHECKING:
    from boundary_ops.batch import PrefillBatch

__all__ = ["VarlenAttention"]

NAME = "varlen"
PAGE_MULTIPLE = 256
MAX_HEAD_DIM = 256


class VarlenAttention:
    """`LibraryAttention` by torch; see there."""

    def __init__(self, pools: PoolLook) -> None:
        self._attend = _find_function()
        check_gpu_pools(NAME, pools)
        if pools.block_size % PAGE_MULTIPLE:
            refuse_backend(
                NAME,
                f"a block_size that is a multiple of {PAGE_MULTIPLE}",
                str(pools.block_size),
                "torch's flash attention reads pages of such sizes alone",
            )
        if pools.head_dim % 8 or pools.head_dim > MAX_HEAD_DIM:
            refuse_backend(
                NAME,
                f"a head_dim that is a multiple of 8, up to {MAX_HEAD_DIM}",
                str(pools.head_dim),
                "torch's flash attention has kernels for such heads alone",
            )

    def check_call(
        self, q: torch.Tensor, out: torch.Tensor, scale: float, softcap: float, sinks: torch.Tensor | None
    ) -> None:
        """Raises on a soft cap, sinks, a scale that is not positive, and heads that are not dense."""
        check_rows(NAME, q, out, scale, sinks)
        if softcap:
            refuse_call(NAME, "softcap", "0.0 (none)", str(softcap))

    def attend(
        self,
        batch: PrefillBatch,
        q: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> None:
        """Attends straight into `out`."""
        # (left, right), the token itself not counted; (-1, 0) is what torch takes for plain causal attention.
        left = window - 1 if 0 < window < batch.max_seqlen_k else -1
        self._attend(
            out,
            q,
            k_cache,
            v_cache,
            batch.cu_seqlens_q,
            _key_starts(batch),
            batch.max_seqlen_q,
            batch.max_seqlen_k,
            scale=scale,
            window_size=(left, 0),
            enable_gqa=q.shape[1] != k_cache.shape[2],
            seqused_k=batch.seq_lens,
            block_table=batch.block_tables,
            # One order of summation, whatever else is in the batch: the same inputs give the same bits.
            num_splits=1,
        )


def _find_function() -> Callable[..., Any]:
    try:
        from torch.nn.attention import varlen
    except ImportError:
        varlen = None  # type: ignore[assignment]
    function: Callable[..., Any] | None = getattr(varlen, "varlen_attn_out", None)
    if function is None:
        refuse_backend(
            NAME,
            "torch.nn.attention.varlen.varlen_attn_out, as torch 2.13 has it",
            f"torch {torch.__version__}, which lacks it",
            "a back end is never replaced by another",
        )
    return function


def _key_starts(batch: PrefillBatch) -> torch.Tensor | None:
    """int32 [B + 1], the sum of the lengths before each sequence; None where newer kernels are active.

    Flash attention 2, torch's default, wants it beside `seqused_k`; versions 3 and 4 refuse it with pages.
    """
    from torch.nn.attention import current_flash_attention_impl

    if current_flash_attention_impl() not in (None, "FA2"):
        return None
    device = batch.cache.device
    # Made on the current stream, so another stream gets one of its own.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found: torch.Tensor | None = batch.derived.get(("key starts", stream))
    if found is None:
        with torch.inference_mode(False):
            sums = torch.cumsum(batch.seq_lens, 0, dtype=torch.int32)
            found = batch.derived["key starts", stream] = torch.nn.functional.pad(sums, (1, 0))
    return found
