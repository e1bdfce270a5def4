"""Holds the memory of CUDA graphs: one private pool per graphed module, reused by every bucket [I9].

Memory that torch's allocator hands out during a capture belongs to the graph's private pool, and a block is
free for the next capture as soon as no tensor holds it. So callers are given *aliases*, tensors at the
output's address that own nothing, and the pool alone holds the owners: until `keep_only` says that nobody
reads an output any more, and for all others until the bucket ends. Graphs of one pool replay one after the
other, in the order of their capture, so reuse is safe.

cuBLAS keeps a workspace per stream. It is dropped before a bucket and after it, so that it is allocated
inside the bucket's first capture, from the pool: whoever drops torch's workspaces later (`torch.compile`
with CUDA graphs does) cannot take it away from our graphs, and the next bucket reuses it.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from runners import _torch
from runners.cuda.side_streams import CudaStreams
from runners.engine import GraphPool

# About 1e4 in float32 and bfloat16, and finite in the other float formats.
_GARBAGE_WORD = 0x461C


class AliasBook:
    """Holds the owners of one bucket's outputs, and their aliases; `is_ours` tells addresses of the pool."""

    def __init__(self, is_ours: Callable[[int], bool]) -> None:
        self._is_ours = is_ours
        # By address: the storage that owns it, and the one that callers see.
        self._owners: dict[int, torch.UntypedStorage] = {}
        self._aliases: dict[int, torch.UntypedStorage] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def aliased(self, value: Any) -> Any:
        """Replaces a tensor that owns memory of the pool by an alias; shared storages stay shared."""
        is_plain = type(value) is Tensor and value.layout is torch.strided
        if not is_plain or value.is_conj() or value.is_neg():
            return value
        storage = value.untyped_storage()
        address = storage.data_ptr()
        known = self._aliases.get(address)
        if known is not None and known._cdata == storage._cdata:
            return value
        if known is None:
            if address == 0 or not self._is_ours(address):
                return value
            self._owners[address] = storage
            self._aliases[address] = _torch.storage_at(address, storage.device, storage.nbytes())
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(self._aliases[address], value.storage_offset(), value.shape, value.stride())

    def keep_only(self, tensors: Iterable[Tensor]) -> None:
        """Frees all outputs but those whose memory one of `tensors` shares."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for address in [address for address in self._owners if address not in kept]:
            del self._owners[address], self._aliases[address]

    def clear(self) -> None:
        self._owners.clear()
        self._aliases.clear()


class CudaPool(GraphPool):
    """Owns the memory, capture stream and scratch generator that the graphs of one module share."""

    kind = "graph"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.index = device.index
        # In a cycle a pool would keep its generator's device memory until a collection.
        is_ours = WeakMethod(self._is_ours)
        self.book = AliasBook(lambda address: is_ours()(address))  # type: ignore[misc]
        with torch.cuda.device(device):
            # Freed blocks are reused on the stream of their allocation only, so one stream for all captures.
            self.stream = torch.cuda.Stream(device)
            torch.cuda.current_blas_handle()  # cuBLAS cannot start inside a capture
        self.streams = CudaStreams(device, self.stream)
        # A capture puts its generator into a mode in which other threads' draws fail; see `engine.capture`.
        self.scratch_generator = torch.Generator(device)
        self._handle: Any = None
        self._ranges: list[tuple[int, int]] = []
        self._is_open = False
        self._free_before: int | None = None
        self._device_bytes = 0
        self._last_stream = torch.cuda.current_stream(device)
        self._last_raw_stream = self._last_stream.cuda_stream

    @property
    def allocated_bytes(self) -> int:
        return sum(end - start for start, end in self._segments())

    @property
    def device_bytes(self) -> int:
        """From the first bucket's begin to the last one's end: pool, static buffers, the driver's share."""
        return self._device_bytes

    def begin_call(self) -> None:
        """Makes the caller's stream wait for the last one, where it is another."""
        raw = _torch.current_raw_stream(self.index)
        if raw != self._last_raw_stream:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._last_stream)
            self._last_stream, self._last_raw_stream = current, raw

    def begin_bucket(self) -> None:
        """Waits for the work of earlier calls, and notes the device's free memory once."""
        self.begin_call()
        if self._free_before is None:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self._free_before = self._free_bytes()

    def handle_for_capture(self) -> Any:
        """Returns the pool's handle; a new one where no graph is left, since such a handle is dead.

        The warm-ups' caches are emptied first: during a capture the allocator cannot free them to make room.
        """
        if not self._is_open:
            torch.cuda.synchronize(self.device)
            _torch.clear_cublas_workspaces()
            torch.cuda.empty_cache()
            self._is_open = True
        if self._handle is None or not self.num_live:
            self._handle = torch.cuda.graph_pool_handle()
            self._ranges = []
        return self._handle

    def keep_only(self, tensors: Iterable[Tensor]) -> None:
        self.book.keep_only(tensors)

    def end_bucket(self) -> None:
        self.check_usable("end a bucket of")
        self.begin_call()
        self.book.clear()
        _torch.clear_cublas_workspaces()
        if not self.num_live:
            self._handle = None
            torch.cuda.empty_cache()
        self._is_open = False
        self._measure()

    def overwrite_with_garbage(self) -> None:
        """Fills the pool with large finite floats, on the current stream."""
        self.begin_call()
        for start, end in self._segments():
            storage = _torch.storage_at(start, self.device, end - start)
            words = torch.empty(0, dtype=torch.int16, device=self.device)
            words.set_(storage, 0, ((end - start) // 2,), (1,)).fill_(_GARBAGE_WORD)

    def _give_back(self) -> None:
        self.book.clear()
        self._handle = None
        self._ranges = []
        torch.cuda.synchronize(self.device)
        _torch.clear_cublas_workspaces()
        torch.cuda.empty_cache()
        self._measure()

    def _free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def _measure(self) -> None:
        if self._free_before is not None:
            self._device_bytes = max(self._free_before - self._free_bytes(), 0)

    def _segments(self) -> list[tuple[int, int]]:
        if self._handle is None:
            return []
        # Of all pools: on torch 2.11 a snapshot of one pool alone corrupts the heap (a few hundred calls
        # after captures end the process).
        return [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self._handle) and segment["device"] == self.index
        ]

    def _is_ours(self, address: int) -> bool:
        def is_known() -> bool:
            return any(start <= address < end for start, end in self._ranges)

        if not is_known():
            self._ranges = self._segments()
        return is_known()
