"""FlashInfer's attention over pages: one plan per step and kind of layer, then one call per layer.

Source: docs.flashinfer.ai, `BatchPrefillWithPagedKVCacheWrapper`: layout NHD, indices in int32, `window_left`
counts the tokens before the token itself, `logits_soft_cap` as the op's `softcap`.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from boundary_ops.backends.library import PoolLook, check_gpu_pools, check_rows, refuse_backend, refuse_call

if TYPE_CHECKING:
    from boundary_ops.batch import PrefillBatch

__all__ = ["FlashInferAttention"]

NAME = "flashinfer"
# What its documentation recommends.
WORKSPACE_BYTES = 128 * 1024 * 1024
HEAD_DIMS = (64, 128, 256)
MIN_VERSION = (0, 2)


@dataclass(slots=True, eq=False)
class _Planned:
    """A wrapper, and the step that it is planned for.

    Attributes:
        step: what the step's batch keeps under the same key; None before the first plan.
        sent: reached when the device has read the plan from the wrapper's pinned memory; None on the CPU.
    """

    wrapper: Any
    step: object | None = None
    sent: torch.cuda.Event | None = None


class FlashInferAttention:
    """`LibraryAttention` by FlashInfer; see there. Owns the workspaces and the plans of one cache.

    A wrapper holds one plan. Steps that run in turn share one per kind of layer, and each step plans it anew;
    a stream has workspaces of its own, as nothing else orders what two streams write there.
    """

    def __init__(self, pools: PoolLook) -> None:
        self._wrapper_type = _find_wrapper_type()
        check_gpu_pools(NAME, pools)
        if pools.head_dim not in HEAD_DIMS:
            refuse_backend(
                NAME,
                f"a head_dim of {', '.join(map(str, HEAD_DIMS))}",
                str(pools.head_dim),
                "FlashInfer has kernels for such heads alone",
            )
        self._pools = pools
        self._workspaces: dict[int, torch.Tensor] = {}
        self._planned: dict[tuple[Any, ...], _Planned] = {}
        # Between a plan and its run no other thread may plan.
        self._lock = threading.Lock()

    def check_call(
        self, q: torch.Tensor, out: torch.Tensor, scale: float, softcap: float, sinks: torch.Tensor | None
    ) -> None:
        """Raises on sinks, a scale that is not positive, heads that are not dense and an `out` with gaps."""
        check_rows(NAME, q, out, scale, sinks)
        if not out.is_contiguous():
            refuse_call(NAME, "out", "a contiguous tensor", f"strides {out.stride()}")

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
        """Attends straight into `out`; the first layer of its kind plans for the step."""
        is_cuda = q.is_cuda
        with self._lock, torch.cuda.device(q.device) if is_cuda else contextlib.nullcontext():
            stream = torch.cuda.current_stream().cuda_stream if is_cuda else 0
            key = (NAME, stream, q.shape[1], k_cache.shape[2], scale, window, softcap)
            planned = self._planned.get(key)
            if planned is None:
                planned = self._planned[key] = _Planned(self._make_wrapper(stream))
            if planned.step is None or batch.derived.get(key) is not planned.step:
                self._plan(planned, batch, q.shape[1], k_cache.shape[2], scale, window, softcap)
                batch.derived[key] = planned.step = object()
            planned.wrapper.run(q, (k_cache, v_cache), out=out)

    def _make_wrapper(self, stream: int) -> Any:
        # Tensors made under inference mode could not be written outside it.
        with torch.inference_mode(False):
            workspace = self._workspaces.get(stream)
            if workspace is None:
                workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._pools.device)
                self._workspaces[stream] = workspace
            return self._wrapper_type(workspace, "NHD")

    def _plan(
        self,
        planned: _Planned,
        batch: PrefillBatch,
        heads: int,
        kv_heads: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> None:
        if planned.sent is not None:
            # The plan is staged in pinned memory of the wrapper, which the last plan's copy may still read.
            planned.sent.synchronize()
        # A plan that fails half-way is no step's plan.
        planned.step = None
        starts, pages, last = _page_lists(batch, self._pools.block_size)
        planned.wrapper.plan(
            torch.from_numpy(batch.host.cu_seqlens_q),
            torch.from_numpy(starts),
            torch.from_numpy(pages),
            torch.from_numpy(last),
            heads,
            kv_heads,
            self._pools.head_dim,
            self._pools.block_size,
            causal=True,
            sm_scale=scale,
            window_left=min(window, batch.max_seqlen_k) - 1 if window else -1,
            logits_soft_cap=softcap,
            q_data_type=self._pools.dtype,
            kv_data_type=self._pools.dtype,
        )
        if self._pools.device.type == "cuda":
            planned.sent = planned.sent or torch.cuda.Event()
            planned.sent.record()


def _page_lists(batch: PrefillBatch, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each sequence's pages begin in the list of all, [B + 1]; that list; and the tokens in each
    sequence's last page, [B]. All int32."""
    lens, tables = batch.host.seq_lens, batch.host.block_tables
    counts = -(-lens // block_size)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    pages = tables[np.arange(tables.shape[1]) < counts[:, None]].astype(np.int32)
    return starts, pages, (lens - (counts - 1) * block_size).astype(np.int32)


def _find_wrapper_type() -> Any:
    rule = "a back end is never replaced by another"
    expected = f"flashinfer-python {'.'.join(map(str, MIN_VERSION))} or newer"
    try:
        import flashinfer  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        refuse_backend(NAME, expected, str(error), rule)
    version = str(getattr(flashinfer, "__version__", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < MIN_VERSION:
        refuse_backend(NAME, expected, version, rule)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper
