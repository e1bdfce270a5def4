"""What a step plan does at one row count: copy in, replay, check, look up, call; each a `replay(env)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runners.engine import CapturedGraph
from runners.state_check import StateChange, StateCheck


class StateChanged(Exception):
    """The check between two steps found that the model is no longer what was recorded."""

    def __init__(self, change: StateChange | None) -> None:
        super().__init__(change)
        self.change = change


@dataclass(slots=True)
class CopyIn:
    """Copies a value of this call into its static buffer and zeroes the padded rows."""

    slot: int
    rows: torch.Tensor
    pads: list[torch.Tensor]

    def replay(self, env: list[Any]) -> None:
        self.rows.copy_(env[self.slot])
        for pad in self.pads:
            pad.zero_()


@dataclass(slots=True)
class Replay:
    """Replays one captured segment."""

    graph: CapturedGraph

    def replay(self, env: list[Any]) -> None:
        self.graph.replay()


@dataclass(slots=True)
class Check:
    """Raises `StateChanged` where the model is no longer what was recorded."""

    check: StateCheck

    def replay(self, env: list[Any]) -> None:
        if not self.check.is_unchanged():
            change = self.check.find_change()
            if change is not None:
                raise StateChanged(change)


@dataclass(slots=True)
class Load:
    """Looks up tensors that only eager steps read; they are never recorded [I4]."""

    sources: list[tuple[int, Any, Any]]

    def replay(self, env: list[Any]) -> None:
        for slot, owner, key in self.sources:
            env[slot] = owner[key]


@dataclass(slots=True)
class Measure:
    """Reads sizes of inputs that are not the token count."""

    sources: tuple[tuple[int, int, int], ...]

    def replay(self, env: list[Any]) -> None:
        for slot, leaf, dim in self.sources:
            env[slot] = env[leaf].shape[dim]


@dataclass(slots=True)
class Dense:
    """An argument whose narrowed view has other strides than eager's tensor: it is passed as a dense copy."""

    position: int
    rows: torch.Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    written: bool


@dataclass(slots=True)
class Call:
    """Calls a boundary op or an eager segment on the real rows."""

    function: Callable[..., Any]
    arguments: list[Any]
    from_env: list[tuple[int, int]]
    results: tuple[int, ...]
    dense: list[Dense]
    copies: list[CopyIn]

    def replay(self, env: list[Any]) -> None:
        arguments = self.arguments.copy()  # the held list must not keep the caller's tensors alive
        for position, slot in self.from_env:
            arguments[position] = env[slot]
        for item in self.dense:
            arguments[item.position] = _dense_copy(item)
        returned = self.function(*arguments)
        for item in self.dense:
            if item.written:
                item.rows.copy_(arguments[item.position])
        for slot, value in zip(self.results, returned, strict=True) if self.results else ():
            env[slot] = value
        for copy in self.copies:
            copy.replay(env)


def _dense_copy(item: Dense) -> torch.Tensor:
    dense = torch.empty_strided(item.sizes, item.strides, dtype=item.rows.dtype, device=item.rows.device)
    return dense.copy_(item.rows)
