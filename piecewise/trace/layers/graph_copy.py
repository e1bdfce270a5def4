"""Copies the calls of one graph into another, with fakes from running each call or from a similar copy.

A node's result and its memory follow from the op and from the sizes, strides and shared memory of its
arguments. If two copies have arguments that agree in these, the second copy takes the first one's fakes,
moved to the memory of its own arguments, and runs no op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from piecewise import torch_api
from piecewise.ir.nodes import call_on_fakes
from piecewise.ir.tensors import map_tensors, storage_of, tensors_in


def copy_calls(
    graph: fx.Graph,
    values: dict[fx.Node, Any],
    place: fx.Node,
    *,
    like: Mapping[fx.Node, Any] | None,
    fake_mode: Any,
    meta_of: Callable[[fx.Node], dict[str, Any]],
) -> dict[fx.Node, Any]:
    """Copies the calls of `graph` in front of `place`; returns the fake of each of its nodes in the copy.

    Args:
        values: placeholder → argument; the copies are added.
        like: fakes of a copy with equivalent arguments; None runs each node.
        meta_of: the copy's ``meta``, without its fake.
    """
    fakes = _Fakes(values, like, fake_mode)
    with place.graph.inserting_before(place):
        for node in graph.nodes:
            if node.op.startswith("call"):
                copy = values[node] = place.graph.node_copy(node, lambda old: values[old])
                copy.meta = meta_of(node)
                copy.meta["example_value"] = fakes.of(node, copy)
    return fakes.values


class _Fakes:
    """Makes the fakes of one copy in order."""

    def __init__(
        self, arguments: Mapping[fx.Node, Any], like: Mapping[fx.Node, Any] | None, fake_mode: Any
    ) -> None:
        self._like, self._fake_mode = like, fake_mode
        # Tensor or memory of the other copy → the one in this copy.
        self._twins: dict[int, torch.Tensor] = {}
        self._memory: dict[int, torch.Tensor] = {}
        taken: dict[int, int] = {}
        self.values: dict[fx.Node, Any] = {}
        for node, argument in arguments.items():
            value = argument.meta["example_value"] if isinstance(argument, fx.Node) else argument
            self.values[node] = value
            if self._like is not None and isinstance(value, torch.Tensor):
                old = self._like[node]
                there, here = storage_of(old), storage_of(value)
                known = self._memory.setdefault(there, value)
                if storage_of(known) != here or taken.setdefault(here, there) != there:
                    self._like = None  # memory is shared in one of the copies alone
                self._twins[id(old)] = value

    def of(self, node: fx.Node, copy: fx.Node) -> Any:
        old = self._like[node] if self._like is not None else None
        if self._like is None or any(map(torch_api.holds_constant, tensors_in(old))):
            found = call_on_fakes(copy, self._fake_mode)
            for tensor, twin in zip(tensors_in(old), tensors_in(found), strict=False):
                self._twins[id(tensor)] = self._memory[storage_of(tensor)] = twin
        else:
            found = map_tensors(old, self._twin)
        self.values[node] = found
        return found

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._twins:
            twin = torch_api.fake_twin(tensor, self._memory.get(storage_of(tensor)))
            self._memory.setdefault(storage_of(tensor), twin)
            self._twins[id(tensor)] = twin
        return self._twins[id(tensor)]
