"""Starts Inductor, compiles with it, and counts its cache hits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

from runners.engines import native_engine

# Inductor's own CUDA graphs would nest in ours; strides must be those recorded in the plan.
_INDUCTOR_PATCHES = dict.fromkeys(
    ("triton.cudagraphs", "triton.cudagraph_trees", "graph_partition", "freezing"), False
) | {"keep_output_stride": True}
# Disables autocast in a block.
without_autocast: Any = torch._C._DisableAutocast  # type: ignore[attr-defined]


def start_compile_workers(values: Sequence[Any]) -> None:
    """Starts Inductor's worker processes, if one of the values lies on a GPU. They take seconds to be ready;
    until then the first compile would run in this process."""
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    on_gpu = [device for device in devices if native_engine(device).has_triton]
    if on_gpu:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup()
        threading.Thread(target=_hash_installed_code, args=(on_gpu[0],), daemon=True).start()


def _hash_installed_code(device: torch.device) -> None:
    """Hashes torch's and Triton's files for Inductor's cache keys; most of that does not hold the GIL."""
    from torch._inductor.codecache import CacheBase, torch_key

    with suppress(Exception), torch.cuda.device(device):  # where it fails, it fails where it is needed
        torch_key()
        CacheBase.get_system()


def compile_aten_graph(
    graph: torch.fx.GraphModule, arguments: Sequence[Any], fake_mode: FakeTensorMode
) -> Callable[..., Sequence[Any]]:
    """Compiles the graph, which Inductor takes over, under settings of its own; errors may be of any kind."""
    from torch._inductor.compile_fx import compile_fx

    with tracing(TracingContext(fake_mode)), torch.inference_mode(False), torch.no_grad(), without_autocast():
        compiled: Any = compile_fx(graph, list(arguments), config_patches=dict(_INDUCTOR_PATCHES))
        return compiled


def inductor_cache_counts() -> tuple[int, int]:
    """Counts this process's compiles that were found on disk, and those that were not."""
    from torch._dynamo.utils import counters

    # The outer cache counts its own hits and, where torch's own caches do, those of the inner one.
    found = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    return found, counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]


def numeric_settings(device: torch.device) -> str:
    """Describes the settings that decide on dtypes and kernels when a function is traced or compiled."""
    kinds = sorted({"cpu", device.type})
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return f"{casts} {torch.get_default_dtype()} {torch.get_float32_matmul_precision()} {deterministic}"
