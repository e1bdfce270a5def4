"""Graphed prefill for any torch model: a piecewise CUDA-graph compiler plugin. See `docs/DESIGN.md`."""

from piecewise.api import GraphedModule, compile, explain
from piecewise.backend import handle
from piecewise.config import PiecewiseConfig
from piecewise.in_place import disable, enable
from piecewise.prefill_case import PrefillCase
from runners.errors import (
    CaptureError,
    ConfigError,
    PiecewiseError,
    SplitError,
    StateError,
    TokenDimError,
    TraceError,
)
from runners.mode import capture_window, eager_only

__all__ = [
    "CaptureError",
    "ConfigError",
    "GraphedModule",
    "PiecewiseConfig",
    "PiecewiseError",
    "PrefillCase",
    "SplitError",
    "StateError",
    "TokenDimError",
    "TraceError",
    "capture_window",
    "compile",
    "disable",
    "eager_only",
    "enable",
    "explain",
    "handle",
]
