"""One change of graphs at a time, and none in the middle of a call of the same module."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from runners.errors import StateError

if TYPE_CHECKING:
    from piecewise.api import GraphedModule


class Exclusive:
    """Holds the module's lock for a capture; a call from inside one, or a capture from inside a call, is
    refused."""

    def __init__(self, graphed: GraphedModule, what: str) -> None:
        self._graphed, self._what = graphed, what

    def __enter__(self) -> None:
        if self._graphed._owner == threading.get_ident():
            raise StateError(
                f"{self._what}() inside a call of the same module",
                rule="capture replaces the memory that the running call uses",
                fix="call it between calls",
            )
        self._graphed._lock.acquire()
        self._graphed._owner, self._graphed._is_capturing = threading.get_ident(), True

    def __exit__(self, *_: object) -> None:
        self._graphed._owner, self._graphed._is_capturing = None, False
        self._graphed._lock.release()
