"""Counts the files that a replayed call, and the capture of one bucket, pass through; prints both.

Counted are files of the three packages in which Python code runs, seen by ``sys.setprofile``. What a graph
engine does is not: on this machine it stands for the device. ``python tests/models/way_of_a_call.py``
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import house
import torch
from toy_models import Toy

import piecewise
from piecewise.capture import store

ROOT = Path(piecewise.__file__).resolve().parents[1]
PACKAGES = ("piecewise", "runners", "boundary_ops")
ENGINES = tuple(f"{room}/" for room in house.engines())
MAX_FILES_OF_A_CALL, MAX_FILES_OF_A_BUCKET = 8, 25


@dataclass
class Way:
    """The files that were entered.

    Attributes:
        files: in the order in which they were entered first.
        climbs: (from, to) where a file was entered again from one that it had called.
    """

    files: list[str] = field(default_factory=list)
    climbs: list[tuple[str, str]] = field(default_factory=list)
    _stack: list[str] = field(default_factory=list)
    _engine: FrameType | None = None

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Is the profile function."""
        if event not in ("call", "return"):
            return
        if self._engine is not None:
            self._engine = None if event == "return" and frame is self._engine else self._engine
            return
        path = Path(frame.f_code.co_filename)
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if not name.startswith(PACKAGES):
            return
        if event == "return":
            if self._stack and self._stack[-1] == name:
                self._stack.pop()
        elif name.startswith(ENGINES):
            self._engine = frame
        else:
            if name in self._stack and self._stack[-1] != name:
                self.climbs.append((self._stack[-1], name))
            if name not in self.files:
                self.files.append(name)
            self._stack.append(name)


def way_of(call: Callable[[], Any]) -> Way:
    """The way of one function."""
    way = Way()
    sys.setprofile(way.note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return way


def ways() -> tuple[Way, Way]:
    """The way of a replayed call of a toy model with default settings, and of the capture of its second
    bucket: the first one is when the plan is lowered, which is done for all."""
    graphed = piecewise.compile(Toy(num_blocks=2).eval(), buckets=(8, 16), progress=False)
    ids = torch.arange(5)
    captures: list[Way] = []

    def seen(*args: Any) -> Any:
        results: list[Any] = []
        captures.append(way_of(lambda: results.append(capture_bucket(*args))))
        return results[0]

    capture_bucket = store.capture_bucket
    with torch.no_grad(), mock.patch.object(store, "capture_bucket", seen):
        graphed.capture(ids, ids)
        graphed(ids, ids)  # the first call of a count binds its steps
        call = way_of(lambda: graphed(ids, ids))
    assert graphed.stats.replays == 2
    return call, captures[1]


def main() -> int:
    call, bucket = ways()
    print(f"a replayed call enters {len(call.files)} files: {', '.join(call.files)}")
    print(f"the capture of a bucket enters {len(bucket.files)} files: {', '.join(bucket.files)}")
    is_short = len(call.files) <= MAX_FILES_OF_A_CALL and len(bucket.files) <= MAX_FILES_OF_A_BUCKET
    return 0 if is_short and not call.climbs else 1


if __name__ == "__main__":
    sys.exit(main())
