"""What of the settings this version captures, told once and kept for the report."""

from __future__ import annotations

import warnings

from piecewise.config import PiecewiseConfig


def capturable(config: PiecewiseConfig) -> tuple[PiecewiseConfig, tuple[str, ...]]:
    """The settings without the sizes that are never captured, and those in words; a warning says them too."""
    kept, _ = config.within_limits()
    left_out = [f"bucket {each}" for each in config.prefill_sizes().clamped]
    if config.decode_batch_sizes is not None:
        listed = ", ".join(map(str, config.decode_batch_sizes[:8]))
        more = ", ..." if len(config.decode_batch_sizes) > 8 else ""
        left_out.append(f"decode batch sizes {listed}{more}: this version captures prefill only")
    if left_out:
        warnings.warn("piecewise captures no graphs for " + "; ".join(left_out), stacklevel=5)
    return kept, tuple(left_out)
