"""Block sizes of the attention program, from shapes alone: a table, right without any measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["BlockConfig", "default_config", "fitted"]


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """How one program cuts its work.

    Attributes:
        block_m: rows of a tile, (token, head) pairs; a power of two, 16 or more.
        block_n: keys per step of the loop; a power of two, 16 or more.
        num_warps: warps of a program.
        num_stages: K and V blocks in flight.
        split_diagonal: blocks that are visible to all rows run in a loop of their own, without masks. One
            masked loop costs more arithmetic and saves the second loop's start, which counts where
            sequences are short.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_diagonal: bool = True

    def tile_heads(self, group: int) -> int:
        """Query heads of a tile, of the `group` that share a K/V head."""
        return min(group, self.block_m)

    def tile_tokens(self, group: int) -> int:
        """Tokens of a tile."""
        return self.block_m // self.tile_heads(group)


def default_config(
    *, num_tokens: int, heads: int, kv_heads: int, head_dim: int, element_bytes: int, num_processors: int
) -> BlockConfig:
    """The block sizes for a step of `num_tokens` new tokens on a device of that many multiprocessors."""
    if element_bytes > 2:
        return (
            BlockConfig(64, 32, 8 if head_dim <= 64 else 4, 2)
            if head_dim <= 128
            else BlockConfig(16, 32, 4, 2)
        )
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
    """`config`, made smaller until its shared memory fits: stages first, then keys, then rows."""
    row_bytes = max(16, 1 << (head_dim - 1).bit_length()) * element_bytes
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
