"""Works out once what calls of one geometry have in common: whether the program can run them, and how.

The key of a call is all that its checks and its launch depend on, except values that change per step:
shapes, strides, dtypes, devices and options, but neither addresses nor the batch.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from boundary_ops.attention.checks import check_arguments
from boundary_ops.attention.triton.configs import BlockConfig, Geometry, default_config, fitted
from boundary_ops.attention.triton.launcher import DirectLaunch
from boundary_ops.backends.choice import why_triton_unsupported
from boundary_ops.backends.library import AttentionCall

LOG2_E = 1.4426950408889634
# A plan is a few hundred bytes, and there is one per layer shape and token count.
MAX_PLANS = 4096
MAX_INT32 = 2**31 - 1

# How to launch a program directly, and its compile-time arguments, which the launcher still wants to see.
Compiled = tuple[DirectLaunch, tuple[Any, ...]]


@dataclass(slots=True, eq=False)
class Plan:
    """Describes how calls of one geometry are launched.

    Attributes:
        unsupported: why the program cannot run them, or None; torch operators do it then.
        programs_per_tile: the grid's first size.
        tail: the program's arguments after `num_rows`: strides, then options.
        bits: all strides or-ed together. With the addresses or-ed in, the low four bits tell whether all are
            divisible by 16, as the compiled program assumes.
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
    """Keeps plans by the keys of calls, and compiled programs by what they were compiled for.

    Attributes:
        compiled: by (geometry, block sizes, has context, max_num_seqs).
        geometries: each planned geometry, oldest first; a warm-up without arguments compiles for these.
    """

    def __init__(self) -> None:
        self.by_key: dict[Any, Plan] = {}
        self.compiled: dict[tuple[Geometry, BlockConfig, bool, int], Compiled] = {}
        self.geometries: dict[Geometry, None] = {}

    def plan_for(self, call: AttentionCall) -> Plan:
        """Returns the plan of such calls; a call is checked where there is none yet."""
        sinks = call.sinks
        key = (
            *((tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()) for tensor in call[:6]),
            call.scale, call.window, call.softcap,
            None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.get_device()),
        )  # fmt: skip
        plan = self.by_key.get(key)
        if plan is None:
            check_arguments(call)
            plan = self.make(call)
            if len(self.by_key) >= MAX_PLANS:
                self.by_key.clear()
            self.by_key[key] = plan
            if plan.unsupported is None:
                self.geometries[plan.geometry] = None
        return plan

    def adopt(self, plan: Plan, has_context: bool, max_seqs: int) -> Compiled | None:
        """Returns a compiled program that another plan has left, from now on this one's too; or None."""
        found = self.compiled.get((plan.geometry, plan.config, has_context, max_seqs))
        if found is not None:
            plan.launches[has_context, max_seqs] = found
        return found

    def config_for(self, geometry: Geometry, num_tokens: int) -> BlockConfig:
        processors, shared_bytes = device_limits(geometry.device_index)
        head_dim, element_bytes = geometry.head_dim, geometry.dtype.itemsize
        config = default_config(
            num_tokens=num_tokens, heads=geometry.heads, kv_heads=geometry.kv_heads, head_dim=head_dim,
            element_bytes=element_bytes, num_processors=processors,
        )  # fmt: skip
        return fitted(config, head_dim, element_bytes, shared_bytes)

    def make(self, call: AttentionCall) -> Plan:
        """Makes the plan for calls like this one, whose arguments fit each other."""
        geometry = Geometry.of(call)
        strides = tuple(stride for tensor in call[:4] for stride in tensor.stride()[:2])
        bits = functools.reduce(int.__or__, strides)
        # A stride beyond int32 makes another program of it; the JIT finds that one.
        bits |= 1 if max(strides) > MAX_INT32 else 0
        config = self.config_for(geometry, call.q.shape[0])
        scale, cap = LOG2_E * abs(call.scale), 0.0
        if call.softcap:
            scale, cap = 2.0 * scale / call.softcap, LOG2_E * call.softcap
        return Plan(
            geometry, config, _why_unsupported(geometry, call), config.tile_tokens(geometry.group),
            geometry.programs_per_tile(config), call.window,
            tail=(*strides, min(call.window, MAX_INT32), scale, cap), bits=bits,
        )  # fmt: skip


def _why_unsupported(geometry: Geometry, call: AttentionCall) -> str | None:
    why = why_triton_unsupported(geometry.dtype, geometry.head_dim, geometry.device_index)
    if why is not None:
        return why
    if any(tensor.stride(2) != 1 for tensor in call[:4]):
        return "the elements of a head do not lie side by side in q, k, v or out"
    if not (call.k_cache.is_contiguous() and call.v_cache.is_contiguous()):
        return "a pool of the cache is not contiguous"
    if call.sinks is not None and not (call.sinks.is_contiguous() and call.sinks.dtype.is_floating_point):
        return "sinks are not contiguous floating-point numbers"
    return None


@functools.cache
def device_limits(device_index: int) -> tuple[int, int]:
    """Returns (multiprocessors, bytes of shared memory that one program may have)."""
    if device_index < 0:
        return 1, 2**31
    properties: Any = torch.cuda.get_device_properties(device_index)
    # 99 KiB is what the smallest devices of capability 8 and above have.
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
