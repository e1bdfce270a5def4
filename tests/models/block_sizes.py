"""Block sizes of the attention program that are worth measuring, and how one is put in the table's place.

`docs/results/attention.py` measures them; tests check that they change speed alone.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from boundary_ops.attention.scratch import ScratchLayer
from boundary_ops.attention.triton.configs import BlockConfig, fitted
from boundary_ops.attention.triton.plans import device_limits
from boundary_ops.attention.triton.prefill import attend, plans
from boundary_ops.backends.library import AttentionCall


def candidates(head_dim: int, element_bytes: int) -> tuple[BlockConfig, ...]:
    """Block sizes worth measuring on a Hopper GPU; all of them fit its shared memory and registers."""
    if element_bytes > 2:
        return ()
    if head_dim <= 64:
        pairs = [(64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 3), (128, 128, 8, 3), (128, 64, 4, 3)]
    elif head_dim <= 128:
        pairs = [(32, 64, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2)]
        pairs += [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3)]
    else:
        pairs = [(64, 32, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2), (128, 64, 8, 2)]
    return tuple(BlockConfig(*pair, split) for pair in pairs for split in (True, False))


@contextlib.contextmanager
def block_sizes(config: BlockConfig) -> Iterator[None]:
    """A block in which the program runs with these block sizes, whatever the step's."""
    plans.by_key.clear()  # plans hold the block sizes that they were made with
    with mock.patch.object(plans, "config_for", lambda geometry, num_tokens: config):
        yield
    plans.by_key.clear()


def measure_block_sizes(
    num_tokens: int, call: AttentionCall, *, repeats: int = 5
) -> dict[BlockConfig, float]:
    """Measures block sizes for one new sequence in the shapes of a call.

    Args:
        call: looked at and not touched.
        repeats: measurements of each, of which the median counts.

    Returns:
        Microseconds of device time per block sizes, without those that do not fit.
    """
    geometry = plans.make(call).geometry
    _, shared_bytes = device_limits(geometry.device_index)
    sizes = (geometry.head_dim, geometry.dtype.itemsize)
    choices = [config for config in candidates(*sizes) if fitted(config, *sizes, shared_bytes) == config]
    layer = ScratchLayer(geometry, num_tokens)
    times: dict[BlockConfig, float] = {}
    for config in dict.fromkeys((plans.config_for(geometry, num_tokens), *choices)):
        with block_sizes(config), contextlib.suppress(OutOfResources):
            times[config] = _time(layer, repeats)
    return times


def _time(layer: ScratchLayer, repeats: int, launches: int = 20) -> float:
    """Microseconds of device time per call without context, the median."""
    taken = []
    batch = layer.new_step()
    with torch.no_grad():
        attend(batch, layer.call)
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Enough work in front that the launches queue up: then the device, not the host, is timed.
            torch.cuda._sleep(1_000_000)
            begin.record()
            for _ in range(launches):
                attend(batch, layer.call)
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / launches * 1e3)
    return statistics.median(taken)
