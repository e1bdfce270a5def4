"""Ahead of time: compiles what later calls launch, and measures block sizes. Never on the serving path.

Both work on scratch memory: a cache, a step and rows of their own, in the layer's shapes.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from boundary_ops.batch import PrefillBatch
from boundary_ops.kernels.configs import BlockConfig, candidates, fitted
from boundary_ops.kernels.geometry import Geometry
from boundary_ops.kernels.launcher import OutOfResources, compiling_together, is_interpreted
from boundary_ops.kernels.plans import device_limits
from boundary_ops.kernels.prefill import attend, plans
from boundary_ops.kernels.programs import prefill_program
from boundary_ops.kv_cache import PagedKVCache

__all__ = ["tune", "warm_up"]


def warm_up(num_tokens: int, *args: Any, **kwargs: Any) -> None:
    """Compiles all that a step of up to `num_tokens` new tokens launches, with and without context.

    Args:
        args, kwargs: the arguments of a call, looked at and not touched; without them, every layer shape seen
            so far.
    """
    for geometry in _geometries(args, kwargs):
        # A smaller step may take other block sizes; each choice holds for some power of two.
        counts = sorted({1 << bit for bit in range(num_tokens.bit_length())} | {num_tokens} - {0})
        chosen: dict[BlockConfig, int] = {}
        for count in counts:
            chosen.setdefault(plans.config_for(geometry, count), count)
        missing = [
            (count, has_context)
            for config, count in chosen.items()
            for has_context in (False, True)
            if (geometry, config, has_context, 0) not in plans.compiled
        ]
        scratches = {count: _Scratch(geometry, count) for count, _ in missing}
        runs = [(scratches[count], has_context) for count, has_context in missing]
        if not is_interpreted(prefill_program):
            with compiling_together():
                for scratch, has_context in runs:
                    scratch.run(has_context=has_context)
        for scratch, has_context in runs:
            scratch.run(has_context=has_context)


def tune(
    num_tokens: int, *args: Any, repeats: int = 5, **kwargs: Any
) -> dict[Geometry, dict[BlockConfig, float]]:
    """Measures block sizes for one new sequence; later steps of about that size use the best.

    Args:
        repeats: measurements of each, of which the median counts.
        args, kwargs: as for `warm_up`.

    Returns:
        Microseconds of device time per geometry and block sizes, without those that do not fit.
    """
    results = {}
    for geometry in _geometries(args, kwargs):
        _, shared_bytes = device_limits(geometry.device_index)
        sizes = (geometry.head_dim, geometry.dtype.itemsize)
        table = plans.config_for(geometry, num_tokens)
        choices = [config for config in candidates(*sizes) if fitted(config, *sizes, shared_bytes) == config]
        scratch = _Scratch(geometry, num_tokens)
        times: dict[BlockConfig, float] = {}
        for config in dict.fromkeys((table, *choices)):
            plans.measured(geometry, num_tokens, config)
            try:
                times[config] = scratch.time(repeats)
            except OutOfResources:
                continue
        plans.measured(geometry, num_tokens, min(times, key=times.__getitem__))
        results[geometry] = times
    return results


class _Scratch:
    """A layer of that geometry with memory of its own, and a step of one sequence."""

    def __init__(self, geometry: Geometry, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        device = (
            torch.device("cuda", geometry.device_index) if geometry.device_index >= 0 else torch.device("cpu")
        )
        self.cache = PagedKVCache(
            num_layers=1,
            num_blocks=-(-2 * num_tokens // geometry.page),
            block_size=geometry.page,
            num_kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            dtype=geometry.dtype,
            device=device,
        )

        def rows(heads: int) -> torch.Tensor:
            # A generator of its own: warming up draws no numbers from the model's.
            generator = torch.Generator(device).manual_seed(0)
            shape = (num_tokens, heads, geometry.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(
                geometry.dtype
            )

        with torch.inference_mode(False):
            q, k, v = rows(geometry.heads), rows(geometry.kv_heads), rows(geometry.kv_heads)
            sinks = geometry.sinks and torch.zeros(geometry.heads, dtype=geometry.sinks, device=device)
            self.arguments: tuple[Any, ...] = (
                q, k, v, torch.empty_like(q), self.cache.k[0], self.cache.v[0],
                (-1 if geometry.negate else 1) * geometry.head_dim**-0.5,
                num_tokens if geometry.window else 0, 1.0 if geometry.softcap else 0.0, sinks,
            )  # fmt: skip

    def run(self, *, has_context: bool) -> None:
        """One call, as the first or as the second half of a sequence."""
        if has_context:
            self.cache.allocate("context", self.num_tokens)
            self.cache.append("context", self.num_tokens)
        name = "context" if has_context else "new"
        with PrefillBatch.build(self.cache, [name], [self.num_tokens]):
            self._attend()
        self.cache.free(name)

    def time(self, repeats: int, launches: int = 20) -> float:
        """Microseconds of device time per call without context, the median."""
        taken = []
        with PrefillBatch.build(self.cache, ["new"], [self.num_tokens]):
            self._attend()
            for _ in range(repeats):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # Enough work in front that the launches queue up: then the device, not the host, is timed.
                torch.cuda._sleep(1_000_000)
                begin.record()
                for _ in range(launches):
                    self._attend()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end) / launches * 1e3)
        self.cache.free("new")
        return statistics.median(taken)

    def _attend(self) -> None:
        with torch.no_grad():
            attend(*self.arguments)


def _geometries(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Geometry]:
    if not args and not kwargs:
        return list(plans.geometries)
    return [_plan_of(*args, **kwargs)]


def _plan_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    implied_positions: bool = False,
) -> Geometry:
    """The geometry of a call, from its arguments in the order of the op's schema."""
    return plans.make(q, k, v, out, k_cache, v_cache, scale, window, softcap, sinks).geometry
