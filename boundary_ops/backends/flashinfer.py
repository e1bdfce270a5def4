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

from boundary_ops.backends.library import PoolLook, refuse_backend, refuse_call

if TYPE_CHECKING:
    from boundary_ops.attention.checks import AttentionCall
    from boundary_ops.step.batch import PrefillBatch

__all__ = ["FlashInferAttention"]

NAME = "flashinfer"
# What its documentation recommends.
WORKSPACE_BYTES = 128 * 1024 * 1024
# Where it has kernels.
DEVICE_TYPES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)
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
        _check_pools(pools)
        self._pools = pools
        self._workspaces: dict[int, torch.Tensor] = {}
        self._planned: dict[tuple[Any, ...], _Planned] = {}
        # Between a plan and its run no other thread may plan.
        self._lock = threading.Lock()

    def check_call(self, call: AttentionCall) -> None:
        """Raises on sinks, a scale that is not positive, heads that are not dense and an `out` with gaps."""
        if call.sinks is not None:
            refuse_call(NAME, "sinks", "none", f"a tensor of {list(call.sinks.shape)}")
        if call.scale <= 0.0:
            # Its softmax takes the largest score before it is scaled.
            refuse_call(NAME, "scale", "a positive number", str(call.scale))
        if call.q.stride(-1) != 1:
            refuse_call(NAME, "q", "the elements of a head side by side", f"strides {call.q.stride()}")
        if not call.out.is_contiguous():
            refuse_call(NAME, "out", "a contiguous tensor", f"strides {call.out.stride()}")

    def attend(self, batch: PrefillBatch, call: AttentionCall) -> None:
        """Attends straight into `out`; the first layer of its kind plans for the step."""
        is_cuda = call.q.is_cuda
        with self._lock, torch.cuda.device(call.q.device) if is_cuda else contextlib.nullcontext():
            stream = torch.cuda.current_stream().cuda_stream if is_cuda else 0
            kind = (call.q.shape[1], call.k_cache.shape[2], call.scale, call.window, call.softcap)
            key = (NAME, stream, *kind)
            planned = self._planned.get(key)
            if planned is None:
                planned = self._planned[key] = _Planned(self._make_wrapper(stream))
            if planned.step is None or batch.derived.get(key) is not planned.step:
                self._plan(planned, batch, call)
                batch.derived[key] = planned.step = object()
            planned.wrapper.run(call.q, (call.k_cache, call.v_cache), out=call.out)

    def _make_wrapper(self, stream: int) -> Any:
        # Tensors made under inference mode could not be written outside it.
        with torch.inference_mode(False):
            workspace = self._workspaces.get(stream)
            if workspace is None:
                workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._pools.device)
                self._workspaces[stream] = workspace
            return self._wrapper_type(workspace, "NHD")

    def _plan(self, planned: _Planned, batch: PrefillBatch, call: AttentionCall) -> None:
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
            call.q.shape[1],
            call.k_cache.shape[2],
            self._pools.head_dim,
            self._pools.block_size,
            causal=True,
            sm_scale=call.scale,
            window_left=min(call.window, batch.max_seqlen_k) - 1 if call.window else -1,
            logits_soft_cap=call.softcap,
            q_data_type=self._pools.dtype,
            kv_data_type=self._pools.dtype,
        )
        if self._pools.device.type == "cuda":
            planned.sent = planned.sent or torch.cuda.Event()
            planned.sent.record()


def _check_pools(pools: PoolLook) -> None:
    """Raises unless FlashInfer has kernels for the device, dtype and head size."""
    device = pools.device
    if device.type not in DEVICE_TYPES:
        refuse_backend(NAME, "a CUDA device", str(device), "the library has kernels for CUDA alone")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        refuse_backend(NAME, "compute capability 8.0 or above", found, "the library has no kernels below it")
    if pools.dtype not in DTYPES:
        refuse_backend(NAME, "bfloat16 or float16", str(pools.dtype), "the library has no other dtypes")
    if pools.head_dim not in HEAD_DIMS:
        expected = f"a head_dim of {', '.join(map(str, HEAD_DIMS))}"
        refuse_backend(NAME, expected, str(pools.head_dim), "FlashInfer has kernels for such heads alone")


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
