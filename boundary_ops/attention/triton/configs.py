"""Chooses the attention program's block sizes from a layer's geometry: a table, right without measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from boundary_ops.backends.library import AttentionCall


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Describes how one program cuts its work.

    Attributes:
        block_m: rows of a tile, (token, head) pairs; a power of two, 16 or more.
        block_n: keys per step of the loop; a power of two, 16 or more.
        num_stages: K and V blocks in flight.
        split_diagonal: blocks that all rows see run in a loop of their own, without masks. One masked loop
            costs more arithmetic and saves the second loop's start, which counts for short sequences.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_diagonal: bool = True

    def tile_heads(self, group: int) -> int:
        """Returns the query heads of a tile, of the `group` that share a K/V head."""
        return min(group, self.block_m)

    def tile_tokens(self, group: int) -> int:
        return self.block_m // self.tile_heads(group)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Describes a layer's shapes and options: all that a program is compiled for, beside its block sizes.

    Attributes:
        device_index: CUDA device, -1 for CPU tensors.
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

    @classmethod
    def of(cls, call: AttentionCall) -> Geometry:
        """Returns the geometry of the layer that a call, whose arguments fit each other, belongs to."""
        (_, heads, head_dim), sinks = call.q.shape, None if call.sinks is None else call.sinks.dtype
        return cls(
            call.q.dtype, call.q.get_device(), heads, call.k.shape[1], head_dim, page=call.k_cache.shape[1],
            window=call.window > 0, softcap=call.softcap > 0.0, sinks=sinks, negate=call.scale < 0.0,
        )  # fmt: skip

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def programs_per_tile(self, config: BlockConfig) -> int:
        """Counts programs that share a tile's tokens: one per K/V head, more where a group exceeds it."""
        return self.kv_heads * -(-self.group // config.tile_heads(self.group))

    def constants(self, config: BlockConfig, *, has_context: bool, max_seqs: int) -> tuple[Any, ...]:
        """Returns the program's compile-time arguments, in the order of its parameters."""
        tokens = config.tile_tokens(self.group)
        return (
            self.group, self.kv_heads, self.head_dim, max(16, power_of_two(self.head_dim)), self.page,
            config.block_m, config.block_n, config.tile_heads(self.group), tokens, power_of_two(tokens),
            has_context, self.window, self.softcap, self.sinks is not None, self.negate,
            config.split_diagonal, max_seqs, power_of_two(max(max_seqs, 1)),
            "tf32x3" if self.dtype == torch.float32 else "ieee",
        )  # fmt: skip


def default_config(
    *, num_tokens: int, heads: int, kv_heads: int, head_dim: int, element_bytes: int, num_processors: int
) -> BlockConfig:
    """Returns the block sizes for a step of `num_tokens` tokens on a device of that many multiprocessors."""
    if element_bytes > 2:
        warps = 8 if head_dim <= 64 else 4
        return BlockConfig(64, 32, warps, 2) if head_dim <= 128 else BlockConfig(16, 32, 4, 2)
    group = heads // kv_heads
    # Two small tiles share a multiprocessor and hide each other's waits; large ones read K and V less often.
    # Small ones also keep more multiprocessors busy while there is less than one large tile for each.
    rows = num_tokens * min(group, 64) * kv_heads * -(-group // 64)
    if num_tokens * group <= 32:
        return BlockConfig(32 if num_tokens * group > 16 else 16, 64 if head_dim <= 128 else 32, 4, 2, False)
    is_short = rows <= 128 * num_processors
    if head_dim <= 64:
        return BlockConfig(64, 64, 4, 3, not is_short) if is_short else BlockConfig(128, 128, 8, 3)
    if head_dim <= 128:
        return BlockConfig(64, 64, 4, 3, False)  # the fastest from 256 to 4096 tokens, and within 3 % below
    return BlockConfig(64, 32, 8, 2) if is_short else BlockConfig(128, 64, 8, 2)


def fitted(config: BlockConfig, head_dim: int, element_bytes: int, shared_bytes: int) -> BlockConfig:
    """Returns `config`, made smaller until its shared memory fits: stages first, then keys, then rows."""
    row_bytes = max(16, power_of_two(head_dim)) * element_bytes
    while (config.block_m + 2 * config.num_stages * config.block_n) * row_bytes > shared_bytes:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        elif config.num_stages > 1:
            config = replace(config, num_stages=1)
        elif config.block_m > 16:
            config = replace(config, block_m=config.block_m // 2)
        else:
            break
    return config


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
