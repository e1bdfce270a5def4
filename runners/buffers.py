"""Holds static buffers: memory at fixed addresses that graphs read their inputs from.

One storage per value serves all buckets: the largest, captured first, decides its size; smaller ones use its
beginning.
"""

import math
from collections.abc import Hashable, Sequence

import torch

from runners.rows import is_dense


class StaticBuffers:
    """Owns the static buffers of one graphed module; dropping all references to it frees them."""

    def __init__(self) -> None:
        self._storages: dict[Hashable, torch.Tensor] = {}

    @property
    def allocated_bytes(self) -> int:
        return sum(storage.numel() for storage in self._storages.values())

    def tensor(
        self, key: Hashable, sizes: Sequence[int], strides: Sequence[int],
        dtype: torch.dtype, device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        """Makes a tensor of this geometry at the beginning of the buffer `key`.

        Strides with holes or overlaps become contiguous ones. A buffer that is too small is replaced by a
        zeroed one; graphs that read the old one keep it alive and stay right.
        """
        numel = math.prod(sizes)
        num_bytes = max(numel, 1) * dtype.itemsize
        storage = self._storages.get(key)
        # Memory made under inference_mode could never be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if storage is None or storage.numel() < num_bytes:
                storage = self._storages[key] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            flat = storage[:num_bytes].view(dtype)
            is_kept = is_dense(sizes, strides)
            return flat.as_strided(sizes, strides) if is_kept else flat[:numel].view(tuple(sizes))
