"""Warns at the user's line: the frames of these packages and of torch in between say nothing to a user."""

from __future__ import annotations

import sys
import warnings

_NOT_USERS = ("piecewise", "runners", "boundary_ops", "torch", "contextlib")


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line that is the user's, or at the outermost line where none is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
