"""Lets boundary ops compile what their first call would, before a bucket is captured.

Boundary ops between graphs are not called by a capture, so what they compile on first use would be compiled
while serving. An op that declares `warm_up=fn` has it called once per bucket, `fn(num_tokens)`, or
`fn(num_tokens, *args, **kwargs)` where it takes more: the arguments of such a call, to look at and not to
touch.

Captured ops really run, on a step of zero sequences, so that they write nothing [I8]. What such an op would
have left in memory that the graph owns is stood in for, as it is for ops between graphs: random values, the
same in each warm-up, and poison in padded rows [I3].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import boundary_ops
from piecewise.row_samples import stand_in
from piecewise.tensors import bound_arguments, storage_of, tensors_in
from runners.rows import poison_value


def warm_up_boundary(function: Callable[..., Any], num_tokens: int, arguments: Sequence[Any]) -> None:
    """Calls the `warm_up` of each op in a boundary segment instead of the op.

    Args:
        function: the segment, `function(num_tokens, *arguments)`.
        arguments: of `num_tokens` rows each.
    """
    with _InsteadOfCalls(num_tokens):
        function(num_tokens, *arguments)


class _InsteadOfCalls(TorchFunctionMode):
    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = boundary_ops.lookup(func)
        if op is None:
            return func(*args, **(kwargs or {}))
        call_warm_up(op, self._num_tokens, args, kwargs or {})
        return None


def call_warm_up(
    op: boundary_ops.BoundaryOp, num_tokens: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Calls an op's `warm_up`, if it has one, with as much of the call as it takes."""
    if op.warm_up is None:
        return
    if _takes_more(op.warm_up):
        warm_up: Callable[..., object] = op.warm_up
        warm_up(num_tokens, *args, **kwargs)
    else:
        op.warm_up(num_tokens)


@lru_cache(maxsize=64)
def _takes_more(warm_up: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(warm_up).parameters.values()
    except ValueError:  # a builtin without a signature
        return False
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


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

    def _stand_in(self, op: boundary_ops.BoundaryOp, bound: Mapping[str, Any]) -> None:
        for name in op.mutated:
            for tensor in tensors_in(bound.get(name)):
                if storage_of(tensor) in self._outside:
                    continue
                tensor.copy_(stand_in(tensor.shape, tensor, seed=0))
                dim = (op.token_args or {}).get(name) if tensor.dtype.is_floating_point else None
                if dim is not None and tensor.shape[dim] == self._num_rows:
                    padded = tensor.narrow(dim, self._real_rows, self._num_rows - self._real_rows)
                    padded.fill_(poison_value(tensor.dtype, self._variant))
