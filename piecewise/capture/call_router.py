"""The way of a call through a graphed model: `GraphedModule` and the `torch.compile` handle both have it.

Calls are served one at a time, as they share static memory. Changes of the graphs wait for a running call,
and calls of other threads for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from piecewise.capture.store import GraphStore
from runners.bound_steps import StateChanged
from runners.errors import StateError
from runners.mode import is_eager_only, is_transforming
from runners.state.state_check import StateChange
from runners.stats import FallbackReason


def _no_variant(args: Any, kwargs: Any) -> None:
    """For graphs of which there is one state alone."""


class CallRouter:
    """Replays a call where a plan serves it; else runs the model itself, and counts the reason [I6]."""

    def __init__(self, store: GraphStore) -> None:
        self._store, self._stats = store, store.stats
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.is_capturing = False

    def serve(
        self,
        find_plan: Callable[[Any, Any], Any],
        eager: Callable[..., Any],
        args: Any,
        kwargs: Any,
        find_variant: Callable[[Any, Any], Any] = _no_variant,
    ) -> Any:
        """The result of `eager(*args, **kwargs)`.

        Args:
            find_plan: called with `args` and `kwargs`, without gradients: (signature, step plan, token count,
                leaves) where a plan serves the call, else the reason why not.
            find_variant: the same where the model is found changed, of graphs that were captured of it as it
                is now; None where there are none.
        """
        if self._owner == threading.get_ident():
            codes = FallbackReason.REENTRANT_CALL, FallbackReason.CAPTURE_IN_PROGRESS
            self._stats.count_eager(codes[self.is_capturing])
            return eager(*args, **kwargs)
        with self._lock:
            self._owner = threading.get_ident()
            try:
                if is_eager_only():
                    found: Any = FallbackReason.EAGER_ONLY
                elif torch.is_grad_enabled():
                    found = FallbackReason.GRAD_ENABLED
                elif is_transforming():
                    found = FallbackReason.NESTED_TRACING
                else:
                    found = find_plan(args, kwargs)
                while not isinstance(found, FallbackReason):
                    signature, steps, num_tokens, leaves = found
                    try:
                        result = signature.rebuild(steps.replay(leaves, num_tokens))
                    except StateChanged as changed:
                        found = self._after_change(changed.change, find_variant, args, kwargs)
                        find_variant = _no_variant  # the second one was compared just now
                        if isinstance(found, FallbackReason):
                            self._stats.place_eager(steps.padded_num_tokens, found)
                    else:
                        self._stats.count_replay(steps.padded_num_tokens)
                        return result
                self._stats.count_eager(found)
            finally:
                self._owner = None
        return eager(*args, **kwargs)

    def _after_change(
        self, change: StateChange, find_variant: Callable[[Any, Any], Any], args: Any, kwargs: Any
    ) -> Any:
        """The plan of a variant, or the reason why the call runs eagerly. Nothing that lasts was written."""
        found = find_variant(args, kwargs)
        if found is None or change.kind == "moved_address":  # what reads moved memory is given up at once
            reason = self._store.note_change(change)
            found = found if found is not None else reason
        return found

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Holds the lock for a change of the graphs, which is not made in the middle of a call.

        Raises:
            StateError: a call of the same thread is in progress.
        """
        if self._owner == threading.get_ident():
            raise StateError(
                f"{what}() inside a call of the same module",
                rule="capture replaces the memory that the running call uses",
                fix="call it between calls",
            )
        with self._lock:
            self._owner, self.is_capturing = threading.get_ident(), True
            try:
                yield
            finally:
                self._owner, self.is_capturing = None, False
