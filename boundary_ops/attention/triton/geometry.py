"""What a compiled attention program depends on: shapes and options of a layer, none of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from boundary_ops.attention.triton.configs import BlockConfig

__all__ = ["Geometry", "power_of_two"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """A layer as the program sees it; beside its block sizes, all that it is compiled for.

    Attributes:
        device_index: CUDA device, -1 for CPU tensors under triton's interpreter.
        page: tokens per block of the cache.
        window, softcap: whether there is one; the values are arguments.
        sinks: their dtype, or None.
        negate: the scale is negative. The program needs a positive one, so the queries take the sign.
    """

    dtype: torch.dtype
    device_index: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    window: bool = False
    softcap: bool = False
    sinks: torch.dtype | None = None
    negate: bool = False

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.heads // self.kv_heads

    def programs_per_tile(self, config: BlockConfig) -> int:
        """Programs that share a tile's tokens: one per K/V head, more where a tile has fewer rows than a
        group has heads."""
        return self.kv_heads * -(-self.group // config.tile_heads(self.group))

    def constants(self, config: BlockConfig, *, has_context: bool, max_seqs: int) -> tuple[Any, ...]:
        """The program's compile-time arguments, in the order of its parameters."""
        tokens = config.tile_tokens(self.group)
        return (
            self.group,
            self.kv_heads,
            self.head_dim,
            max(16, power_of_two(self.head_dim)),
            self.page,
            config.block_m,
            config.block_n,
            config.tile_heads(self.group),
            tokens,
            power_of_two(tokens),
            has_context,
            self.window,
            self.softcap,
            self.sinks is not None,
            self.negate,
            config.split_diagonal,
            max_seqs,
            power_of_two(max(max_seqs, 1)),
            "tf32x3" if self.dtype == torch.float32 else "ieee",
        )


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
