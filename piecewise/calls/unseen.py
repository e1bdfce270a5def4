"""Counts the kinds of call that no signature serves, with the reasons, up to a limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from runners.errors import PiecewiseError
from runners.stats import FallbackReason

_MAX_LISTED = 16


class UnseenCalls:
    """Counts calls by the line of `describe_call`; after `max_refused` failed kinds, none is captured."""

    def __init__(self, max_refused: int) -> None:
        self._counts: Counter[str] = Counter()
        self._notes: dict[str, str] = {}
        self._refused: dict[str, FallbackReason] = {}
        self._max_refused = max_refused

    def note(self, text: str, why: Callable[[], str]) -> str:
        """Counts one call; returns why no graph serves it, which is asked once for each listed kind."""
        note = self._notes.get(text) or why()
        if text in self._counts or len(self._counts) < _MAX_LISTED:
            self._counts[text] += 1
            self._notes[text] = note
        return note

    def refuse(self, text: str, reason: FallbackReason, error: PiecewiseError) -> None:
        """Notes that a capture of this kind failed, so that it is not tried again."""
        outcome = "cannot be traced" if reason is FallbackReason.CAPTURE_FAILED else "not captured"
        self._refused[text], self._notes[text] = reason, f"{outcome}: {str(error).splitlines()[0]}"

    def refusal_for(self, text: str) -> FallbackReason | None:
        is_full = len(self._refused) >= self._max_refused
        return self._refused.get(text, FallbackReason.CAPTURE_FAILED if is_full else None)

    def forget_refusals(self) -> None:
        for text in self._refused:
            del self._notes[text]
        self._refused.clear()

    def listed(self) -> dict[str, int]:
        """Lists each kind's description with the count of its calls."""
        notes = ((text, self._notes.get(text)) for text in self._counts)
        return {text + (f", {note}" if note else ""): self._counts[text] for text, note in notes}
