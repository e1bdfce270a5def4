"""Times CUDA graphs that do the same, so that the faster one can be kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from runners.engine import CapturedGraph

_ROUNDS = 11


def median_us(graphs: Sequence[CapturedGraph], device: torch.device) -> list[float]:
    """Median microseconds of one replay of each graph on the current stream; waits for the device.

    The graphs take turns, in one order and then the other, so that a drift of the clocks meets all of them.
    Before each replay the second-level cache is overwritten: in a whole model, a segment's weights come from
    memory. That write also keeps the device busy until the host has issued the replay and both events.
    """
    with torch.cuda.device(device):
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        spoiler = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device)
        pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
        for turn in range(1 + _ROUNDS):
            numbered = list(zip(graphs, pairs, strict=True))
            for graph, noted in numbered if turn % 2 else numbered[::-1]:
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                spoiler.fill_(turn)
                began.record()
                graph.replay()
                ended.record()
                noted.append((began, ended))
        torch.cuda.synchronize(device)
        # The first replay of a graph uploads it.
        times = [[a.elapsed_time(b) * 1e3 for a, b in noted[1:]] for noted in pairs]
        del spoiler
        # While a bucket is captured, the allocator gives nothing back by itself.
        torch.cuda.empty_cache()
    return list(map(statistics.median, times))
