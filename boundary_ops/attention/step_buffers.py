"""Keeps a step's metadata at fixed addresses, where `piecewise::attn_captured` reads them.

    step = StepBuffers(pools, max_num_seqs=64, max_num_tokens=2048, max_seq_len=8192)
    capture attn_captured(q, k, v, out, k_cache, v_cache, **step.tensors, scale=...)   # writes nothing yet
    with batch:
        step.load()                                                  # one copy, on the current stream
        replay

Which rows are real, and how long sequences are, is read on the device; the launch depends on the row count
and on `max_num_seqs` alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from boundary_ops.attention.program import find_program
from boundary_ops.declare.boundary_op import StepMismatch
from boundary_ops.errors.attention import BackendNotCaptured, StepTooLarge, WrongStepLimit
from boundary_ops.errors.step import OtherCache
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache
from boundary_ops.whole_numbers import check_whole


class StepBuffers:
    """Is the `StepMetadata` of the attention ops: device tensors with room for a bounded step.

    Args:
        pools: the pools that the captured ops write, [num_blocks, block_size, kv_heads, head_dim], all of one
            `PagedKVCache`.
        max_num_seqs: sequences that a step may have. Each costs a captured op a program that finds nothing
            to do, so take what the scheduler really allows.
        max_num_tokens: new tokens that a step may have, the largest bucket.
        max_seq_len: context plus new tokens that one sequence may have.

    Attributes:
        cu_seqlens_q, seq_lens, block_tables, slot_mapping: as `CapturedCall` says; they belong to the
            buffers, never move, and hold a step of zero sequences at first.

    Raises:
        BoundaryOpError: a size or the pools are wrong, or their cache has named a back end without capture.
    """

    def __init__(
        self, pools: Sequence[torch.Tensor], *, max_num_seqs: int, max_num_tokens: int, max_seq_len: int
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
        wholes = (check_whole(size, WrongStepLimit, argument=name) for name, size in sizes.items())
        max_num_seqs, max_num_tokens, max_seq_len = wholes
        check_whole(len(pools), WrongStepLimit, argument="pools", expected="one or more")
        cache = _cache_of(pools[0])
        device, block_size = pools[0].device, pools[0].shape[1]
        self.max_num_seqs, self.max_num_tokens, self.max_seq_len = max_num_seqs, max_num_tokens, max_seq_len
        self.max_blocks = -(-max_seq_len // block_size)
        self._pool_addresses = frozenset(pool.data_ptr() for pool in pools)
        # Tables last: the copy ends with the rows of the sequences that there are.
        counts = max_num_seqs + 1, max_num_seqs, 2 * max_num_tokens, max_num_seqs * self.max_blocks
        self._spans = _spans(*counts)
        with torch.inference_mode(False):
            self._all = torch.zeros(self._spans[-1].stop, dtype=torch.int32, device=device)
            starts, lens, slots, tables = (self._all[span] for span in self._spans)
            self.slot_mapping = slots.view(torch.int64)
            self.cu_seqlens_q, self.seq_lens = starts, lens
            self.block_tables = tables.view(max_num_seqs, self.max_blocks)
        self._num_tables = 0
        if cache is not None:
            cache.add_step_buffers(self)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Returns the metadata by the names of the op's arguments."""
        names = ("slot_mapping", "cu_seqlens_q", "seq_lens", "block_tables")
        return {name: getattr(self, name) for name in names}

    def mismatch(self, num_tokens: int) -> StepMismatch | None:
        """Says why the current `PrefillBatch` cannot serve a call of so many tokens, or None."""
        batch = PrefillBatch.peek()
        if batch is None or batch.num_tokens != num_tokens or not self._is_of_the_cache(batch):
            return StepMismatch.OTHER_STEP
        return None if self._excess(batch) is None else StepMismatch.TOO_LARGE

    def load(self, batch: PrefillBatch | None = None) -> None:
        """Copies a step to the fixed addresses without waiting; None is the current one, which counts as run.

        A step of another cache or beyond a bound is refused, and nothing changes.
        """
        batch = PrefillBatch.current("piecewise::attn_captured") if batch is None else batch
        if not self._is_of_the_cache(batch):
            raise OtherCache("StepBuffers.load, argument 'batch'", expected="one of the pools' cache")
        if (excess := self._excess(batch)) is not None:
            raise StepTooLarge(**excess)
        count = batch.num_seqs
        # Rows that the last step had and this one has not are zeroed with the same copy.
        staged = batch.derived.get(self) if count >= self._num_tables else None
        if staged is None:
            staged = self._packed(batch, max(count, self._num_tables))
        self._all[: len(staged)].copy_(staged, non_blocking=True)
        self._num_tables = count

    def prepare(self, batch: PrefillBatch) -> None:
        """Packs what `load` will copy, on the host; for a step that begins, so that its call need not."""
        if self not in batch.derived and self._excess(batch) is None:
            batch.derived[self] = self._packed(batch, batch.num_seqs)

    def _packed(self, batch: PrefillBatch, num_tables: int) -> torch.Tensor:
        """Packs metadata with so many tables as on the device: int32 on the host, pinned for CUDA."""
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

    def _excess(self, batch: PrefillBatch) -> dict[str, Any] | None:
        """Returns what the batch has more of than there is room for, as a refusal names it, or None."""
        for name, value, bound, limit in (
            ("num_seqs", batch.num_seqs, "max_num_seqs", self.max_num_seqs),
            ("num_tokens", batch.num_tokens, "max_num_tokens", self.max_num_tokens),
            ("max_seqlen_k", batch.max_seqlen_k, "max_seq_len", self.max_seq_len),
        ):
            if value > limit:
                return {"name": name, "got": str(value), "bound": bound, "limit": limit}
        return None

    def _is_of_the_cache(self, batch: PrefillBatch) -> bool:
        return self._pool_addresses <= batch.cache.pool_addresses


def _cache_of(pool: torch.Tensor) -> PagedKVCache | None:
    """Finds the cache of a pool, if it has one; raises where its back end is none that is captured."""
    cache = PagedKVCache.owner_of(pool)
    is_program = cache is not None and cache.device.type == "cuda" and find_program() is not None
    if cache and (cache.library is not None or (cache.attention_backend == "torch" and is_program)):
        raise BackendNotCaptured(name=cache.attention_backend, served="triton" if is_program else "torch")
    return cache


def _spans(*counts: int) -> list[slice]:
    """Returns places of so many int32 each, one after the other, that begin at multiples of 16 bytes."""
    spans, begin = [], 0
    for count in counts:
        spans.append(slice(begin, begin + count))
        begin += -(-count // 4) * 4
    return spans
