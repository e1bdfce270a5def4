"""Holds the tape's memory: chunks that never move, handed out by a bump pointer, shared by a pool's buckets.

`restart` sets the pointer back, so that the next bucket lies on top of the last one, as in a CUDA graph pool
[I9]. Pieces are handed out in chunk order and never backwards, so a smaller bucket with the same ops never
gets further than a larger one did.
"""

import torch
from torch import Tensor

_MIN_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 1 << 26
# Every 16 bit word of garbage is 0x7FFF: NaN in float16, bfloat16, float32, float64 and both float8 formats,
# a large odd number in the integers, out of range as an index.
_GARBAGE_WORD = 0x7FFF
# Number of chunks, and the position of the bump pointer: a chunk and an offset in it.
ArenaMark = tuple[int, int, int]


class Arena:
    """Owns bump-allocated memory on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # As torch's own allocators align, so that kernels choose the same paths.
        self._alignment = 64 if device.type == "cpu" else 512
        self._chunks: list[Tensor] = []
        self._chunk = self._offset = 0
        # (chunk, start, end) handed out since `begin`, one per chunk.
        self._spans: list[tuple[int, int, int]] = []

    @property
    def allocated_bytes(self) -> int:
        return sum(chunk.numel() for chunk in self._chunks)

    def begin(self) -> ArenaMark:
        """Begins a new owner's spans at the present position, which `rewind` returns to."""
        self._spans = []
        return len(self._chunks), self._chunk, self._offset

    def rewind(self, mark: ArenaMark) -> None:
        """Forgets what was handed out since `mark`, chunks added since included."""
        num_chunks, self._chunk, self._offset = mark
        del self._chunks[num_chunks:]
        self._spans = []

    def restart(self) -> None:
        self._chunk = self._offset = 0

    def clear(self) -> None:
        """Drops all chunks; memory goes when the last tensor in it does."""
        self._chunks = []
        self.restart()

    def allocate(self, num_bytes: int) -> Tensor:
        """Hands out uint8 [num_bytes], with a storage of its own that keeps its chunk alive.

        The storage identifies one recorded tensor's memory and bounds it: no view or resize reaches beyond.
        """
        size = -(-max(num_bytes, 1) // self._alignment) * self._alignment
        while self._chunk < len(self._chunks) and self._offset + size > self._chunks[self._chunk].numel():
            self._chunk, self._offset = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            # Few chunks, and little held that is not used.
            grown = min(max(self.allocated_bytes // 4, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
            self._chunks.append(torch.empty(max(size, grown), dtype=torch.uint8, device=self.device))
        start, self._offset = self._offset, self._offset + size
        is_next = bool(self._spans) and self._spans[-1][0] == self._chunk
        self._spans.append((self._chunk, self._spans.pop()[1] if is_next else start, self._offset))
        return torch.from_dlpack(self._chunks[self._chunk][start : start + num_bytes])

    def overwrite_with_garbage(self) -> None:
        for chunk in self._chunks:
            fill_with_garbage_(chunk[: chunk.numel() // 2 * 2].view(torch.int16))

    def spans(self) -> list[Tensor]:
        """Returns what was handed out since `begin`, alignment gaps included, as int16 words."""
        return [self._chunks[chunk][start:end].view(torch.int16) for chunk, start, end in self._spans]


def fill_with_garbage_(words: Tensor) -> None:
    """Fills int16 words with what floats read as NaN, and integers as large odd numbers."""
    words.fill_(_GARBAGE_WORD)
