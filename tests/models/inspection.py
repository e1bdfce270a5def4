"""Shows tests what a graphed model holds inside, so that no test depends on where it is kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piecewise.api import graphs_of


class Inspection:
    """The memory, traces, plans and runners behind a `GraphedModule` or a `torch.compile` handle, as they are
    at the time of each question."""

    def __init__(self, graphed: Any) -> None:
        self._graphed = graphed

    @property
    def store(self) -> Any:
        """The store of the graphs."""
        return graphs_of(self._graphed)

    @property
    def pool(self) -> Any:
        """The pool of all graphs; None without graphs."""
        return self.store.pool

    @property
    def buffers(self) -> Any:
        """The static buffers."""
        return self.store.buffers

    @property
    def engine(self) -> Any:
        """What makes graphs; None before the first capture."""
        return self.store.engine

    @property
    def lowering(self) -> Any:
        """What compiles segments; None before the first capture."""
        return self.store.lowering

    @property
    def is_released(self) -> bool:
        """Whether the graphs were given back for good."""
        return self.store.is_released

    @property
    def signatures(self) -> list[Any]:
        """The captured signatures, in the order in which calls try them."""
        return self.store.signatures

    @property
    def signature(self) -> Any:
        """The signature that calls try first."""
        return self.signatures[0]

    @property
    def traced(self) -> Any:
        """Its first trace."""
        return self.signature.traced

    @property
    def layers(self) -> Any:
        """How that trace reused layers."""
        return self.traced.trace.layers

    @property
    def plan(self) -> Any:
        """The plan that was cut from that trace."""
        return self.signature.plan

    @property
    def assembler(self) -> Any:
        """What captures that plan."""
        return self.signature.assemblers[0]

    @property
    def runners(self) -> list[Any]:
        """The runner of each graph segment, of all plans of all signatures."""
        assemblers = [assembler for each in self.signatures for assembler in each.assemblers]
        return [runner for assembler in assemblers for runner in assembler.runners.values()]

    def steps(self, bucket: int) -> Any:
        """The step plan of a bucket."""
        return self.signature.served[bucket].steps

    @property
    def is_capturing(self) -> bool:
        """Whether the graphs are being changed now."""
        return self._router.is_capturing

    @property
    def is_locked(self) -> bool:
        """Whether a call, or a change of the graphs, is in progress."""
        return self._router._lock.locked()

    def exclusive(self, what: str) -> AbstractContextManager[None]:
        """A block in which calls wait, as in a change of the graphs."""
        return self._router.exclusive(what)

    @property
    def _router(self) -> Any:
        named = vars(self._graphed)
        return named["_router"] if "_router" in named else named["router"]


inspect: Callable[[Any], Inspection] = Inspection


class _Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def ops_in_graphs(graphed, rows=8):
    """The ops that the functions of the graph segments run."""
    plan = inspect(graphed).plan
    ops = _Ops()
    for segment in plan.graph_segments():
        values = [plan.values[index] for index in segment.inputs]
        inputs = [
            value.state.get()
            if value.state is not None
            else torch.empty_strided(value.sizes(rows), value.strides(rows), dtype=value.dtype).fill_(0)
            for value in values
        ]
        with torch.no_grad(), ops:
            segment.function(rows, *inputs)
    return ops.names
