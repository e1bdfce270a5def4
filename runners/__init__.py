"""Run time: graph engines, static buffers, and the step plans that serve calls. Knows nothing of FX or
Dynamo."""

from runners.buckets import TokenBuckets
from runners.errors import CaptureError, ConfigError, PiecewiseError, StateError
from runners.piecewise_runner import PiecewiseRunner
from runners.stats import CallStats, FallbackReason
from runners.step_plan import StepPlan

__all__ = [
    "CallStats",
    "CaptureError",
    "ConfigError",
    "FallbackReason",
    "PiecewiseError",
    "PiecewiseRunner",
    "StateError",
    "StepPlan",
    "TokenBuckets",
]
