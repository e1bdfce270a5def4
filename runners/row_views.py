"""Makes views of static memory on the real rows, for one row count after another.

A new row count needs a view of every tensor that an eager call takes, some hundreds in a deep model, while
the call waits. So what tensors of one geometry have in common is worked out once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from runners.rows import has_strides

Sizes = Callable[[int], Sequence[int]]


class SizedValue(Protocol):
    """Describes a value's sizes and strides as functions of the row count."""

    @property
    def dtype(self) -> torch.dtype | None: ...
    @property
    def sizes(self) -> Sizes | None: ...
    @property
    def strides(self) -> Sizes | None: ...
    @property
    def offset(self) -> Sizes | None: ...
    @property
    def token_dims(self) -> tuple[int, ...]: ...
    @property
    def units(self) -> tuple[int, ...]: ...


def place_of(value: SizedValue, rows: Any) -> Any:
    """Computes sizes, strides and offset of a value whose place is known at `rows`, an int or a symbol."""
    assert value.sizes is not None and value.strides is not None and value.offset is not None
    return tuple(value.sizes(rows)), tuple(value.strides(rows)), value.offset(rows)[0]


class _SameGeometry(NamedTuple):
    sizes: Sizes
    strides: Sizes | None
    shape: tuple[int, ...]
    members: list[tuple[int, torch.Tensor]]


class BoundRows(NamedTuple):
    """Holds the views for one row count.

    `views` ends with None, for the index −1; `other_strides`: index → eager's strides where they differ.
    """

    views: list[Any]
    other_strides: dict[int, tuple[int, ...]]


class RowViews:
    """Holds the static tensors of one plan that are looked at on the real rows."""

    def __init__(self) -> None:
        self._fixed: list[Any] = []
        self._groups: dict[Any, _SameGeometry] = {}
        self._index: dict[Any, int] = {}

    def add(self, tensor: torch.Tensor, value: SizedValue | None) -> int:
        """Adds a tensor; returns its view's index in `BoundRows.views`. Without token dims it is the view."""
        sizes = value.sizes if value is not None and value.token_dims else None
        strides = value.strides if value is not None else None
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, sizes, strides)
        known = self._index.get(key)
        if known is not None:
            return known
        index = self._index[key] = len(self._fixed)
        self._fixed.append(tensor)
        if sizes is not None:
            geometry = (sizes, strides, tensor.shape, tensor.stride())
            group = self._groups.setdefault(geometry, _SameGeometry(sizes, strides, tuple(tensor.shape), []))
            group.members.append((index, tensor))
        return index

    def bind(self, num_rows: int) -> BoundRows:
        """Makes the views for `num_rows` real rows."""
        views: list[Any] = [*self._fixed, None]
        others: dict[int, tuple[int, ...]] = {}
        for group in self._groups.values():
            sizes = enumerate(group.sizes(num_rows))
            shorter = [(dim, size) for dim, size in sizes if size != group.shape[dim]]
            for index, tensor in group.members if shorter else ():
                for dim, size in shorter:
                    tensor = tensor.narrow(dim, 0, size)
                views[index] = tensor
            strides = tuple(group.strides(num_rows)) if group.strides is not None else None
            if strides is not None and not has_strides(views[group.members[0][0]], strides):
                others.update({index: strides for index, _ in group.members})
        return BoundRows(views, others)
