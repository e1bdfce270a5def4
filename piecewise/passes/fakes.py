"""Keeps the fakes in ``meta["val"]`` true while a graph is rewritten."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from piecewise import torch_api
from piecewise.ir.graph_key import argument_key
from piecewise.ir.tensors import storage_of

aten = torch.ops.aten

# Views that fail on some strides; after a rewrite their input may be a slice with such strides.
_STRICT_VIEWS = (aten.view.default, aten._unsafe_view.default)


def value_of(node: Any) -> Any:
    """Returns a node's fake, or a constant as it is."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def run_node(node: fx.Node, fake_mode: Any, *, target: Any = None) -> Any:
    """Computes the node's result on its inputs' fakes, with its own op or with `target`."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    with fake_mode, torch_api.python_dispatcher(), torch.no_grad():
        call: Any = target or node.target
        return call(*args, **kwargs)


def propagate(graph: fx.Graph, fake_mode: Any) -> None:
    """Updates the fakes of new nodes and of all that depends on them; a view that its input's new strides do
    not allow becomes a reshape, which copies."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if "val" in node.meta and not any(each in changed for each in node.all_input_nodes):
            continue
        try:
            node.meta["val"] = run_node(node, fake_mode)
        except (RuntimeError, ValueError):
            if node.target not in _STRICT_VIEWS:
                raise
            node.target = aten.reshape.default
            node.meta["val"] = run_node(node, fake_mode)
        changed.add(node)


def geometry(value: Any) -> Any:
    """Returns a tensor's dtype, device, sizes and strides, or a scalar's expression, as comparable values."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.device, sizes(value.shape), sizes(value.stride()))
    if isinstance(value, (tuple, list)):
        return tuple(map(geometry, value))
    return sizes((value,))


def sizes(values: Any) -> tuple[Any, ...]:
    """Returns ints and symbolic ints as values whose comparison adds no guard."""
    return tuple(value.node.expr if isinstance(value, torch.SymInt) else value for value in values)


def frozen(value: Any) -> Any:
    """Returns a node's arguments as comparable values: 0.0 differs from -0.0, and 1 from 1.0 and True."""

    def number(value: Any) -> Any:
        return value.node.expr if isinstance(value, torch_api.SYMBOLIC) else (type(value), repr(value))

    return argument_key(value, node=lambda node: node, number=number)


def memory_of(value: Any) -> int | None:
    """Returns the identity of a fake tensor's storage; None for anything else."""
    return storage_of(value) if isinstance(value, torch.Tensor) else None
