"""A step's metadata at fixed addresses: what `piecewise::attn_captured` reads.

    step = StepBuffers(pools, max_num_seqs=64, max_num_tokens=2048, max_seq_len=8192)
    capture attn_captured(q, k, v, out, k_cache, v_cache, **step.tensors, scale=...)   # writes nothing yet
    with batch:
        step.load()                                                  # one copy, on the current stream
        replay

Which rows are real, and how long sequences are, is read on the device; the launch depends on the row count
and on `max_num_seqs` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from boundary_ops.attention.on_cuda import cuda_module
from boundary_ops.declare.captured_form import Misfit
from boundary_ops.declare.whole_numbers import whole_number
from boundary_ops.errors import BoundaryOpError
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache

__all__ = ["StepBuffers"]


class StepBuffers:
    """Device metadata with room for a bounded step; see `boundary_ops.declare.captured_form.StepMetadata`.

    Args:
        pools: the pools that the captured ops write, [num_blocks, block_size, kv_heads, head_dim], all of one
            `PagedKVCache`.
        max_num_seqs: sequences that a step may have. Each costs a captured op a program that finds nothing
            to do, so take what the scheduler really allows.
        max_num_tokens: new tokens that a step may have, the largest bucket.
        max_seq_len: context plus new tokens that one sequence may have.

    Attributes:
        cu_seqlens_q: int32 [max_num_seqs + 1]; entries beyond the step's sequences repeat its token count.
        seq_lens: int32 [max_num_seqs].
        block_tables: int32 [max_num_seqs, max_blocks].
        slot_mapping: int64 [max_num_tokens].

    All four belong to the buffers, never move, and hold a step of zero sequences at first.

    Raises:
        BoundaryOpError: a size is not a positive int, there is no pool, or their cache has named a back
            end that cannot be captured.
    """

    def __init__(
        self, pools: Sequence[torch.Tensor], *, max_num_seqs: int, max_num_tokens: int, max_seq_len: int
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
        for name, size in {**sizes, "pools": len(pools)}.items():
            number = whole_number(size)
            if number is None or number < 1:
                raise BoundaryOpError(
                    f"StepBuffers, argument '{name}'",
                    expected="one or more" if name == "pools" else "a positive int",
                    got=repr(size),
                    rule="a captured step is bounded when it is captured",
                    fix="take the bounds from the scheduler's limits, and the pools from the cache",
                )
        _check_backend(pools[0])
        device, block_size = pools[0].device, pools[0].shape[1]
        max_num_seqs, max_num_tokens, max_seq_len = map(int, sizes.values())
        self.max_num_seqs, self.max_num_tokens, self.max_seq_len = max_num_seqs, max_num_tokens, max_seq_len
        self.max_blocks = -(-max_seq_len // block_size)
        self._pool_addresses = frozenset(pool.data_ptr() for pool in pools)
        # Tables last: the copy ends with the rows of the sequences that there are.
        self._spans = _spans(
            max_num_seqs + 1, max_num_seqs, 2 * max_num_tokens, max_num_seqs * self.max_blocks
        )
        with torch.inference_mode(False):
            self._all = torch.zeros(self._spans[-1].stop, dtype=torch.int32, device=device)
            starts, lens, slots, tables = (self._all[span] for span in self._spans)
            self.slot_mapping = slots.view(torch.int64)
            self.cu_seqlens_q, self.seq_lens = starts, lens
            self.block_tables = tables.view(max_num_seqs, self.max_blocks)
        self._num_tables = 0
        cache = PagedKVCache.owner_of(pools[0])
        if cache is not None:
            cache.add_step_buffers(self)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The metadata by the names of the op's arguments."""
        names = ("slot_mapping", "cu_seqlens_q", "seq_lens", "block_tables")
        return {name: getattr(self, name) for name in names}

    def misfit(self, num_tokens: int) -> Misfit | None:
        """Why the current `PrefillBatch` cannot be loaded for a call of so many tokens, or None."""
        batch = PrefillBatch.peek()
        if batch is None or batch.num_tokens != num_tokens or not self._is_of_the_cache(batch):
            return Misfit.OTHER_STEP
        return None if self._fits(batch) else Misfit.TOO_LARGE

    def load(self, batch: PrefillBatch | None = None) -> None:
        """Copies a step's metadata to the fixed addresses: one copy on the current stream, not waited for.

        Args:
            batch: the step; None for the current one, which then counts as run.

        Raises:
            BoundaryOpError: no batch is running, or it belongs to another cache or exceeds a bound; nothing
                has changed.
        """
        batch = PrefillBatch.current("piecewise::attn_captured") if batch is None else batch
        self._check(batch)
        count = batch.num_seqs
        # Rows that the last step had and this one has not are zeroed with the same copy.
        staged = batch.derived.get(self) if count >= self._num_tables else None
        if staged is None:
            staged = self._packed(batch, max(count, self._num_tables))
        self._all[: len(staged)].copy_(staged, non_blocking=True)
        self._num_tables = count

    def prepare(self, batch: PrefillBatch) -> None:
        """Packs what `load` will copy, on the host; for a step that begins, so that its call need not."""
        if self not in batch.derived and self._fits(batch):
            batch.derived[self] = self._packed(batch, batch.num_seqs)

    def _packed(self, batch: PrefillBatch, num_tables: int) -> torch.Tensor:
        """int32 on the host, pinned for a CUDA device: the metadata as it lies there, with so many tables."""
        end = self._spans[-1].start + num_tables * self.max_blocks
        # torch keeps pinned memory from being used again before copies of it have run.
        staged = torch.empty(end, dtype=torch.int32, pin_memory=self._all.device.type == "cuda")
        values, host, count = staged.numpy(), batch.host, batch.num_seqs
        starts, lens, slots, tables = (values[span] for span in self._spans)
        values[:] = 0
        starts[: count + 1] = host.cu_seqlens_q
        starts[count + 1 :] = batch.num_tokens
        lens[:count] = host.seq_lens
        tables.reshape(num_tables, self.max_blocks)[:count, : host.block_tables.shape[1]] = host.block_tables
        slots.view(np.int64)[: batch.num_tokens] = host.slot_mapping
        return staged

    def clear(self) -> None:
        """Goes back to a step of zero sequences, for which the op writes nothing."""
        self._all.zero_()
        self._num_tables = 0

    def _fits(self, batch: PrefillBatch) -> bool:
        return all(value <= limit for _, value, _, limit in self._bounds(batch))

    def _bounds(self, batch: PrefillBatch) -> tuple[tuple[str, int, str, int], ...]:
        """What the batch has of each thing, and what there is room for, with their names."""
        return (
            ("num_seqs", batch.num_seqs, "max_num_seqs", self.max_num_seqs),
            ("num_tokens", batch.num_tokens, "max_num_tokens", self.max_num_tokens),
            ("max_seqlen_k", batch.max_seqlen_k, "max_seq_len", self.max_seq_len),
        )

    def _is_of_the_cache(self, batch: PrefillBatch) -> bool:
        return self._pool_addresses <= batch.cache.pool_addresses

    def _check(self, batch: PrefillBatch) -> None:
        if not self._is_of_the_cache(batch):
            raise BoundaryOpError(
                "StepBuffers.load, argument 'batch'",
                expected="a batch of the cache whose pools the captured ops write",
                got="a batch of another cache",
                rule="captured ops write the pools that they were captured with",
                fix="build the batch with the same cache, or make new buffers and capture again",
            )
        for name, value, bound, limit in self._bounds(batch):
            if value > limit:
                raise BoundaryOpError(
                    f"StepBuffers.load, {name} of the batch",
                    expected=f"at most {limit}, the buffers' {bound}",
                    got=str(value),
                    rule="a captured step is bounded when it is captured",
                    fix=f"run this step eagerly, or capture with a larger {bound}",
                )


def _check_backend(pool: torch.Tensor) -> None:
    """Raises where the captured op is another program than the one that the pool's cache has named."""
    cache = PagedKVCache.owner_of(pool)
    if cache is None:
        return
    is_triton = cache.device.type == "cuda" and cuda_module() is not None
    if cache.library is not None or (cache.attention_backend == "torch" and is_triton):
        raise BoundaryOpError(
            f"StepBuffers, argument 'pools', attention_backend='{cache.attention_backend}'",
            expected="pools of a cache with attention_backend 'auto' or 'triton'"
            if is_triton
            else "pools of a cache with attention_backend 'auto' or 'torch'",
            got=repr(cache.attention_backend),
            rule="a captured op is the Triton program or torch operators; no other back end steps in",
            fix="make the cache with that, or keep the op between the graphs: boundary='eager'",
        )


def _spans(*counts: int) -> list[slice]:
    """Places of so many int32 each, one after the other; each begins at 16 bytes, as programs assume."""
    spans, begin = [], 0
    for count in counts:
        spans.append(slice(begin, begin + count))
        begin += -(-count // 4) * 4
    return spans
