"""Tensor subclasses: which ones say what is inside, and the ops below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._higher_order_ops.out_dtype import is_int_mm, out_dtype, out_dtype_fallback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_wrapper(value: Any) -> bool:
    """Whether it is a tensor around other tensors, which its class names and can be made of again."""
    return bool(is_traceable_wrapper_subclass(value))


def is_opaque(value: Any) -> bool:
    """Whether it is a tensor of a class that dispatches in Python and does not say what is inside."""
    dispatch = getattr(type(value), "__torch_dispatch__", None)
    is_disabled = dispatch is torch._C._disabled_torch_dispatch_impl
    return isinstance(value, torch.Tensor) and not is_disabled and not is_wrapper(value)


def torch_function_was_traced() -> bool:
    """Whether the trace in progress went through a `__torch_function__`, so that what it recorded lies below
    all of them; only inside a backend."""
    try:
        output = InstructionTranslator.current_tx().output
    except (AttributeError, RuntimeError):
        return False
    return bool(getattr(output, "torch_function_subclass_inlined", False))


def trace_below(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    fake_mode: Any,
    *,
    int_matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    torch_function: bool,
) -> torch.fx.GraphModule:
    """The aten ops that `function` comes to below the classes of the tensors that it takes and makes; guards
    on sizes are left in the fake mode.

    Args:
        arguments: fakes and symbolic numbers.
        int_matmul: the product of two int8 matrices on a GPU, in int32.
        torch_function: whether a class's `__torch_function__` is to be called, too.
    """

    def typed(op: Any, dtype: torch.dtype, *args: Any) -> Any:
        if is_int_mm(op, dtype, args):
            return int_matmul(*args)
        return out_dtype_fallback(op, dtype, *args)

    below = nullcontext() if torch_function else torch._C.DisableTorchFunctionSubclass()
    with torch.inference_mode(False), torch.no_grad(), fake_mode, enable_python_dispatcher(), below:
        return make_fx(function, decomposition_table={out_dtype: typed})(*arguments)  # type: ignore[dict-item]
