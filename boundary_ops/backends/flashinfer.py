"""Attends over pages with FlashInfer: one plan per step and kind of layer, then one call per layer.

Source: docs.flashinfer.ai, `BatchPrefillWithPagedKVCacheWrapper`: layout NHD, indices in int32, `window_left`
counts the tokens before the token itself, `logits_soft_cap` as the op's `softcap`.
"""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from boundary_ops.backends.library import AttentionCall, PoolSpec, StepView
from boundary_ops.errors.backends import BackendUnavailable, CallNotServed

NAME = "flashinfer"
# What its documentation recommends.
WORKSPACE_BYTES = 128 * 1024 * 1024
# Where it has kernels.
DEVICE_TYPES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
MIN_VERSION, MIN_CAPABILITY = (0, 2), (8, 0)


@dataclass(slots=True, eq=False)
class _Planned:
    """Holds a wrapper and the step that it is planned for.

    `sent` is reached when the device has read the plan from the wrapper's pinned memory; None on the CPU.
    """

    wrapper: Any
    step: object | None = None
    sent: torch.cuda.Event | None = None


class FlashInferAttention:
    """Is FlashInfer's `AttentionLibrary`: owns the workspaces and the plans of one cache.

    A wrapper holds one plan, which each step makes anew, per kind of layer and stream: nothing else orders
    what two streams write to a workspace.
    """

    def __init__(self, pools: PoolSpec) -> None:
        self._wrapper_type = _find_wrapper_type()
        _check_pools(pools)
        self._pools = pools
        self._workspaces: dict[int, torch.Tensor] = {}
        self._planned: dict[tuple[Any, ...], _Planned] = {}
        # Between a plan and its run no other thread may plan.
        self._lock = threading.Lock()

    def check_call(self, call: AttentionCall) -> None:
        """Raises on sinks, a scale that is not positive, heads that are not dense and an `out` with gaps."""
        strides = f"strides {call.q.stride()}"
        for is_served, argument, expected, got in (
            (call.sinks is None, "sinks", "none", "a tensor"),
            # Its softmax takes the largest score before it is scaled.
            (call.scale > 0.0, "scale", "a positive number", call.scale),
            (call.q.stride(-1) == 1, "q", "the elements of a head side by side", strides),
            (call.out.is_contiguous(), "out", "a contiguous tensor", f"strides {call.out.stride()}"),
        ):
            if not is_served:
                raise CallNotServed(name=NAME, argument=argument, expected=expected, got=str(got))

    def attend(self, step: StepView, call: AttentionCall) -> None:
        """Attends straight into `out`; the first layer of its kind plans for the step."""
        is_cuda = call.q.is_cuda
        with self._lock, torch.cuda.device(call.q.device) if is_cuda else contextlib.nullcontext():
            stream = torch.cuda.current_stream().cuda_stream if is_cuda else 0
            kind = (call.q.shape[1], call.k_cache.shape[2], call.scale, call.window, call.softcap)
            key = (NAME, stream, *kind)
            planned = self._planned.get(key)
            if planned is None:
                planned = self._planned[key] = _Planned(self._make_wrapper(stream))
            if planned.step is None or step.derived.get(key) is not planned.step:
                self._plan(planned, step, call)
                step.derived[key] = planned.step = object()
            planned.wrapper.run(call.q, (call.k_cache, call.v_cache), out=call.out)

    def _make_wrapper(self, stream: int) -> Any:
        # Tensors made under inference mode could not be written outside it.
        with torch.inference_mode(False):
            workspace = self._workspaces.get(stream)
            if workspace is None:
                workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._pools.device)
                self._workspaces[stream] = workspace
            return self._wrapper_type(workspace, "NHD")

    def _plan(self, planned: _Planned, step: StepView, call: AttentionCall) -> None:
        if planned.sent is not None:
            # The plan is staged in pinned memory of the wrapper, which the last plan's copy may still read.
            planned.sent.synchronize()
        # A plan that fails half-way is no step's plan.
        planned.step = None
        lists = (step.host.cu_seqlens_q, *_page_lists(step, self._pools.block_size))
        planned.wrapper.plan(
            *map(torch.from_numpy, lists),
            call.q.shape[1], call.k_cache.shape[2], self._pools.head_dim, self._pools.block_size,
            causal=True,
            sm_scale=call.scale,
            window_left=min(call.window, step.max_seqlen_k) - 1 if call.window else -1,
            logits_soft_cap=call.softcap,
            q_data_type=self._pools.dtype,
            kv_data_type=self._pools.dtype,
        )  # fmt: skip
        if call.q.is_cuda:
            planned.sent = planned.sent or torch.cuda.Event()
            planned.sent.record()


def _check_pools(pools: PoolSpec) -> None:
    device = pools.device
    if device.type not in DEVICE_TYPES:
        raise BackendUnavailable(name=NAME, expected="a CUDA device", got=str(device))
    if device.type != "cpu" and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        found = ".".join(map(str, capability))
        raise BackendUnavailable(name=NAME, expected="compute capability 8.0 or above", got=found)
    if pools.dtype not in DTYPES:
        raise BackendUnavailable(name=NAME, expected="bfloat16 or float16", got=str(pools.dtype))
    if pools.head_dim not in HEAD_DIMS:
        expected = f"a head_dim of {', '.join(map(str, HEAD_DIMS))}"
        raise BackendUnavailable(name=NAME, expected=expected, got=str(pools.head_dim))


def _page_lists(step: StepView, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns int32 page offsets [B + 1], the list of pages, and the tokens in each last page [B]."""
    lens, tables = step.host.seq_lens, step.host.block_tables
    counts = -(-lens // block_size)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    pages = tables[np.arange(tables.shape[1]) < counts[:, None]].astype(np.int32)
    return starts, pages, (lens - (counts - 1) * block_size).astype(np.int32)


def _find_wrapper_type() -> Any:
    expected = f"flashinfer-python {'.'.join(map(str, MIN_VERSION))} or newer"
    try:
        import flashinfer  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise BackendUnavailable(name=NAME, expected=expected, got=str(error)) from error
    version = str(getattr(flashinfer, "__version__", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < MIN_VERSION:
        raise BackendUnavailable(name=NAME, expected=expected, got=version)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper
