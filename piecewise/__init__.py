"""Graphed prefill for any torch model: a piecewise CUDA-graph compiler plugin. See `docs/DESIGN.md`."""

from piecewise.api import GraphedModule, compile, disable, enable, explain
from piecewise.prefill_case import PrefillCase
from piecewise.settings.config import PiecewiseConfig
from piecewise.torch_backend import handle
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
