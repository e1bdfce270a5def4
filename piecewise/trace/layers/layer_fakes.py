"""Fakes of a layer's nodes: from running each on fakes, or as twins of those of a layer like it.

What a node makes, and in whose memory, follows from its op and from the sizes, strides and shared memory of
what it is given. So where two layers are alike in these, the second layer's fakes are the first one's, moved
to the memory of its own arguments: not one op has to be run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from piecewise import torch_api
from piecewise.ir.nodes import call_on_fakes
from piecewise.ir.tensors import map_tensors, storage_of, tensors_in


class LayerFakes:
    """The fakes of one layer's nodes, made one after the other.

    Args:
        arguments: what stands for each placeholder of the layer's graph.
        like: the values of the same nodes in a layer that is called alike; None runs each node.
    """

    def __init__(
        self, arguments: Mapping[fx.Node, Any], like: Mapping[fx.Node, Any] | None, fake_mode: Any
    ) -> None:
        self._fake_mode = fake_mode
        # What is a tensor of that layer, or its memory, in this one.
        self._twins: dict[int, torch.Tensor] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._like = like
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
                    self._like = None  # memory is shared in one of the layers alone
                self._twins[id(old)] = value

    def of(self, node: fx.Node, copy: fx.Node) -> Any:
        """The value of a node of the layer's graph, of which `copy` is in the graph around it."""
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
