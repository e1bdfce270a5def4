"""Static buffers: memory at a fixed address that graphs read their inputs from.

One storage per value for all buckets: the largest bucket, which is captured first, decides its size, and
the smaller ones look at its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

from runners.rows import is_dense


class StaticBuffers:
    """The static buffers of one graphed module; dropping all references to it frees them."""

    def __init__(self) -> None:
        self._storages: dict[Hashable, torch.Tensor] = {}

    @property
    def allocated_bytes(self) -> int:
        return sum(storage.numel() for storage in self._storages.values())

    def tensor(
        self,
        key: Hashable,
        sizes: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """A tensor of the given geometry at the beginning of the buffer `key`, zeroed.

        Strides with holes or overlaps become contiguous ones. A buffer that is too small is replaced;
        graphs that read the old one keep it alive and stay right.
        """
        sizes = tuple(sizes)
        numel = math.prod(sizes)
        num_bytes = max(numel, 1) * dtype.itemsize
        storage = self._storages.get(key)
        # Memory made under inference_mode could never be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if storage is None or storage.numel() < num_bytes:
                storage = self._storages[key] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            flat = storage[:num_bytes].view(dtype)
            return (
                flat.as_strided(sizes, tuple(strides))
                if is_dense(sizes, strides)
                else flat[:numel].view(sizes)
            )
