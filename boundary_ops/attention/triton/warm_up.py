"""Compiles ahead of time what later calls launch, on scratch memory. Never on the serving path."""

from __future__ import annotations

import torch

from boundary_ops.attention.scratch import ScratchLayer
from boundary_ops.attention.triton.configs import BlockConfig
from boundary_ops.attention.triton.launcher import compiling_together, is_interpreted
from boundary_ops.attention.triton.prefill import attend, plans
from boundary_ops.attention.triton.programs import prefill_program
from boundary_ops.backends.library import AttentionCall

__all__ = ["compile_ahead"]


def compile_ahead(num_tokens: int, call: AttentionCall | None = None) -> None:
    """Compiles all that a step of up to `num_tokens` new tokens launches, with and without context.

    Args:
        call: looked at and not touched; without one, every layer shape seen so far.
    """
    for geometry in [plans.make(call).geometry] if call is not None else list(plans.geometries):
        # A smaller step may take other block sizes; each choice holds for some power of two.
        counts = sorted({1 << bit for bit in range(num_tokens.bit_length())} | {num_tokens} - {0})
        chosen: dict[BlockConfig, int] = {}
        for count in counts:
            chosen.setdefault(plans.config_for(geometry, count), count)
        missing = [
            (count, has_context)
            for config, count in chosen.items()
            for has_context in (False, True)
            if (geometry, config, has_context, 0) not in plans.compiled
        ]
        scratches = {count: ScratchLayer(geometry, count) for count, _ in missing}
        runs = [(scratches[count], has_context) for count, has_context in missing]
        if not is_interpreted(prefill_program):
            with compiling_together():
                for scratch, has_context in runs:
                    _run(scratch, has_context)
        for scratch, has_context in runs:
            _run(scratch, has_context)


def _run(scratch: ScratchLayer, has_context: bool) -> None:
    with torch.no_grad():
        attend(scratch.new_step(has_context=has_context), scratch.call)
