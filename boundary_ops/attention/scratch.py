"""Makes a layer of some geometry, and steps through it, on memory of its own: what warm-ups run on."""

import torch

from boundary_ops.attention.triton.configs import Geometry
from boundary_ops.backends.library import AttentionCall
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache


class ScratchLayer:
    """Owns the arguments of a call of some geometry, and a cache for steps of one sequence."""

    def __init__(self, geometry: Geometry, num_tokens: int) -> None:
        self.num_tokens, is_cpu = num_tokens, geometry.device_index < 0
        device = torch.device("cpu") if is_cpu else torch.device("cuda", geometry.device_index)
        self.cache = PagedKVCache(
            num_layers=1, num_blocks=-(-2 * num_tokens // geometry.page), block_size=geometry.page,
            num_kv_heads=geometry.kv_heads, head_dim=geometry.head_dim, dtype=geometry.dtype, device=device,
        )  # fmt: skip

        def rows(heads: int) -> torch.Tensor:
            # A generator of its own: warming up draws no numbers from the model's.
            generator = torch.Generator(device).manual_seed(0)
            shape = (num_tokens, heads, geometry.head_dim)
            drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return drawn.to(geometry.dtype)

        with torch.inference_mode(False):
            q, k, v = rows(geometry.heads), rows(geometry.kv_heads), rows(geometry.kv_heads)
            has_sinks = geometry.sinks is not None
            sinks = torch.zeros(geometry.heads, dtype=geometry.sinks, device=device) if has_sinks else None
            self.call = AttentionCall(
                q, k, v, torch.empty_like(q), self.cache.k[0], self.cache.v[0],
                (-1 if geometry.negate else 1) * geometry.head_dim**-0.5,
                num_tokens if geometry.window else 0, 1.0 if geometry.softcap else 0.0, sinks,
            )  # fmt: skip

    def new_step(self, *, has_context: bool = False) -> PrefillBatch:
        """Returns a step that is the first or the second half of a new sequence; the last one is freed."""
        for former in self.cache.request_ids:
            self.cache.free(former)
        if has_context:
            self.cache.allocate("sequence", self.num_tokens)
            self.cache.append("sequence", self.num_tokens)
        return PrefillBatch.build(self.cache, ["sequence"], [self.num_tokens])
