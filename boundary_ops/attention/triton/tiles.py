"""Lists a step's tiles as the attention program reads them: once per `PrefillBatch`, on the host.

The tiles of one size are the same for all layers, so they are kept with the batch and sent to the device by
one copy that nobody waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from boundary_ops.step.batch import PrefillBatch, send_to_device

# One record: sequence, its first row, the tile's first token in it, new tokens, context tokens, three unused.
RECORD = 8


@dataclass(frozen=True, slots=True)
class StepTiles:
    """Holds a step's tiles of one size on the device, and where a launch finds the step.

    Attributes:
        records: int32 [num_tiles, 8], heaviest tile first.
        has_context: whether any sequence has tokens in the pages.
        addresses: of the batch's slot mapping, the records, the batch's lengths and its block tables, all of
            which the batch keeps.
        address_bits: all four or-ed together, whose low bits tell the alignment.
        table_stride: elements from one sequence's block table to the next.
    """

    records: torch.Tensor
    num_tiles: int
    has_context: bool
    addresses: tuple[int, int, int, int]
    address_bits: int
    table_stride: int


def tile_records(
    query_lens: Sequence[int], context_lens: Sequence[int], tile_tokens: int, window: int = 0
) -> np.ndarray:
    """Returns all tiles' records, int32 [num_tiles, 8], longest first, so that long programs start early."""
    parts, row = [], 0
    for sequence, (new, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        first = np.arange(0, new, tile_tokens, dtype=np.int32)
        part = np.zeros((len(first), RECORD), dtype=np.int32)
        part[:, 0], part[:, 1], part[:, 2], part[:, 3], part[:, 4] = sequence, row, first, new, context
        parts.append(part)
        row += new
    records = np.concatenate(parts) if parts else np.zeros((0, RECORD), dtype=np.int32)
    keys = np.minimum(records[:, 2] + tile_tokens, records[:, 3]) + records[:, 4]
    if window:
        keys = np.minimum(keys, window + tile_tokens)
    return records[np.argsort(-keys, kind="stable")]


def tiles_of(batch: PrefillBatch, tile_tokens: int, window: int, stream: int) -> StepTiles:
    """Returns the batch's tiles of that size, made on first use and shared by the layers.

    The copy to the device is ordered on `stream`, so another stream gets a copy of its own.
    """
    key = ("tiles", tile_tokens, window, stream)
    found: StepTiles | None = batch.derived.get(key)
    if found is None:
        records = tile_records(batch.query_lens, batch.context_lens, tile_tokens, window)
        (on_device,) = send_to_device([records], batch.cache.device)
        tensors = (batch.slot_mapping, on_device, batch.seq_lens, batch.block_tables)
        slots, tiles, lens, tables = (tensor.data_ptr() for tensor in tensors)
        found = batch.derived[key] = StepTiles(
            on_device, len(records), any(batch.context_lens), (slots, tiles, lens, tables),
            slots | tiles | lens | tables, batch.block_tables.stride(0),
        )  # fmt: skip
    return found
