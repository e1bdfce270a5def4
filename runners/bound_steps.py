"""Defines the steps of one row count: copy in, check, look up, call, copy out; each a `replay(env)`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from runners._torch import copy_each
from runners.rows import Place, RowCopy, num_spanned
from runners.state.state_check import StateChange, StateCheck, StateRef


class StateChanged(Exception):
    """Reports a check between two steps that found the model changed since it was recorded."""

    def __init__(self, change: StateChange) -> None:
        super().__init__(change)
        self.change = change


@dataclass(slots=True)
class CopyIn:
    """Copies a value of this call into its static buffer, whose padded rows repeat a real one [I2].

    Attributes:
        slot: the value's place in `env`.
        pads: fill the padded rows; see `row_copies`.
        units: per dim, how many elements are one row.
    """

    slot: int
    buffer: torch.Tensor
    rows: torch.Tensor
    pads: list[RowCopy]
    units: tuple[int, ...]


# Copies tensors into the buffers of some `CopyIn`s and fills their padding; false where it cannot.
CopyLaunch = Callable[[Sequence[torch.Tensor]], bool]


@dataclass(slots=True)
class CopyInputs:
    """Copies values that are all there into their static buffers, with `launch` all at once."""

    copies: list[CopyIn]
    launch: CopyLaunch | None = None

    def __post_init__(self) -> None:
        # torch copies all in one launch where strides are equal, too. A row count below the bucket leaves the
        # bucket's stride in a dim of size 1, where it means nothing.
        for copy in self.copies if len(self.copies) > 1 else ():
            if copy.rows.is_contiguous():
                strides = torch.empty(copy.rows.shape, device="meta").stride()
                copy.rows = copy.rows.as_strided(copy.rows.shape, strides)

    def replay(self, env: list[Any]) -> None:
        copies = self.copies
        given = [env[copy.slot] for copy in copies]
        if self.launch is not None and self.launch(given):
            return
        if len(copies) == 1:
            copies[0].rows.copy_(given[0])
        else:
            copy_each([copy.rows for copy in copies], given)
        for copy in copies:
            for pad, row in copy.pads:
                pad.copy_(row) if row is not None else pad.zero_()


@dataclass(slots=True)
class Check:
    """Raises `StateChanged` on a changed model; while `may_run_ahead`, compares only the next look-ups."""

    check: StateCheck
    may_run_ahead: Callable[[], bool] | None = None

    def replay(self, env: list[Any]) -> None:
        is_early = self.may_run_ahead is not None and self.may_run_ahead()
        if not (self.check.looked_up_fit() if is_early else self.check.is_unchanged()):
            raise_change(self.check)


def raise_change(check: StateCheck) -> None:
    change = check.find_change()
    if change is not None:
        raise StateChanged(change)


class LookUp:
    """Reads what only eager steps take, and no graph records [I4]: tensors of the model, sizes of inputs."""

    def __init__(self, slots: Sequence[tuple[int, StateRef]], sizes: Sequence[tuple[int, int, int]]) -> None:
        self._sizes = sizes
        self._items = [(slot, ref.owner, ref.key) for slot, ref in slots if not ref.is_attribute]
        self._attributes = [(slot, ref) for slot, ref in slots if ref.is_attribute]

    def replay(self, env: list[Any]) -> None:
        for slot, owner, key in self._items:
            env[slot] = owner[key]
        for slot, ref in self._attributes:
            env[slot] = ref.get()
        for slot, leaf, dim in self._sizes:
            env[slot] = env[leaf].shape[dim]


class Loadable(Protocol):
    """Holds a step's metadata at fixed addresses, which ops in graphs read.

    `mismatch` says why the running step cannot be loaded for a call of so many tokens, or None; `load` copies
    it, on the current stream; `clear` goes back to a step of zero sequences, for which the ops write nothing.
    """

    def mismatch(self, num_tokens: int) -> Any: ...
    def load(self) -> None: ...
    def clear(self) -> None: ...


@dataclass(slots=True)
class LoadStep:
    """Loads the metadata of the running step; the copy runs while the host goes on to the first graph."""

    metadata: Loadable

    def replay(self, env: list[Any]) -> None:
        self.metadata.load()


@dataclass(slots=True)
class Dense:
    """Makes one dense copy of an argument whose narrowed view has other strides than eager's tensor."""

    positions: tuple[int, ...]
    rows: torch.Tensor
    strides: tuple[int, ...]
    written: bool


@dataclass(slots=True)
class BoundCall:
    """Calls a boundary op or an eager segment on the real rows."""

    function: Callable[..., Any]
    arguments: list[Any]
    from_env: list[tuple[int, int]]
    results: tuple[int, ...]
    dense: list[Dense]
    copies: CopyInputs | None

    def replay(self, env: list[Any]) -> None:
        arguments = self.arguments.copy()  # the held list must not keep the caller's tensors alive
        for position, slot in self.from_env:
            arguments[position] = env[slot]
        copies = [own_copy(item.rows, item.strides) for item in self.dense]
        for item, dense in zip(self.dense, copies, strict=True):
            for position in item.positions:
                arguments[position] = dense
        returned = self.function(*arguments)
        for item, dense in zip(self.dense, copies, strict=True):
            if item.written:
                item.rows.copy_(dense)
        for slot, value in zip(self.results, returned, strict=True) if self.results else ():
            env[slot] = value
        if self.copies is not None:
            self.copies.replay(env)


@dataclass(frozen=True, slots=True)
class DirectCall:
    """Describes an op's call without the segment's function around it.

    `bind` makes the op ready for repeats of a served call: read its `function` anew for each. `places` are
    (argument, index of the segment's input); `arguments` are None there.
    """

    bind: Callable[..., Any]
    arguments: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class BoundOpCall(BoundCall):
    """Calls a boundary op whose arguments keep their geometry at one row count: bound after the first."""

    direct: DirectCall
    op: Any = None
    held: list[Any] = field(default_factory=list)
    op_from_env: list[tuple[int, int]] = field(default_factory=list)

    def replay(self, env: list[Any]) -> None:
        op = self.op
        if op is None:
            BoundCall.replay(self, env)
            self._bind(env)
            return
        arguments = self.held.copy()
        for position, slot in self.op_from_env:
            arguments[position] = env[slot]
        op.function(*arguments)
        if self.copies is not None:
            self.copies.replay(env)

    def _bind(self, env: list[Any]) -> None:
        slots = {position - 1: slot for position, slot in self.from_env}
        held, from_env = list(self.direct.arguments), []
        for position, source in self.direct.places:
            if source in slots:
                from_env.append((position, slots[source]))
            else:
                held[position] = self.arguments[source + 1]
        given = dict(from_env)
        op = self.direct.bind(*(env[given[at]] if at in given else held[at] for at in range(len(held))))
        self.held, self.op_from_env, self.op = held, from_env, op


@dataclass(slots=True)
class CopyOut:
    """Copies results that share memory into memory of the caller's own, where they share it again [I7].

    `results`: per result its slot, the static rows or the slot that hold it, and its place in eager's memory.
    """

    results: list[tuple[int, torch.Tensor | int, Place]]

    def replay(self, env: list[Any]) -> None:
        values = [env[source] if isinstance(source, int) else source for _, source, _ in self.results]
        copies = copied_together([place for *_, place in self.results], values)
        for (target, *_), copy in zip(self.results, copies, strict=True):
            env[target] = copy


def copied_together(places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies tensors of one dtype into one new memory, at these places from the first element taken."""
    begin = min(offset for _, _, offset in places)
    end = max(offset + num_spanned(sizes, strides) for sizes, strides, offset in places)
    memory = torch.empty(end - begin, dtype=tensors[0].dtype, device=tensors[0].device)
    copies = [memory.as_strided(sizes, strides, offset - begin) for sizes, strides, offset in places]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy_elements(copy, tensor)
    return copies


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies like `copy_`, also where an expanded dim shows one element many times."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def own_copy(rows: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Copies rows into a tensor with the strides of eager's."""
    copied = torch.empty_strided(rows.shape, strides, dtype=rows.dtype, device=rows.device)
    copy_elements(copied, rows)
    return copied
