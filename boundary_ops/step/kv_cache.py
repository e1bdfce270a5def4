"""Keeps K and V in pages: one pool of fixed-size blocks per layer, and the account of who holds which blocks.

Two counts are kept per request, and only these two:

* *room*: tokens that its blocks can hold for sure. `allocate` adds to it, all or nothing.
* *written*: tokens whose K and V are in the pools. It is the context length of the request's next step, and
  moves only when a step has succeeded: `PrefillBatch` sets it as its `with` block ends, `append` by hand.

So a step that raises has changed no count, and repeating it writes the same slots again.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from boundary_ops.backends.choice import choose
from boundary_ops.backends.library import AttentionLibrary, PoolSpec
from boundary_ops.errors import step as errors
from boundary_ops.step.decoder import find_decoder
from boundary_ops.whole_numbers import check_whole

__all__ = ["PagedKVCache", "RequestId"]

RequestId = Hashable

# Where a pool's storage keeps a weak reference to its cache: whatever view of the pool an op is given leads
# back to it, and a copy of the pool does not.
_OWNER = "paged_kv_cache"


@dataclass(slots=True, eq=False)
class CachedRequest:
    """Accounts for one request. Batches keep a reference, and see by `freed` that its blocks are gone."""

    request_id: RequestId
    blocks: list[int] = field(default_factory=list)
    room: int = 0
    written: int = 0
    freed: bool = False


class PagedKVCache:
    """Owns the K and V pools of all layers and hands out their blocks.

    Args:
        num_layers: attention layers of the model.
        num_blocks: blocks per layer; all layers share one block table.
        block_size: tokens per block.
        num_kv_heads: K/V heads per layer.
        head_dim: size of one head.
        dtype: a floating dtype, the one that the model's attention produces K and V in.
        device: where the pools live.
        attention_backend: what computes `piecewise::attn_inplace` for this cache.
            "auto": the Triton program on CUDA where triton is installed, else torch operators.
            "triton", "torch": that one, on every device that it has.
            "flashinfer": FlashInfer's paged prefill, on CUDA, where it is installed.
            Only "auto" chooses. A back end that is named and lacks something raises: here, or in the first
            call that asks for it.

    Attributes:
        k, v: one tensor per layer, [num_blocks, block_size, num_kv_heads, head_dim], owned by the cache and
            never re-allocated. Token `i` of a request lies at slot
            `blocks[i // block_size] * block_size + i % block_size`.
        pool_addresses: the addresses of all of them.
        library: what attends where `attention_backend` names a library, else None.

    Raises:
        BoundaryOpError: a size, the dtype or the back end is wrong, or the back end is not available here.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        attention_backend: str = "auto",
    ) -> None:
        sizes = dict(
            num_layers=num_layers, num_blocks=num_blocks, block_size=block_size,
            num_kv_heads=num_kv_heads, head_dim=head_dim,
        )  # fmt: skip
        num_layers, num_blocks, block_size, num_kv_heads, head_dim = (
            check_whole(size, errors.WrongPoolSize, argument=name) for name, size in sizes.items()
        )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise errors.WrongPoolDtype(got=repr(dtype))
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        # "cuda" becomes "cuda:0" on a tensor; comparisons need the tensor's spelling.
        self.device = torch.empty(0, device=device).device
        self.attention_backend = attention_backend
        # Before there are pools: a back end that cannot serve them costs no memory.
        self.library = self._choose_library()
        # Tensors made under inference mode could never be written outside it. Zeros, because a kernel may
        # read a whole block and mask the rows that nobody wrote: garbage there could be NaN, and 0 * NaN is
        # NaN.
        with torch.inference_mode(False):
            shape = (num_blocks, block_size, num_kv_heads, head_dim)
            self.k = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers))
            self.v = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers))
        self._claim_pools()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._requests: dict[RequestId, CachedRequest] = {}

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        num_tokens: int,
        block_size: int = 16,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        attention_backend: str = "auto",
    ) -> PagedKVCache:
        """Makes a cache that fits a transformers model, or the text decoder of one of images and text.

        `num_tokens` is what the cache holds, rounded up to whole blocks; since the last block of a request
        may be partly empty, add `block_size` for each request at a time. Dtype and device are the model's,
        unless given. The model is read, not changed, as `boundary_ops.huggingface.attach` reads it.

        Raises BoundaryOpError where the model cannot be attached, with the part that stands in the way.
        """
        call = f"PagedKVCache.for_model({type(model).__name__})"
        sizes = dict(find_decoder(model, call, among_others=True).sizes)
        sizes["dtype"] = dtype or sizes["dtype"] or model.dtype
        sizes["device"] = device or sizes["device"] or model.device
        size = check_whole(block_size, errors.WrongPoolSize, argument="block_size")
        num_blocks = -(-check_whole(num_tokens, errors.WrongPoolSize, argument="num_tokens") // size)
        return cls(num_blocks=num_blocks, block_size=size, attention_backend=attention_backend, **sizes)

    def __getstate__(self) -> dict[str, Any]:
        # A library's workspaces and plans, and the buffers of captured ops, are this cache's alone.
        own = ("library", "_step_buffers", "pool_addresses")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has pools of its own, and may have come to another place.
        self.__dict__.update(state)
        self.device = self.k[0].device
        self.library = self._choose_library()
        self._claim_pools()

    def _choose_library(self) -> AttentionLibrary | None:
        spec = PoolSpec(self.device, self.dtype, self.block_size, self.head_dim)
        return choose(self.attention_backend, spec)

    def _claim_pools(self) -> None:
        for pool in (*self.k, *self.v):
            setattr(pool.untyped_storage(), _OWNER, weakref.ref(self))
        self.pool_addresses = frozenset(pool.data_ptr() for pool in (*self.k, *self.v))
        # A tuple that is replaced, since another thread may be going through it.
        self._step_buffers: tuple[weakref.ref[Any], ...] = ()

    @staticmethod
    def owner_of(pool: torch.Tensor) -> PagedKVCache | None:
        """Returns the cache whose pool a tensor is, or is a view of; None for any other tensor."""
        reference: Any = getattr(pool.untyped_storage(), _OWNER, lambda: None)
        owner: PagedKVCache | None = reference()
        return owner

    def __repr__(self) -> str:
        return (
            f"PagedKVCache(num_layers={self.num_layers}, num_blocks={self.num_blocks}, "
            f"block_size={self.block_size}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"dtype={self.dtype}, device={self.device}, "
            f"attention_backend={self.attention_backend!r}, num_free_blocks={self.num_free_blocks})"
        )

    @property
    def num_free_blocks(self) -> int:
        """Returns the blocks per layer that no request holds."""
        return len(self._free)

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Returns the requests that hold room, oldest first."""
        return tuple(self._requests)

    def allocate(self, request_id: RequestId, num_tokens: int) -> None:
        """Gives a request, new or known, room for `num_tokens` more tokens.

        Raises CacheExhaustedError, with nothing changed, where too few blocks are free.
        """
        num_tokens = _check_count("allocate", request_id, num_tokens)
        request = self._requests.get(plain_id(request_id))
        self.reserve([plain_id(request_id)], [(request.room if request else 0) + num_tokens])

    def reserve(self, request_ids: Sequence[RequestId], rooms: Sequence[int]) -> None:
        """Makes sure that each request has room for so many tokens in all.

        Raises CacheExhaustedError, with nothing changed, where too few blocks are free for all of them.
        """
        needed = []
        for request_id, room in zip(request_ids, rooms, strict=True):
            request = self._requests.get(request_id)
            needed.append(max(0, -(-room // self.block_size) - (len(request.blocks) if request else 0)))
        if sum(needed) > len(self._free):
            raise errors.TooFewBlocks(
                requests=", ".join(map(repr, request_ids)), needed=sum(needed), block_size=self.block_size,
                free=len(self._free), num_blocks=self.num_blocks, holders=len(self._requests),
            )  # fmt: skip
        for request_id, room, count in zip(request_ids, rooms, needed, strict=True):
            request = self._requests.setdefault(request_id, CachedRequest(request_id))
            request.blocks.extend(self._free.pop() for _ in range(count))
            request.room = max(request.room, room)

    def append(self, request_id: RequestId, num_tokens: int) -> None:
        """Counts `num_tokens` more tokens as written, for ops that write the pools without a `PrefillBatch`.

        Raises NoRoom.
        """
        num_tokens = _check_count("append", request_id, num_tokens)
        request = self.find_request(request_id)
        if request.written + num_tokens > request.room:
            raise errors.NoRoom(request=request_id, room=request.room - request.written, got=str(num_tokens))
        request.written += num_tokens

    def truncate(self, request_id: RequestId, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` written tokens, so that a step can be run again."""
        request = self.find_request(request_id)
        written = request.written
        request.written = check_whole(
            num_tokens, errors.WrongTruncation, low=0, high=written, request=request_id, written=written
        )

    def free(self, request_id: RequestId) -> None:
        """Gives a request's blocks back, once; they are reused, last freed first."""
        request = self.find_request(request_id)
        del self._requests[request.request_id]
        request.freed = True
        self._free.extend(reversed(request.blocks))

    def context_len(self, request_id: RequestId) -> int:
        """Returns the tokens written so far: the context of the request's next step."""
        return self.find_request(request_id).written

    def room(self, request_id: RequestId) -> int:
        """Returns the tokens that the request has room for, written ones included."""
        return self.find_request(request_id).room

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        """Returns the request's blocks, in token order."""
        return tuple(self.find_request(request_id).blocks)

    def gather(self, layer: int, request_id: RequestId) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies the K and V that a request has written in a layer, [written, num_kv_heads, head_dim]."""
        at = check_whole(
            layer, errors.UnknownLayer, low=0, high=self.num_layers - 1, last=self.num_layers - 1
        )
        request = self.find_request(request_id)
        blocks = torch.tensor(request.blocks, dtype=torch.int64, device=self.device)
        k, v = (pool[blocks].flatten(0, 1)[: request.written].clone() for pool in (self.k[at], self.v[at]))
        return k, v

    def find_request(self, request_id: RequestId) -> CachedRequest:
        """Returns the account of a request that holds room; raises for any other id."""
        request = self._requests.get(plain_id(request_id))
        if request is None:
            raise errors.UnknownRequest(request=request_id)
        return request

    def has_request(self, request_id: RequestId) -> bool:
        """Whether a request of that id holds room now."""
        return plain_id(request_id) in self._requests

    def add_step_buffers(self, buffers: Any) -> None:
        """Packs each step that begins from now on for these buffers, as long as they live."""
        self._step_buffers = (*(ref for ref in self._step_buffers if ref()), weakref.ref(buffers))

    def prepare_step(self, batch: Any) -> None:
        """Packs a step that begins for all buffers of captured ops that its pools have."""
        for reference in self._step_buffers:
            if (buffers := reference()) is not None:
                buffers.prepare(batch)

    def owns_pool(self, pool: torch.Tensor) -> bool:
        """Whether a tensor is one of this cache's pools, told by its address."""
        return pool.data_ptr() in self.pool_addresses


def plain_id(request_id: RequestId) -> RequestId:
    """Returns an id, of a number in a tensor the number: two tensors are never one key."""
    return request_id.item() if isinstance(request_id, torch.Tensor) else request_id


def _check_count(method: str, request_id: RequestId, num_tokens: int) -> int:
    return check_whole(
        num_tokens, errors.WrongTokenCount, method=f"PagedKVCache.{method}", argument="argument 'num_tokens'",
        request=request_id,
    )  # fmt: skip
