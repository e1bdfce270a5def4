"""Opens state that is a tensor subclass: the trace reads the plain tensors inside, each at its own place.

Calls compare each place like a weight, through the subclass [I4]. Attributes of the subclass that decide
something, such as a block size or the activations' quantisation, are facts of the trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from piecewise import torch_api
from piecewise.errors.trace import InputNotPlain
from piecewise.ir.plan import ResultLeaf
from piecewise.trace.subclasses.kinds import refuse_class
from piecewise.trace.subclasses.subclasses import Wrapped
from piecewise.trace.trace import Placeholder, Trace
from runners.state.state_check import InnerRef, StateRef


def mark_subclasses(trace: Trace) -> None:
    """Prepares the graph, in place, for `see_through`: marks nodes whose class code Dynamo has followed."""
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


def _drop_idle_sets(trace: Trace) -> None:
    """Drops `weight.data = x` where the weight lies there already, as bitsandbytes writes in each call. A
    graph that reads either tensor compares its present address [I4]."""
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


def open_state(trace: Trace, wrapped: Mapping[int, Wrapped]) -> Trace:
    """Makes the trace of the graph after `see_through`, which returned `wrapped`. Tensors inside of results
    that are subclasses become leaves, after all others."""
    leaves, made_of = list(trace.result_leaves), list(trace.wrapped)
    for place, leaf in enumerate(trace.result_leaves):
        if leaf.kind == "output" and leaf.index in wrapped:
            made = wrapped[leaf.index]
            made_of.append((place, tuple(range(len(leaves), len(leaves) + len(made.parts))), made.make))
            leaves[place] = ResultLeaf("const")
            leaves += [ResultLeaf("output", part) for part in made.parts]
    return dataclasses.replace(
        trace, placeholders=_opened(trace), result_leaves=tuple(leaves), wrapped=tuple(made_of)
    )


def _opened(trace: Trace) -> tuple[Placeholder, ...]:
    known = {placeholder.node: placeholder for placeholder in trace.placeholders}
    found: list[Placeholder] = []
    places: dict[tuple[int, str], StateRef] = {}
    for node in trace.graph.graph.find_nodes(op="placeholder"):
        inner = node.meta.get("inner")
        if inner is None:
            found.append(known[node])
            continue
        given = known[inner.outer]
        place = given.state
        if place is None:
            name = trace.example.names.get(given.leaf, given.leaf)
            raise InputNotPlain(name=name, kind="a tensor subclass")
        for key in inner.keys:
            place = places.setdefault((id(place), key), InnerRef(place, key, f"{place.path}.{key}"))
        found.append(Placeholder(node, "state", state=place))
    return tuple(found)
