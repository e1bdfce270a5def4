"""Lets boundary ops compile what their first call would, before a bucket is captured.

Boundary ops are not called by a capture, so what they compile on first use would be compiled while
serving. An op that declares `warm_up=fn` has it called once per bucket, `fn(num_tokens)`, or
`fn(num_tokens, *args, **kwargs)`
where it takes more: the arguments of such a call, to look at and not to touch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch.overrides import TorchFunctionMode

import boundary_ops


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
