"""Removes from the settings what cannot be captured here, and says so once and in the report."""

import difflib

import torch

import boundary_ops
from piecewise.errors.capture import UnknownBoundaryOp
from piecewise.report.caller_warning import warn_caller
from piecewise.settings.config import PiecewiseConfig
from runners.engines import native_engine

# A lazy capture leaves this share of the device's memory alone: a server's own allocations come first.
_RESERVED_SHARE = 0.05


def capturable(config: PiecewiseConfig) -> tuple[PiecewiseConfig, tuple[str, ...]]:
    """Removes sizes that are never captured from the settings; warns of them and returns them in words."""
    kept, _ = config.within_limits()
    left_out = [f"bucket {each}" for each in config.prefill_sizes().clamped]
    if (sizes := config.decode_batch_sizes) is not None:
        listed = ", ".join([*map(str, sizes[:8]), *(["..."] if len(sizes) > 8 else [])])
        left_out.append(f"decode batch sizes {listed}: this version captures prefill only")
    if left_out:
        warn_caller("piecewise captures no graphs for " + "; ".join(left_out))
    return kept, tuple(left_out)


def check_boundary_ops(config: PiecewiseConfig) -> None:
    """Refuses names in `boundary_ops` that are not registered, and lists the ones that are."""
    known = [op.name for op in boundary_ops.registered()]
    for name in config.boundary_ops or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise UnknownBoundaryOp(name=name, known=", ".join(known) or "none is", hint=hint)


def lack_of_memory(device: torch.device) -> str | None:
    """Returns why a lazy capture is not begun on this device now, or None if memory suffices."""
    memory = native_engine(device).free_memory(device)
    if memory is None or memory[0] >= _RESERVED_SHARE * memory[1]:
        return None
    free, total = (f"{count / 2**30:.2f} GiB" for count in memory)
    return f"{free} of {total} are free on {device}; lazy captures leave {_RESERVED_SHARE:.0%} alone"
