"""Ahead of time: compiles what later calls launch. Never on the serving path.

It works on scratch memory: a cache, a step and rows of its own, in the layer's shapes.
"""

from __future__ import annotations

import torch

from boundary_ops.attention.checks import AttentionCall
from boundary_ops.attention.triton.configs import BlockConfig
from boundary_ops.attention.triton.geometry import Geometry
from boundary_ops.attention.triton.launcher import compiling_together, is_interpreted
from boundary_ops.attention.triton.prefill import attend, plans
from boundary_ops.attention.triton.programs import prefill_program
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache

__all__ = ["ScratchLayer", "warm_up"]


def warm_up(num_tokens: int, call: AttentionCall | None = None) -> None:
    """Compiles all that a step of up to `num_tokens` new tokens launches, with and without context.

    Args:
        call: looked at and not touched; without one, every layer shape seen so far.
    """
    for geometry in [plans.make(call).geometry] if call is not None else list(plans.geometries):
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
        scratches = {count: ScratchLayer(geometry, count) for count, _ in missing}
        runs = [(scratches[count], has_context) for count, has_context in missing]
        if not is_interpreted(prefill_program):
            with compiling_together():
                for scratch, has_context in runs:
                    scratch.run(has_context=has_context)
        for scratch, has_context in runs:
            scratch.run(has_context=has_context)


class ScratchLayer:
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
            sinks = (
                torch.zeros(geometry.heads, dtype=geometry.sinks, device=device) if geometry.sinks else None
            )
            self.call = AttentionCall(
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
        with torch.no_grad(), PrefillBatch.build(self.cache, [name], [self.num_tokens]):
            attend(*self.call)
        self.cache.free(name)
