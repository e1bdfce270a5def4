"""A step's metadata at fixed addresses, so that `piecewise::attn_inplace` can be captured.

    step = StepBuffers(cache, max_num_seqs=64, max_num_tokens=2048, max_seq_len=8192)
    with step: capture the model at a bucket's size         # zero sequences: nothing is written
    with batch:
        step.load(PrefillBatch.current())                   # one copy, enqueued on the current stream
        replay

Inside `with step:` the op takes padded rows. Its grid depends on the row count and on `max_num_seqs` alone,
and lengths are read on the device; a row beyond the loaded step is neither read nor written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar, Token

import numpy as np
import torch

from boundary_ops.batch import PrefillBatch
from boundary_ops.errors import BoundaryOpError
from boundary_ops.kv_cache import PagedKVCache

__all__ = ["StepBuffers", "without_step_buffers"]

_current: ContextVar[StepBuffers | None] = ContextVar("boundary_ops_step_buffers", default=None)


class StepBuffers:
    """Device metadata with room for a bounded step; a context manager that makes the op read it.

    Args:
        cache: the cache whose pools the captured ops write.
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
        BoundaryOpError: a size is not a positive int.
    """

    def __init__(
        self, cache: PagedKVCache, *, max_num_seqs: int, max_num_tokens: int, max_seq_len: int
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise BoundaryOpError(
                    f"StepBuffers, argument '{name}'",
                    expected="a positive int",
                    got=repr(size),
                    rule="a captured step is bounded when it is captured",
                    fix="take the bounds from the scheduler's limits",
                )
        self.cache, self.max_num_seqs, self.max_num_tokens = cache, max_num_seqs, max_num_tokens
        self.max_seq_len, self.max_blocks = max_seq_len, -(-max_seq_len // cache.block_size)
        self._spans = _spans(
            2 * max_num_tokens, max_num_seqs + 1, max_num_seqs, max_num_seqs * self.max_blocks
        )
        with torch.inference_mode(False):
            self._all = torch.zeros(self._spans[-1].stop, dtype=torch.int32, device=cache.device)
            slots, starts, lens, tables = (self._all[span] for span in self._spans)
            self.slot_mapping = slots.view(torch.int64)
            self.cu_seqlens_q, self.seq_lens = starts, lens
            self.block_tables = tables.view(max_num_seqs, self.max_blocks)
        self._token: Token[StepBuffers | None] | None = None

    def load(self, batch: PrefillBatch) -> None:
        """Copies a step's metadata to the fixed addresses: one copy on the current stream, not waited for.

        Raises:
            BoundaryOpError: the batch belongs to another cache or exceeds a bound; nothing has changed.
        """
        self._check(batch)
        staged = torch.empty(self._all.shape, dtype=torch.int32, pin_memory=self._all.device.type == "cuda")
        values = staged.numpy()
        slots, starts, lens, tables = (values[span] for span in self._spans)
        values[:] = 0
        host, count = batch.host, batch.num_seqs
        starts[: count + 1] = host.cu_seqlens_q
        starts[count + 1 :] = batch.num_tokens
        lens[:count] = host.seq_lens
        tables.reshape(self.max_num_seqs, self.max_blocks)[:count, : host.block_tables.shape[1]] = (
            host.block_tables
        )
        slots.view(np.int64)[: batch.num_tokens] = host.slot_mapping
        self._all.copy_(staged, non_blocking=True)

    def clear(self) -> None:
        """Goes back to a step of zero sequences, for which the op writes nothing."""
        self._all.zero_()

    @staticmethod
    def current() -> StepBuffers | None:
        """The buffers whose `with` block is running here, or None."""
        return _current.get()

    def __enter__(self) -> StepBuffers:
        assert self._token is None, "`with step:` is not entered twice"
        self._token = _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._token is not None
        _current.reset(self._token)
        self._token = None

    def _check(self, batch: PrefillBatch) -> None:
        if batch.cache is not self.cache:
            raise BoundaryOpError(
                "StepBuffers.load, argument 'batch'",
                expected="a batch of the cache that the buffers were made for",
                got="a batch of another cache",
                rule="captured ops write the pools that they were captured with",
                fix="build the batch with the same cache, or make new buffers and capture again",
            )
        bounds = (
            ("num_seqs", batch.num_seqs, "max_num_seqs", self.max_num_seqs),
            ("num_tokens", batch.num_tokens, "max_num_tokens", self.max_num_tokens),
            ("max_seqlen_k", batch.max_seqlen_k, "max_seq_len", self.max_seq_len),
        )
        for name, value, bound, limit in bounds:
            if value > limit:
                raise BoundaryOpError(
                    f"StepBuffers.load, {name} of the batch",
                    expected=f"at most {limit}, the buffers' {bound}",
                    got=str(value),
                    rule="a captured step is bounded when it is captured",
                    fix=f"run this step eagerly, or capture with a larger {bound}",
                )


@contextlib.contextmanager
def without_step_buffers() -> Iterator[None]:
    """In this block the op reads the current `PrefillBatch` again, whatever runs around it."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def _spans(*counts: int) -> list[slice]:
    """Places of so many int32 each, one after the other; each begins at 16 bytes, as programs assume."""
    spans, begin = [], 0
    for count in counts:
        spans.append(slice(begin, begin + count))
        begin += -(-count // 4) * 4
    return spans
