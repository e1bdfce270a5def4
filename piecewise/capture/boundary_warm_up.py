"""Boundary ops in a warm-up: what their first call would compile is compiled ahead, and nothing is written.

An op between graphs is not called, but its `warm_up` is, if it has one. An op in a graph runs on a step of
zero sequences [I8], and what it would have left in memory that the graph owns is stood in for: random values,
the same in each warm-up, and poison in padded rows [I3].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import boundary_ops
from boundary_ops import BoundaryOp
from piecewise.ir.placeholders import placeholder_for
from piecewise.ir.tensors import bound_arguments, storage_of, tensors_in
from runners.rows import poison_value


class BoundaryWarmUp(TorchFunctionMode):
    """In this block the `warm_up` of each boundary op is called instead of the op.

    Args:
        num_rows: of tensors that carry tokens.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = boundary_ops.lookup(func)
        return func(*args, **(kwargs or {})) if op is None else self._served(op, args, kwargs or {})

    def _served(self, op: BoundaryOp, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if op.warm_up is not None:
            shown = (args, kwargs) if _takes_more(op.warm_up) else ((), {})
            op.warm_up(self._num_rows, *shown[0], **shown[1])


class CapturedWarmUp(BoundaryWarmUp):
    """In this block boundary ops run, and what they write into the graph's own memory is made up.

    Args:
        outside: tensors that the graph does not own: their content is left alone.
        num_rows, real_rows: of tensors that carry tokens.
        variant: which poison padded rows get, as for `poison_value`.
    """

    def __init__(
        self, outside: Iterable[torch.Tensor], *, num_rows: int, real_rows: int, variant: int
    ) -> None:
        super().__init__(num_rows)
        self._outside = {storage_of(tensor) for tensor in outside}
        self._real_rows, self._variant = real_rows, variant

    def _served(self, op: BoundaryOp, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._variant == 0:
            super()._served(op, args, kwargs)
        bound = bound_arguments(op.overload, args, kwargs)
        for name in op.mutated:
            for tensor in tensors_in(bound.get(name)):
                if storage_of(tensor) not in self._outside:
                    self._stand_in(tensor, (op.token_args or {}).get(name))
        op(*args, **kwargs)

    def _stand_in(self, tensor: torch.Tensor, dim: int | None) -> None:
        tensor.copy_(placeholder_for(tensor.shape, tensor, seed=0))
        if tensor.dtype.is_floating_point and dim is not None and tensor.shape[dim] == self._num_rows:
            padded = tensor.narrow(dim, self._real_rows, self._num_rows - self._real_rows)
            padded.fill_(poison_value(tensor.dtype, self._variant))


@lru_cache(maxsize=64)
def _takes_more(warm_up: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(warm_up).parameters.values()
    except ValueError:  # a builtin without a signature
        return False
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
