"""Serves calls at run time: graph engines, static buffers, step plans. Knows nothing of FX or Dynamo.

In: functions of graph segments, static buffers, a plan's steps (from `piecewise.capture`).
Out: captured graphs, and for each call its results or the reason why it has to run eagerly.
Read first: `engine.py` (what an engine does), `piecewise_runner.py` (one segment), `step_plan.py` (one call).
Rooms: `cuda/` and `tape/` are the engines, `state/` notices a model that changed.

Names that need torch are imported when they are first used: settings know buckets and errors alone.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from runners.buckets import TokenBuckets
from runners.errors import CaptureError, ConfigError, PiecewiseError, StateError
from runners.stats import CallStats, FallbackReason

if TYPE_CHECKING:
    from runners.piecewise_runner import PiecewiseRunner
    from runners.step_plan import StepPlan

logging.getLogger(__name__).addHandler(logging.NullHandler())
_HOMES = {"PiecewiseRunner": "runners.piecewise_runner", "StepPlan": "runners.step_plan"}

__all__ = [
    "CallStats", "CaptureError", "ConfigError", "FallbackReason", "PiecewiseError", "PiecewiseRunner",
    "StateError", "StepPlan", "TokenBuckets",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker knows the names listed above, and no others

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
