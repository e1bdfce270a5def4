"""Warns of the first call that runs eagerly for each reason; calls that replay never come here.

The sentences are those of the report. What the user asked for, such as `eager_only()`, needs no warning.
"""

import logging

from piecewise.report.caller_warning import warn_caller
from runners.stats import FallbackReason, FallbackWarning

# Most warnings of one model: each kind of call that was not captured has one of its own.
_MAX_WARNINGS = 32
_OF_A_KIND = (FallbackReason.UNSEEN_SIGNATURE, FallbackReason.SIGNATURE_LIMIT)
_ASKED_FOR = (
    *(FallbackReason.EAGER_ONLY, FallbackReason.DISABLED, FallbackReason.SUSPENDED),
    *(FallbackReason.RELEASED, FallbackReason.ZERO_TOKENS),
)
_log = logging.getLogger(__name__)


class FirstFallbacks:
    """Remembers what the user of one model was warned of, and why the last call ran eagerly."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._last: tuple[FallbackReason | None, str] = None, ""

    def because(self, reason: FallbackReason, detail: str) -> FallbackReason:
        """Returns the reason, and keeps what there is to say about this call."""
        self._last = reason, detail
        return reason

    def note(self, reason: FallbackReason) -> None:
        """Logs a call that runs eagerly, and warns if it is the first one of its reason, or of a new kind."""
        detail = self._last[1] if self._last[0] is reason else ""
        _log.debug("a call runs eagerly (%s) %s", reason, detail)
        kind = f"{reason}: {detail}" if reason in _OF_A_KIND else str(reason)
        if reason not in _ASKED_FOR and kind not in self._told and len(self._told) < _MAX_WARNINGS:
            self._told.add(kind)
            text = f"piecewise: a call runs eagerly, as will all like it ({reason}). {reason.told(detail)}"
            warn_caller(text, FallbackWarning)
