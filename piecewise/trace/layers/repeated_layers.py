"""Finds a model's layers of one kind, and keeps Dynamo from tracing each of them.

During a run each such layer's `forward` is one op, `call_layer`, which Dynamo does not trace into; hooks and
the loop around the layers are traced as usual. On fakes the op returns a tensor like its first one;
`layer_reuse.py` proves that or does without. In another thread the op runs the layer's forward.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from piecewise import torch_api
from piecewise.ir.tensors import map_tensors

# Tracing fewer layers one by one is as fast.
_MIN_LAYERS = 3
# A linear or a norm alone is not worth it.
_MIN_SUBMODULES = 3
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class RepeatedLayer:
    """Describes one of several siblings of one class; `source` leads to it from ``L['model']``."""

    number: int
    module: nn.Module
    source: str


def repeated_layers(model: nn.Module) -> list[RepeatedLayer]:
    """Finds the outermost modules with at least two siblings of their class in one container."""
    found: dict[int, RepeatedLayer] = {}

    def walk(module: nn.Module, source: str) -> None:
        children = {key: child for key, child in module._modules.items() if child is not None}
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        kinds = Counter(map(type, children.values()))
        for key, child in children.items():
            place = f"{source}._modules[{key!r}]"
            if is_container and kinds[type(child)] >= _MIN_LAYERS and _is_worth_it(child):
                found.setdefault(id(child), RepeatedLayer(next(_numbers), child, place))
            else:
                walk(child, place)

    walk(model, "L['model']")
    return list(found.values())


def _is_worth_it(layer: nn.Module) -> bool:
    is_code = isinstance(layer, (torch.jit.ScriptModule, torch.fx.GraphModule))
    is_large = sum(1 for _ in layer.modules()) > _MIN_SUBMODULES
    return is_large and not is_code and "forward" not in layer.__dict__


# Layers that are ops now. The modules outlive the block, since another trace may have seen the op.
_active: set[int] = set()
_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
# Held while layers are ops, so that no other trace of ours takes the op for a layer's own forward.
one_at_a_time = threading.RLock()


@torch.compiler.allow_in_graph
def call_layer(number: int, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of a layer, as one op."""
    given: list[torch.Tensor] = []
    map_tensors((args, kwargs), given.append)
    if number in _active and any(map(torch_api.is_fake, given)):
        like = given[0]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    module = _modules[number]
    return type(module).forward(module, *args, **kwargs)


@contextmanager
def layers_as_ops(layers: Sequence[RepeatedLayer]) -> Iterator[None]:
    """Turns each layer's forward into one op inside the block."""
    try:
        for layer in layers:
            _modules[layer.number] = layer.module
            _active.add(layer.number)
            layer.module.__dict__["forward"] = _forward_of(layer)
        yield
    finally:
        for layer in layers:
            layer.module.__dict__.pop("forward", None)
            _active.discard(layer.number)


def _forward_of(layer: RepeatedLayer) -> Any:
    # The number is part of the code, not a closure that Dynamo would guard.
    names: dict[str, Any] = {"call_layer": call_layer}
    exec(f"def forward(*args, **kwargs):\n    return call_layer({layer.number}, *args, **kwargs)", names)
    names["forward"].__signature__ = inspect.signature(layer.module.forward)
    return names["forward"]
