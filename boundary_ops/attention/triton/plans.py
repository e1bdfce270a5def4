"""What calls of one look have in common, worked out once: whether the program can run them, and how.

The *look* of a call is all that its checks and its launch depend on, except values that change per step:
shapes, strides, dtypes, devices and options, but neither addresses nor the batch.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from boundary_ops.attention.checks import AttentionCall
from boundary_ops.attention.triton.configs import BlockConfig, default_config, fitted
from boundary_ops.attention.triton.geometry import Geometry
from boundary_ops.attention.triton.launcher import DirectLaunch

__all__ = ["Plan", "Plans", "device_limits", "why_pools_unsupported"]

_log = logging.getLogger("boundary_ops")
LOG2_E = 1.4426950408889634
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
# A plan is a few hundred bytes, and there is one per layer shape and token count.
MAX_PLANS = 4096
MAX_INT32 = 2**31 - 1


# How to launch a program directly, and its compile-time arguments, which the launcher still wants to see.
Compiled = tuple[DirectLaunch, tuple[Any, ...]]


@dataclass(slots=True, eq=False)
class Plan:
    """How calls of one look are launched.

    Attributes:
        unsupported: why the program cannot run them, or None; torch operators do it then.
        programs_per_tile: the grid's first size.
        tail: the program's arguments after `num_rows`: strides, then options.
        bits: all strides or-ed together. With the addresses or-ed in, the low four bits say whether the
            compiled program's assumption, all divisible by 16, holds.
        launches: the compiled programs that these calls have used, by (has context, max_num_seqs).
    """

    geometry: Geometry
    config: BlockConfig
    unsupported: str | None
    tile_tokens: int
    programs_per_tile: int
    window: int
    tail: tuple[Any, ...]
    bits: int
    launches: dict[tuple[bool, int], Compiled] = field(default_factory=dict)


class Plans:
    """Plans by look, and compiled programs by what they were compiled for.

    Attributes:
        by_look: the plans, bounded.
        compiled: the compiled programs, by (geometry, block sizes, has context, max_num_seqs).
        geometries: each geometry that was planned, oldest first; what a warm-up without arguments warms.
    """

    def __init__(self) -> None:
        self.by_look: dict[Any, Plan] = {}
        self.compiled: dict[tuple[Geometry, BlockConfig, bool, int], Compiled] = {}
        self.geometries: dict[Geometry, None] = {}
        self._warned: set[str] = set()

    def add(self, look: Any, plan: Plan) -> None:
        """Keeps a plan."""
        if len(self.by_look) >= MAX_PLANS:
            self.by_look.clear()
        self.by_look[look] = plan
        if plan.unsupported is None:
            self.geometries[plan.geometry] = None

    def warn(self, unsupported: str) -> None:
        """Says once that calls of a kind that the program cannot run are served by torch operators."""
        if unsupported not in self._warned:
            self._warned.add(unsupported)
            _log.warning("piecewise::attn_inplace runs as torch operators, which is slow: %s", unsupported)

    def adopt(self, plan: Plan, has_context: bool, max_seqs: int) -> Compiled | None:
        """A compiled program that another plan has left, from now on this one's too; None without one."""
        found = self.compiled.get((plan.geometry, plan.config, has_context, max_seqs))
        if found is not None:
            plan.launches[has_context, max_seqs] = found
        return found

    def config_for(self, geometry: Geometry, num_tokens: int) -> BlockConfig:
        """The block sizes for a step of so many tokens."""
        processors, shared_bytes = device_limits(geometry.device_index)
        config = default_config(
            num_tokens=num_tokens,
            heads=geometry.heads,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            element_bytes=geometry.dtype.itemsize,
            num_processors=processors,
        )
        return fitted(config, geometry.head_dim, geometry.dtype.itemsize, shared_bytes)

    def make(self, call: AttentionCall) -> Plan:
        """The plan for calls that look like this one, whose arguments fit each other."""
        q, k, v, out, k_cache, v_cache, scale, window, softcap, sinks, _ = call
        geometry = Geometry(
            dtype=q.dtype,
            device_index=q.get_device(),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[2],
            page=k_cache.shape[1],
            window=window > 0,
            softcap=softcap > 0.0,
            sinks=None if sinks is None else sinks.dtype,
            negate=scale < 0.0,
        )
        unsupported = _why_unsupported(geometry, (q, k, v, out), (k_cache, v_cache), sinks)
        strides = tuple(stride for tensor in (q, k, v, out) for stride in tensor.stride()[:2])
        bits = functools.reduce(int.__or__, strides)
        # A stride beyond int32 makes another program of it; the JIT finds that one.
        bits |= 1 if max(strides) > MAX_INT32 else 0
        config = self.config_for(geometry, q.shape[0])
        if softcap:
            factors = (2.0 * LOG2_E * abs(scale) / softcap, LOG2_E * softcap)
        else:
            factors = (LOG2_E * abs(scale), 0.0)
        return Plan(
            geometry=geometry,
            config=config,
            unsupported=unsupported,
            tile_tokens=config.tile_tokens(geometry.group),
            programs_per_tile=geometry.programs_per_tile(config),
            window=window,
            tail=(*strides, min(window, MAX_INT32), *factors),
            bits=bits,
        )


def _why_unsupported(
    geometry: Geometry,
    rows: tuple[torch.Tensor, ...],
    pools: tuple[torch.Tensor, ...],
    sinks: torch.Tensor | None,
) -> str | None:
    why = why_pools_unsupported(geometry.dtype, geometry.head_dim, geometry.device_index)
    if why is not None:
        return why
    if any(tensor.stride(2) != 1 for tensor in rows):
        return "the elements of a head do not lie side by side in q, k, v or out"
    if any(not pool.is_contiguous() for pool in pools):
        return "a pool of the cache is not contiguous"
    if sinks is not None and not (sinks.is_contiguous() and sinks.dtype.is_floating_point):
        return "sinks are not contiguous floating-point numbers"
    return None


def why_pools_unsupported(dtype: torch.dtype, head_dim: int, device_index: int) -> str | None:
    """Why no call on pools of that kind can run as the program, or None; -1 is the CPU, interpreted."""
    if dtype not in DTYPES:
        return f"the program has no {dtype}"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is above {MAX_HEAD_DIM}"
    if device_index >= 0 and torch.cuda.get_device_capability(device_index) < (8, 0):
        return "the device's compute capability is below 8.0"
    return None


@functools.cache
def device_limits(device_index: int) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that one program may have)."""
    if device_index < 0:
        return 1, 2**31
    properties: Any = torch.cuda.get_device_properties(device_index)
    # 99 KiB is what the smallest devices of capability 8 and above have.
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
