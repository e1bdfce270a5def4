"""Defines a trace, whichever front end makes it: a model and an example call become one flat graph.

A `FrontEnd` traces without running the model, as `dynamo/front_end.py` does; `front_end` finds one by name.
"""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import sympy
import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.calls.binder import CallBinder
from piecewise.calls.structure import Structure, flatten_structure
from piecewise.errors.trace import MissingArguments
from piecewise.ir.plan import ResultLeaf, WrappedLeaf
from piecewise.report.startup_times import LayerReuse
from piecewise.settings.front_ends import FRONT_ENDS
from runners.state.state_check import StateFacts, StateRef


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleCall:
    """Holds an example call's bound values, flattened.

    Attributes:
        values: structure of the bound parameter values.
        leaves: tensors (as passed by the user) and ints, one per leaf index.
        names: leaf index → the user's name for it.
        args, kwargs: the call as it was made, to be bound again if the model's hooks change.
    """

    binder: CallBinder
    values: Structure
    leaves: tuple[Any, ...]
    names: Mapping[int, str]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_call(cls, binder: CallBinder, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExampleCall:
        """Binds and flattens a call; raises TypeError or `MissingArguments` if it does not fit."""
        bound = binder.bind(*args, **kwargs)
        if absent := binder.absent(bound):
            raise MissingArguments(missing=", ".join(map(repr, absent)), names=", ".join(binder.names))
        values, leaves = flatten_structure(bound)
        return cls(binder, values, tuple(leaves), binder.leaf_paths(values), tuple(args), kwargs)


class Placeholder(NamedTuple):
    """Describes what a placeholder stands for: an input leaf, state of the model, or a symbol's value."""

    node: fx.Node
    kind: str
    leaf: int = -1
    state: StateRef | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Holds one traced forward.

    Attributes:
        graph: calls of torch functions and methods; each node has its fake in ``meta["example_value"]``.
        placeholders: one per placeholder node, in order.
        result: structure of the result; `result_leaves` has one entry per leaf index.
        shape_env: simplifies symbols; None for a graph without any.
        state_facts: the model's Python state that the trace read; none if not asked for.
        leaves_seen: input tensors that forward read, if only their sizes.
        reads_flags: whether forward may ask if an input is a Parameter or requires grad.
        layers: how many layers were traced; None for a model without repeated layers.
        wrapped: leaves of the result that are tensor subclasses.
    """

    graph: fx.GraphModule
    placeholders: tuple[Placeholder, ...]
    result: Structure
    result_leaves: tuple[ResultLeaf, ...]
    shape_env: torch_api.ShapeEnv | None
    state_facts: StateFacts
    example: ExampleCall
    leaves_seen: frozenset[int] = frozenset()
    reads_flags: bool = False
    layers: LayerReuse | None = None
    wrapped: tuple[WrappedLeaf, ...] = ()

    def symbols_of_leaf(self, leaf: int) -> tuple[sympy.Expr, ...]:
        """Simplifies the sizes of an input tensor; empty for one that the graph does not read."""
        for placeholder in self.placeholders:
            fake = placeholder.node.meta["example_value"]
            if placeholder.kind == "input" and placeholder.leaf == leaf and isinstance(fake, torch.Tensor):
                return tuple(torch_api.expression(size, self.shape_env) for size in fake.shape)  # type: ignore[misc]
        return ()


class FrontEnd(Protocol):
    """Traces `forward(model's call)` with the example's structure; neither runs nor changes the model."""

    def __call__(
        self,
        model: nn.Module,
        example: ExampleCall,
        *,
        forward: Any,
        static_dims: Mapping[int, Sequence[int]] = {},
    ) -> Trace:
        """Makes the trace.

        Args:
            forward: the callable to trace; reached from `model` (the module itself, or its own forward).
            static_dims: leaf index → dims that get no symbol; an int argument in here gets none either.
        Raises:
            TraceError: forward cannot be one graph, has side effects, or returns what cannot be rebuilt.
        """


@functools.cache
def front_end(name: str) -> FrontEnd:
    """Loads the front end of that name, a key of `FRONT_ENDS`."""
    return pkgutil.resolve_name(FRONT_ENDS[name])
