"""Records functions on the tape, for tests of the tape alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runners.tape.tape import TapeEngine, TapeGraph, TapePool

CPU = torch.device("cpu")


def new_pool() -> TapePool:
    return TapeEngine().new_pool(CPU)


def record(
    fn: Callable[[], Sequence[Any]], pool: TapePool | None = None, segment: str = "segment 1"
) -> TapeGraph:
    return TapeEngine().capture(fn, pool=new_pool() if pool is None else pool, segment=segment)


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Tensor):
            assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs
