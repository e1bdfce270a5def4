"""Runs captured boundary ops in a warm-up: on a step of zero sequences, so that they write nothing [I8].

What such an op would have left in memory that the graph owns is therefore stood in for, as it is for ops
between graphs: random values, the same in each warm-up, and poison in padded rows [I3]. The op really runs,
so that what it compiles or tunes on first use is done before the capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import boundary_ops
from boundary_ops import BoundaryOp
from piecewise.boundary_warm_up import call_warm_up
from piecewise.row_samples import stand_in
from piecewise.tensors import bound_arguments, storage_of, tensors_in
from runners.rows import poison_value


class CapturedWarmUp(TorchFunctionMode):
    """In this block boundary ops are warmed up, and what they write into the graph's own memory is made up.

    Args:
        outside: tensors that the graph does not own: their content is left alone.
        num_rows, real_rows: of tensors that carry tokens.
        variant: which poison padded rows get, as for `poison_value`.
    """

    def __init__(
        self, outside: Iterable[torch.Tensor], *, num_rows: int, real_rows: int, variant: int
    ) -> None:
        super().__init__()
        self._outside = {storage_of(tensor) for tensor in outside}
        self._num_rows, self._real_rows, self._variant = num_rows, real_rows, variant

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = boundary_ops.lookup(func)
        if op is None:
            return func(*args, **(kwargs or {}))
        if self._variant == 0:
            call_warm_up(op, self._num_rows, args, kwargs or {})
        self._stand_in(op, bound_arguments(op.overload, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _stand_in(self, op: BoundaryOp, bound: Mapping[str, Any]) -> None:
        for name in op.mutated:
            for tensor in tensors_in(bound.get(name)):
                if storage_of(tensor) in self._outside:
                    continue
                tensor.copy_(stand_in(tensor.shape, tensor, seed=0))
                dim = (op.token_args or {}).get(name) if tensor.dtype.is_floating_point else None
                if dim is not None and tensor.shape[dim] == self._num_rows:
                    padded = tensor.narrow(dim, self._real_rows, self._num_rows - self._real_rows)
                    padded.fill_(poison_value(tensor.dtype, self._variant))
