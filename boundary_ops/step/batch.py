"""Holds the metadata of a prefill step: its sequences, their new tokens, and where their K and V go.

Sequences of different lengths are packed into one row of tokens, without padding:

    request     a        b           c
    tokens      a5 a6    b0 b1 b2    c9        context: a has 5 tokens in the cache, b none, c nine
    positions   5  6     0  1  2     9
    cu_seqlens_q  0, 2, 5, 6         seq_lens  7, 3, 10 (context + new)

Boundary ops read the step that is running with `PrefillBatch.current()`. It is never an argument of the
model, so it never becomes an input of a graph, and it may change its shape at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch

from boundary_ops.backends.library import HostMetadata
from boundary_ops.errors import step as errors
from boundary_ops.step.kv_cache import CachedRequest, PagedKVCache, RequestId, plain_id
from boundary_ops.whole_numbers import check_whole, listed

__all__ = ["PrefillBatch", "send_to_device"]


@dataclass(slots=True, eq=False)
class _Entry:
    """Marks a `with batch:` block that is running, and the one around it."""

    batch: PrefillBatch
    outer: _Entry | None
    was_read: bool = False


_entry: ContextVar[_Entry | None] = ContextVar("boundary_ops_batch", default=None)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PrefillBatch:
    """Holds one step's metadata, frozen when it is built; a context manager that makes it the current one.

    Leaving the block without an exception counts the step's tokens as written, if an op has read the batch
    in it (`current()`). So a capture inside the block, or a model call that raised, moves nothing. Entering
    the same batch again runs the same step again: the same slots, the same context.

    All tensors live on the cache's device and belong to the batch.

    Attributes:
        cu_seqlens_q: int32 [B + 1], where each sequence's new tokens begin; the last entry is `num_tokens`.
        seq_lens: int32 [B], context plus new tokens.
        block_tables: int32 [B, max_blocks], each sequence's blocks; filled with 0, a valid block that is not
            to be read.
        slot_mapping: int64 [num_tokens], the slot in the pools that each new token's K and V go to.
        positions: int64 [1, num_tokens], each new token's position in its sequence, as a model's
            `position_ids`.
        max_seqlen_q, max_seqlen_k: the largest number of new tokens, and of context plus new tokens.
        num_tokens: new tokens in all.
        query_lens, context_lens: the same numbers on the host, one int per sequence.
        request_ids: one id per sequence.
        cache: the cache that the step was built for.
        host: the device tensors' values, for who needs them without waiting for the device.
        derived: what ops have worked out from the metadata by keys of their own, for the layers to share.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    num_tokens: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    request_ids: tuple[RequestId, ...]
    cache: PagedKVCache
    host: HostMetadata
    _requests: tuple[CachedRequest, ...]
    derived: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def build(
        cls, cache: PagedKVCache, request_ids: Sequence[RequestId], query_lens: Sequence[int]
    ) -> PrefillBatch:
        """Plans one step: context lengths come from the cache, and room that is missing is allocated.

        Building twice before running gives two equal batches. No request and no token is a valid, empty step.

        Args:
            cache: holds the requests' earlier tokens; a new id opens a request.
            request_ids: one per sequence, each once.
            query_lens: new tokens per sequence, one or more each.

        Raises:
            TooFewBlocks: no room for all of them; nothing has changed.
            BoundaryOpError: a length is wrong, an id comes twice, or the two lists differ in length.
        """
        ids = tuple(map(plain_id, listed(request_ids)))
        lens = _checked_lens(ids, listed(query_lens))
        contexts = tuple(cache.context_len(name) if cache.has_request(name) else 0 for name in ids)
        cache.reserve(ids, [context + new for context, new in zip(contexts, lens, strict=True)])
        requests = tuple(cache.find_request(name) for name in ids)
        size = cache.block_size
        context, new = np.array(contexts, dtype=np.int32), np.array(lens, dtype=np.int32)
        totals = context + new
        blocks = [
            request.blocks[: -(-int(total) // size)] for request, total in zip(requests, totals, strict=True)
        ]
        tables = np.zeros((len(ids), max(map(len, blocks), default=0)), dtype=np.int32)
        for row, held in zip(tables, blocks, strict=True):
            row[: len(held)] = held
        starts = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
        # Each token's sequence, and from it its position and its slot.
        owner = np.repeat(np.arange(len(ids)), new)
        positions = np.arange(int(starts[-1]), dtype=np.int64) - (starts[:-1] - context)[owner]
        slots = tables[owner, positions // size].astype(np.int64) * size + positions % size
        sent = send_to_device((starts, totals, tables, slots, positions.reshape(1, -1)), cache.device)
        return cls(
            cu_seqlens_q=sent[0],
            seq_lens=sent[1],
            block_tables=sent[2],
            slot_mapping=sent[3],
            positions=sent[4],
            max_seqlen_q=max(lens, default=0),
            max_seqlen_k=int(totals.max(initial=0)),
            num_tokens=int(starts[-1]),
            query_lens=lens,
            context_lens=contexts,
            request_ids=ids,
            cache=cache,
            host=HostMetadata(starts, totals, tables, slots),
            _requests=requests,
        )

    def __repr__(self) -> str:
        return (
            f"PrefillBatch(request_ids={self.request_ids}, query_lens={self.query_lens}, "
            f"context_lens={self.context_lens})"
        )

    @property
    def num_seqs(self) -> int:
        """Returns the number of sequences in this step."""
        return len(self.request_ids)

    @property
    def last_token_indices(self) -> torch.Tensor:
        """Returns each sequence's last row, int64 [B], a new tensor; its logits give the next token."""
        return self.cu_seqlens_q[1:].to(torch.int64) - 1

    def pack(self, prompts: Sequence[Sequence[int] | torch.Tensor]) -> torch.Tensor:
        """Returns the step's token ids as a model's `input_ids`, int64 [1, num_tokens], a new tensor.

        `prompts` are lists or tensors ([q] or [1, q]) in the order of `request_ids`, on any device.
        """
        if len(prompts) != self.num_seqs:
            expected = f"{self.num_seqs} prompts, one per request {self.request_ids}"
            what = "PrefillBatch.pack, argument 'prompts'"
            raise errors.WrongPrompts(what, expected=expected, got=str(len(prompts)))
        rows = [torch.empty(0, dtype=torch.int64, device=self.cache.device)]
        for request, length, prompt in zip(self.request_ids, self.query_lens, prompts, strict=True):
            what, row = f"PrefillBatch.pack, prompt of request {request!r}", torch.as_tensor(prompt)
            if row.numel() and (row.is_floating_point() or row.is_complex() or row.dtype is torch.bool):
                raise errors.NotTokenIds(what, dtype=row.dtype)
            row = row[0] if row.dim() == 2 and row.shape[0] == 1 else row
            if row.shape != (length,):
                expected = f"{length} token ids, [{length}]"
                raise errors.WrongPrompts(what, expected=expected, got=f"shape {list(row.shape)}")
            rows.append(row.to(self.cache.device, torch.int64))
        return torch.cat(rows).unsqueeze(0)

    @staticmethod
    def current(op: str | None = None) -> PrefillBatch:
        """Returns the batch whose `with` block is running in this thread or task, for the boundary op `op`.

        Raises:
            NoRunningBatch: no block is running here.
        """
        entry = _entry.get()
        if entry is None:
            raise errors.NoRunningBatch(f"op '{op}'" if op else "PrefillBatch.current")
        entry.was_read = True
        return entry.batch

    @staticmethod
    def peek() -> PrefillBatch | None:
        """Returns the current batch, or None; unlike `current()`, this does not count as running the step."""
        entry = _entry.get()
        return entry.batch if entry is not None else None

    def __enter__(self) -> PrefillBatch:
        for request, context in zip(self._requests, self.context_lens, strict=True):
            if request.freed or request.written < context:
                got = "a freed request" if request.freed else f"{request.written} tokens written"
                raise errors.StaleBatch(request=request.request_id, context=context, got=got)
        self.cache.prepare_step(self)
        _entry.set(_Entry(self, _entry.get()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = _entry.get()
        assert entry is not None and entry.batch is self, "`with batch:` blocks ended out of order"
        _entry.set(entry.outer)
        if kind is not None or not entry.was_read:
            return
        for request, context, new in zip(self._requests, self.context_lens, self.query_lens, strict=True):
            # Set, not added to: a step that is repeated leaves the same count, and one that is repeated after
            # later steps makes those steps' tokens void, as they followed what has just been overwritten.
            request.written = context + new


def send_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies arrays to the device, each to a storage of its own, without waiting."""
    # Outside inference mode, so that the tensors can be used in and out of it.
    with torch.inference_mode(False):
        tensors = [torch.from_numpy(array) for array in arrays]
        if device.type == "cpu":
            return [tensor.clone() for tensor in tensors]
        # Pinned, so that a copy is only enqueued. torch keeps the memory until the copy has run.
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]


def _checked_lens(ids: tuple[RequestId, ...], lens: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns the query lengths as ints, of a step that these requests can make."""
    if len(ids) != len(lens):
        raise errors.LengthsDiffer(num_ids=len(ids), num_lens=len(lens))
    checked = tuple(
        check_whole(
            new, errors.WrongTokenCount, method="PrefillBatch.build", argument="query length", request=name
        )
        for name, new in zip(ids, lens, strict=True)
    )
    if len(set(ids)) != len(ids):
        raise errors.RepeatedRequest(request=next(name for at, name in enumerate(ids) if name in ids[:at]))
    return checked
