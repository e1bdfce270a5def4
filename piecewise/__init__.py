"""Graphs prefill for any torch model: a piecewise CUDA-graph compiler plugin. See `docs/DESIGN.md`.

Public names are imported when first used, so that neither `piecewise --help` nor a test plugin loads torch.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from runners.errors import (
    CaptureError,
    ConfigError,
    PiecewiseError,
    SplitError,
    StateError,
    TokenDimError,
    TraceError,
)
from runners.stats import FallbackWarning

if TYPE_CHECKING:
    from piecewise.api import GraphedModule, compile, disable, enable, explain
    from piecewise.prefill_case import PrefillCase
    from piecewise.settings.config import PiecewiseConfig
    from piecewise.testing.assertions import assert_graphed
    from piecewise.torch_backend import handle
    from runners.mode import capture_window, eager_only

# pyproject.toml reads it here.
__version__ = "0.1.0"

# TORCH_LOGS="+piecewise" shows what is logged.
logging.getLogger(__name__).addHandler(logging.NullHandler())

# Where each name is defined.
_HOMES = {
    "piecewise.api": ("GraphedModule", "compile", "disable", "enable", "explain"),
    "piecewise.prefill_case": ("PrefillCase",),
    "piecewise.settings.config": ("PiecewiseConfig",),
    "piecewise.testing.assertions": ("assert_graphed",),
    "piecewise.torch_backend": ("handle",),
    "runners.mode": ("capture_window", "eager_only"),
}

__all__ = [
    "CaptureError",
    "ConfigError",
    "FallbackWarning",
    "GraphedModule",
    "PiecewiseConfig",
    "PiecewiseError",
    "PrefillCase",
    "SplitError",
    "StateError",
    "TokenDimError",
    "TraceError",
    "assert_graphed",
    "capture_window",
    "compile",
    "disable",
    "eager_only",
    "enable",
    "explain",
    "handle",
]

if not TYPE_CHECKING:  # a type checker knows the names listed above, and no others

    def __getattr__(name: str) -> Any:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(home), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
