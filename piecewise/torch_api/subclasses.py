"""Classifies tensor subclasses, and records the ops below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._higher_order_ops.out_dtype import is_int_mm, out_dtype, out_dtype_fallback
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from piecewise.torch_api.fakes import trace_aten


def is_wrapper(value: Any) -> bool:
    """Whether the value is a tensor around other tensors, which its class lists and can rebuild it from."""
    return bool(is_traceable_wrapper_subclass(value))


def is_opaque(value: Any) -> bool:
    """Whether the value is a tensor whose class dispatches in Python but does not list what is inside."""
    dispatch = getattr(type(value), "__torch_dispatch__", None)
    is_disabled = dispatch is torch._C._disabled_torch_dispatch_impl
    return isinstance(value, torch.Tensor) and not is_disabled and not is_wrapper(value)


def has_torch_function(value: Any) -> bool:
    """Whether Dynamo traces the `__torch_function__` of the tensor's class; false for wrappers."""
    function = getattr(type(value), "__torch_function__", None)
    is_called = function is not torch._C._disabled_torch_function_impl and type(value) is not torch.Tensor
    return isinstance(value, torch.Tensor) and is_called and not is_wrapper(value)


def has_own_torch_function(value: Any) -> bool:
    """Whether the class has its own `__torch_function__` and is no Parameter. Dynamo may give its results
    another class than eager does."""
    function = getattr(type(value), "__torch_function__", None)
    torchs: Any = torch.Tensor.__torch_function__
    is_torchs = getattr(function, "__func__", None) is torchs.__func__
    return has_torch_function(value) and not is_torchs and not issubclass(type(value), torch.nn.Parameter)


def below_torch_function() -> Any:
    """Disables tensors' `__torch_function__` in this block."""
    return torch._C.DisableTorchFunctionSubclass()


def trace_below(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    fake_mode: Any,
    *,
    int_matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    torch_function: bool,
) -> torch.fx.GraphModule:
    """Records the aten ops of `function` below tensor subclasses; guards on sizes stay in the fake mode.

    Args:
        arguments: fakes and symbolic numbers.
        int_matmul: the product of two int8 matrices on a GPU, in int32.
        torch_function: whether to call the `__torch_function__` of classes, too.
    """

    def typed(op: Any, dtype: torch.dtype, *args: Any) -> Any:
        if is_int_mm(op, dtype, args):
            return int_matmul(*args)
        return out_dtype_fallback(op, dtype, *args)

    below = nullcontext() if torch_function else below_torch_function()
    with torch.inference_mode(False), below:
        return trace_aten(function, arguments, fake_mode, decompositions={out_dtype: typed})
