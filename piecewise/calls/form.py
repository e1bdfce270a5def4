"""Decides whether a call's form matters: which arguments are positional, and which are passed [I10].

forward itself cannot tell `model(ids)` from `model(ids=ids)`, but code that is called earlier can: a hook, a
wrapper of forward, or the model's own `__call__`. If a model has one, each form of a call is a kind of its
own, traced in this form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as module_hooks

from piecewise.calls.binder import CallBinder, FormBinder
from piecewise.errors.trace import BackwardHook

# Wrappers from these packages treat both forms alike; the tests call attached models in both.
_FORM_BLIND = frozenset({"torch", "transformers", "boundary_ops"}) | sys.stdlib_module_names
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Binders:
    """Binds the calls of `forward`, with one binder per answer of `sees_form`."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model, self._forward = model, forward
        own = model.forward if forward is model else forward
        self._by_form = {False: CallBinder(own), True: FormBinder(own)}

    def for_now(self) -> CallBinder:
        """Returns the binder for the model's present hooks; the same object each time."""
        return self._by_form[sees_form(self._model, self._forward)]


def sees_form(model: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a call passes code that may read its form; hooks run around the model's forward."""
    if forward is not model:
        return is_wrapped(forward)
    ways = type(model).__call__, type(model)._call_impl
    hooks = [getattr(model, name) for name in _HOOKS]
    hooks += [getattr(module_hooks, f"_global{name}") for name in _HOOKS]
    return any(hooks) or not all(map(_is_form_blind, ways)) or is_wrapped(model.forward)


def is_wrapped(forward: Callable[..., Any]) -> bool:
    """Whether forward is more than a function with the parameters of its signature."""
    function: Any = getattr(forward, "__func__", forward)
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        if not _is_form_blind(function):
            return True
        function = function.__wrapped__
    return not isinstance(function, FunctionType) or hasattr(function, "__signature__")


def refuse_backward_hooks(model: nn.Module, *, skip_root: bool) -> None:
    """Raises `BackwardHook`, which names the module, for hooks that Dynamo does not trace."""
    for path, module in model.named_modules():
        if skip_root and not path:  # they run around the forward that is traced
            continue
        if module._backward_pre_hooks or (module._backward_hooks and module._is_full_backward_hook):
            owner = f"'{path}'" if path else "the model"
            raise BackwardHook(owner=f"{owner} ({type(module).__name__})")
    is_full = module_hooks._global_is_full_backward_hook
    if module_hooks._global_backward_pre_hooks or (module_hooks._global_backward_hooks and is_full):
        like = "torch.nn.modules.module.register_module_full_backward_hook and its like"
        raise BackwardHook(owner=f"every module ({like})")


def _is_form_blind(function: Any) -> bool:
    where = getattr(function, "__globals__", {}).get("__name__")
    return str(where).partition(".")[0] in _FORM_BLIND
