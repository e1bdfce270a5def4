"""A trace in the form that is classified, with state that is a tensor subclass as its plain tensors.

Each has a place of its own, found through the subclass, and calls compare it like a weight [I4]. What else
decided, such as a block size or how activations are quantised, are attributes of the subclass; they are facts
of the trace, with what lies inside of them [I10].
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from piecewise import torch_api
from piecewise.calls.structure import PLAIN
from piecewise.ir.plan import ResultLeaf
from piecewise.trace.dynamo.result import Placeholder
from piecewise.trace.subclasses.kinds import refuse_class
from piecewise.trace.subclasses.subclasses import Wrapped
from piecewise.trace.trace import Trace
from runners.errors import TraceError
from runners.state.same_value import table_content
from runners.state.state_check import InnerRef, StateFacts, StateRef

# Attributes of attributes hold what decides; deeper ones are found by nobody.
_DEPTH = 4
_SETTLED = (type, ModuleType, FunctionType, MethodType, enum.Enum, torch.Tensor)


def prepare_subclasses(trace: Trace) -> None:
    """Refuses state of a class that cannot be seen through, and marks a graph of ops below theirs.

    Raises:
        TraceError: state is of such a class.
    """
    for placeholder in trace.placeholders:
        place = placeholder.state
        tensor = place.get() if place is not None else None
        if isinstance(tensor, torch.Tensor) and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            assert place is not None
            refuse_class(place.path, tensor)
            if torch_api.has_torch_function(tensor):
                for node in trace.graph.graph.nodes:
                    node.meta["below_torch_function"] = True
    _drop_idle_sets(trace)


def open_subclasses(trace: Trace, wrapped: dict[int, Wrapped]) -> Trace:
    """The trace of a graph that `see_through` has rewritten: state and results as the plain tensors inside.

    Raises:
        TraceError: an input is a tensor subclass.
    """
    placeholders, facts = _opened(trace)
    return _with_wrapped(dataclasses.replace(trace, placeholders=placeholders, state_facts=facts), wrapped)


def _drop_idle_sets(trace: Trace) -> None:
    """Drops `weight.data = x` where the weight lies there already: bitsandbytes says so in each call.

    Whatever reads either tensor in a graph is compared with its address of now [I4].
    """
    state = {placeholder.node: placeholder.state for placeholder in trace.placeholders}
    for node in list(trace.graph.graph.nodes):
        if node.op != "call_function" or node.target is not torch.Tensor.set_ or len(node.args) != 2:
            continue
        places = [state.get(argument) for argument in node.args]
        tensors = [place.get() for place in places if place is not None]
        if len(tensors) == 2 and _place_of(tensors[0]) == _place_of(tensors[1]):
            for user in [user for user in node.users if "_lower_version_count" in str(user.target)]:
                trace.graph.graph.erase_node(user)
            node.replace_all_uses_with(node.args[0])
            trace.graph.graph.erase_node(node)


def _place_of(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.untyped_storage().data_ptr()


def _opened(trace: Trace) -> tuple[tuple[Placeholder, ...], StateFacts]:
    """The placeholders that the graph has now, and what the trace counts on."""
    known = {placeholder.node: placeholder for placeholder in trace.placeholders}
    found: list[Placeholder] = []
    places: dict[tuple[int, str], StateRef] = {}
    facts = _Facts()
    for node in trace.graph.graph.find_nodes(op="placeholder"):
        inner = node.meta.get("inner")
        if inner is None:
            found.append(known[node])
            continue
        given = known[inner.outer]
        place = given.state
        if place is None:
            raise TraceError(
                f"input '{trace.example.names.get(given.leaf, given.leaf)}' is a tensor subclass",
                expected="a plain tensor",
                rule="graphs read static buffers, which are plain memory [I4]",
                fix="convert it before the call, or keep it inside the model",
            )
        for key in inner.keys:
            facts.add(place)
            place = places.setdefault((id(place), key), InnerRef(place, key, f"{place.path}.{key}"))
        found.append(Placeholder(node, "state", state=place))
    return tuple(found), facts.added_to(trace.state_facts)


class _Facts:
    """What is in the attributes of tensor subclasses, each place once."""

    def __init__(self) -> None:
        self._values: list[tuple[StateRef, Any]] = []
        self._tables: list[tuple[Any, Any, str]] = []
        self._types: list[tuple[Any, type, str]] = []
        self._seen: dict[int, Any] = {}

    def add(self, place: StateRef) -> None:
        """Adds the attributes of the subclass that is at a place, but for its tensors."""
        holder = place.get()
        if id(holder) in self._seen or not torch_api.is_wrapper(holder):
            return
        self._seen[id(holder)] = holder
        for name, value in vars(holder).items():
            # Dynamo's own marks come and go.
            if not isinstance(value, torch.Tensor) and not name.startswith("_dynamo"):
                ref = InnerRef(place, name, f"{place.path}.{name}")
                self._values.append((ref, value))
                self._add_content(value, ref.path, _DEPTH)

    def added_to(self, facts: StateFacts) -> StateFacts:
        return dataclasses.replace(
            facts,
            values=(*facts.values, *self._values),
            tables=(*facts.tables, *self._tables),
            types=(*facts.types, *self._types),
        )

    def _add_content(self, value: Any, path: str, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, (int, *PLAIN, *_SETTLED)) or not depth:
            return
        self._seen[id(value)] = value
        if isinstance(value, (list, dict, set)):
            self._tables.append((value, table_content(value), path))
        elif type(getattr(value, "__dict__", None)) is dict:
            self._types.append((value, type(value), path))
        for place, item in _places_in(value, path):
            self._values.append((place, item))
            self._add_content(item, place.path, depth - 1)


def _places_in(value: Any, path: str) -> Iterator[tuple[StateRef, Any]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield StateRef(value, index, f"{path}.{index}"), item
    attributes = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    for key, item in list(attributes.items()) if isinstance(attributes, dict) else ():
        yield StateRef(attributes, key, f"{path}.{key}"), item


def _with_wrapped(trace: Trace, wrapped: dict[int, Wrapped]) -> Trace:
    """The trace with the tensors inside of results that are subclasses as leaves, behind all others."""
    leaves, found = list(trace.result_leaves), list(trace.wrapped)
    for place, leaf in enumerate(trace.result_leaves):
        if leaf.kind == "output" and leaf.index in wrapped:
            made = wrapped[leaf.index]
            found.append((place, tuple(range(len(leaves), len(leaves) + len(made.parts))), made.make))
            leaves[place] = ResultLeaf("const")
            leaves += [ResultLeaf("output", part) for part in made.parts]
    return dataclasses.replace(trace, result_leaves=tuple(leaves), wrapped=tuple(found))
