"""Records a node's aten ops, once, on fakes; rules judge them as often as layouts ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import sympy
import torch

from piecewise import torch_api
from piecewise.ir.tensors import bound_arguments, map_tensors, storage_of, tensors_in, written_arguments


class Ref(NamedTuple):
    """Refers to a tensor of a recording by its position."""

    position: int


class TensorInfo(NamedTuple):
    """Describes a recorded tensor; sizes are ints or symbolic ints; tensors of one `memory` share it."""

    sizes: tuple[Any, ...]
    dtype: torch.dtype
    memory: int


class AtenCall(NamedTuple):
    """Holds one op, with `Ref`s for tensors, and the positions of those that it reads, returns and writes."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    results: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def made(self) -> tuple[int, ...]:
        """Lists what the op writes, then its other results."""
        return tuple(dict.fromkeys((*self.writes, *self.results)))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Holds the ops of a node.

    Attributes:
        tensors: the node's operands first, `num_given` of them.
        results: positions of the tensors in its value; one that no op made comes last among all.
        asked: what its code asked of sizes, answered as for the example.
    """

    tensors: tuple[TensorInfo, ...]
    num_given: int
    calls: tuple[AtenCall, ...]
    results: tuple[int, ...]
    asked: frozenset[sympy.Basic] = frozenset()


# Ops that read only metadata.
_IGNORED = frozenset(
    ["prim::device", "aten::size", "aten::sym_size", "aten::stride", "aten::_assert_tensor_metadata"]
)


class OpRecorder(torch_api.TorchDispatchMode):
    """Records the ops of its block, on the tensors `given`, with tags and written storages."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.tags: set[torch.Tag] = set()
        self._tensors: list[TensorInfo] = []
        self._kept: list[torch.Tensor] = []  # alive, so that no other gets its id
        self._positions: dict[int, int] = {}
        self._memory: dict[int, int] = {}
        self._calls: list[AtenCall] = []
        self._num_given = len(given)
        for tensor in given:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in _IGNORED:
            return func(*args, **kwargs)
        if torch_api.is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        self.tags |= _tags(func, args, kwargs)
        written = list(tensors_in(written_arguments(func, args, kwargs)))
        reads = tuple(map(self._position_of, tensors_in([*args, *kwargs.values()])))
        noted = map_tensors((tuple(args), dict(kwargs)), lambda tensor: Ref(self._position_of(tensor)))
        writes = tuple(map(self._position_of, written))
        result = func(*args, **kwargs)
        is_view = torch.Tag.inplace_view in func.tags
        for tensor, position in zip(written, writes, strict=True):
            if is_view or tuple(tensor.shape) != self._tensors[position].sizes:
                self._add(tensor)  # from here on it is another tensor
        results = tuple(map(self._position_of, tensors_in(result)))
        if is_view and all(position >= self._num_given for position in writes):
            written, writes = [], ()  # it views its memory in another way
        self.written |= set(map(storage_of, written))
        self._calls.append(AtenCall(func, noted[0], noted[1], reads, results, writes))
        return result

    def recording(self, value: Any, asked: Collection[sympy.Basic] = ()) -> Recording:
        """Makes the recording of a block with this value."""
        results = tuple(map(self._position_of, tensors_in(value)))
        return Recording(tuple(self._tensors), self._num_given, tuple(self._calls), results, frozenset(asked))

    def _position_of(self, tensor: torch.Tensor) -> int:
        known = self._positions.get(id(tensor))
        return self._add(tensor) if known is None else known

    def _add(self, tensor: torch.Tensor) -> int:
        memory = self._memory.setdefault(storage_of(tensor), len(self._memory))
        self._tensors.append(TensorInfo(tuple(tensor.shape), tensor.dtype, memory))
        self._kept.append(tensor)
        position = self._positions[id(tensor)] = len(self._tensors) - 1
        return position


def _tags(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.Tag]:
    """Finds the tags of this call: not each index is a mask, and no dropout draws no random numbers."""
    tags = set(func.tags)
    if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_"):
        tags.discard(torch.Tag.dynamic_output_shape)
        if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(list(args[1]))):
            tags.add(torch.Tag.dynamic_output_shape)
    if torch.Tag.nondeterministic_seeded in tags:
        if bound_arguments(func, args, kwargs).get("dropout_p") == 0.0:
            tags.discard(torch.Tag.nondeterministic_seeded)
    return tags
