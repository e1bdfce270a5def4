"""Hooks and adapters that come and go between two calls, each acted out: what the second call counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from adapted_models import adapted, come_to
from state_models import graph, new_model, serve, tokens
from torch.nn.modules import module as module_hooks

import piecewise


@dataclasses.dataclass(frozen=True)
class Change:
    """`act` makes a model, graphs it, changes it, and gives what the next call counts."""

    outcome: str
    act: Callable[[], str]


def _pre(module: Any, args: Any) -> Any:
    return tuple(ids + 1 for ids in args)


def _forward(module: Any, args: Any, result: Any) -> Any:
    return result * 2


def _after(change: Callable[[Any], Any], *, before: Callable[[Any], Any] = lambda model: None) -> str:
    """What the next call counts after a change of a captured model."""
    model = new_model()
    model.handle = before(model)
    graphed = graph(model, buckets=(8,))
    handle = change(model)
    try:
        return serve(graphed, tokens(5))
    finally:
        for each in (model.handle, handle):
            if hasattr(each, "remove"):
                each.remove()


def _replace_hook(model: Any) -> None:
    (key,) = model._forward_hooks
    model._forward_hooks[key] = lambda module, args, result: result * 3


def _in_other_form() -> str:
    model = new_model()
    model.register_forward_pre_hook(_pre)
    return serve(graph(model, buckets=(8,)), ids=tokens(5))


def _enabled_in_place() -> str:
    model = new_model()
    graphed = piecewise.enable(model, buckets=(8,), progress=False)
    graphed.capture(tokens(7))
    model.register_forward_pre_hook(_pre)
    return serve(graphed, tokens(5))


HOOKS = {
    "a pre-hook of the model is added": Change(
        "module_state_changed", lambda: _after(lambda model: model.register_forward_pre_hook(_pre))
    ),
    "a forward hook of the model is added": Change(
        "module_state_changed", lambda: _after(lambda model: model.register_forward_hook(_forward))
    ),
    "a hook of a submodule is added": Change(
        "module_state_changed", lambda: _after(lambda model: model.block.register_forward_hook(_forward))
    ),
    "a hook of all modules is added": Change(
        "module_state_changed",
        lambda: _after(lambda _: module_hooks.register_module_forward_hook(_forward)),
    ),
    "a hook is removed": Change(
        "module_state_changed",
        lambda: _after(
            lambda model: model.handle.remove(), before=lambda model: model.register_forward_hook(_forward)
        ),
    ),
    "a hook is replaced in its place": Change(
        "module_state_changed",
        lambda: _after(_replace_hook, before=lambda model: model.register_forward_hook(_forward)),
    ),
    "a full backward hook is added": Change(
        "replay", lambda: _after(lambda model: model.register_full_backward_hook(lambda *given: None))
    ),
    "a hook of a model that is enabled in place is added: it runs around the graphs": Change(
        "replay", _enabled_in_place
    ),
    "the model has hooks, and the call is by keyword, not by position": Change(
        "unseen_signature", _in_other_form
    ),
}


def _adapters(change: Callable[[Any, Callable[..., None]], Any], *captured: str) -> str:
    """What the next call counts after states were captured, the first one is back, and a change."""
    model, each = adapted()
    graphed = graph(model, captured=False, buckets=(8,))
    for state in captured or ("adapter a",):
        come_to(state, each)
        graphed.capture(tokens(7))
    come_to("adapter a", each)
    assert serve(graphed, tokens(5)) == "replay"
    with torch.no_grad():
        change(model, each)
    return serve(graphed, tokens(5))


def _comes_to(state: str) -> Callable[[Any, Callable[..., None]], None]:
    return lambda model, each: come_to(state, each)


def _merge_into_new_weights(model: Any, _: Any) -> None:
    layer = model.projection
    layer.base.weight.data = layer.base.weight + layer.delta("a")
    layer.merged_adapters.append("a")


def _delete(model: Any, _: Any) -> None:
    for layer in (model.block.o, model.projection):
        del layer.up["b"], layer.down["b"]


ADAPTERS = {
    "another adapter, not captured": Change(
        "module_state_changed", lambda: _adapters(_comes_to("adapter b"))
    ),
    "another adapter, captured": Change(
        "replay", lambda: _adapters(_comes_to("adapter b"), "adapter a", "adapter b")
    ),
    "adapters disabled, captured": Change(
        "replay", lambda: _adapters(_comes_to("no adapter"), "adapter a", "no adapter")
    ),
    "an adapter merged in place, captured": Change(
        "replay", lambda: _adapters(_comes_to("adapter a (merged)"), "adapter a", "adapter a (merged)")
    ),
    "an adapter merged into new weights": Change("moved_address", lambda: _adapters(_merge_into_new_weights)),
    "an adapter added": Change(
        "module_state_changed", lambda: _adapters(lambda model, each: each("add", "c"))
    ),
    "an adapter deleted that is not active": Change("module_state_changed", lambda: _adapters(_delete)),
    "values of an adapter written in place": Change(
        "replay", lambda: _adapters(lambda model, _: model.projection.up["a"].weight.mul_(2))
    ),
}
