"""Finds what the placeholders of a Dynamo run stand for, and how to rebuild forward's result.

If a dummy is not in the result, forward stored it: a side effect that a replay would drop.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from piecewise.calls.structure import PLAIN, Structure, flatten_structure
from piecewise.errors.trace import (
    NumpyValue,
    OpaqueResult,
    ResultWithoutSource,
    StoresState,
    TensorWithoutPath,
)
from piecewise.ir.array_places import ArrayPlace, array_source
from piecewise.ir.plan import ResultLeaf, WrappedLeaf
from piecewise.ir.tensors import storage_of
from piecewise.trace.dynamo.run import FIRST_DUMMY, DynamoRun
from piecewise.trace.dynamo.sources import Scope, resolve
from piecewise.trace.trace import Placeholder
from runners.state.state_check import StateRef


def placeholders_of(run: DynamoRun, scope: Scope) -> tuple[Placeholder, ...]:
    """Finds what each placeholder stands for; raises if a tensor cannot be found again from the model."""
    pairs = zip(run.placeholders(), run.arguments, strict=True)
    return tuple(_placeholder(run, node, argument, scope) for node, argument in pairs)


def _placeholder(run: DynamoRun, node: fx.Node, argument: Any, scope: Scope) -> Placeholder:
    source = run.sources[node.name]
    for index, leaf in enumerate(run.leaves):
        if argument is leaf if isinstance(leaf, torch.Tensor) else source == f"L['i{index}']":
            return Placeholder(node, "input", leaf=index)
    if not isinstance(argument, torch.Tensor):
        return Placeholder(node, "symbol")
    state = _state_at(source, argument, scope) if source else None
    if state is None and source and array_source(source) is not None:
        raise NumpyValue(value=_brief_value(source, scope))
    if state is None:
        raise TensorWithoutPath(source=source or "an unnamed source")
    return Placeholder(node, "state", state=state)


def _brief_value(source: str, scope: Scope) -> str:
    try:
        value = scope.find(array_source(source) or source).value
    except (KeyError, AttributeError, IndexError, ValueError):
        return source
    return f"{str(value)[:60]} ({type(value).__name__})"


def _state_at(source: str, argument: torch.Tensor, scope: Scope) -> StateRef | None:
    """Finds the place of the tensor at a Dynamo source; None if another object is there."""
    array = array_source(source)
    if array is None:
        state = resolve(source, scope)
        return state if state is not None and state.get() is argument else None
    place = resolve(array, scope)
    state = ArrayPlace.ref(place) if place is not None else None
    return state if state is not None and state.get() is not None else None


def result_of(
    run: DynamoRun, placeholders: Sequence[Placeholder]
) -> tuple[Structure, tuple[ResultLeaf, ...], tuple[WrappedLeaf, ...]]:
    """Finds the result's structure, the source of each leaf, and the leaves of another class. Raises if the
    result cannot be rebuilt, or if forward stored some of it elsewhere."""
    by_id = {id(dummy): index for index, dummy in enumerate(run.dummies)}
    numbers = {FIRST_DUMMY + index: index for index in range(len(run.dummies))}
    structure, leaves = flatten_structure(
        run.result, is_leaf=lambda value: type(value) is float and value in numbers, share=True
    )
    _refuse_opaque(structure, run.leaves)
    found: list[ResultLeaf] = []
    wrapped: list[WrappedLeaf] = []
    for leaf in leaves:
        source = next((index for index, given in enumerate(run.leaves) if given is leaf), None)
        if id(leaf) in by_id:
            found.append(ResultLeaf("output", by_id[id(leaf)]))
        elif (dummy := _dummy_of(leaf, run.dummies)) is not None:
            wrapped.append((len(found), (len(found),), functools.partial(_with_class, type(leaf))))
            found.append(ResultLeaf("output", dummy))
        elif not isinstance(leaf, torch.Tensor) and leaf in numbers:
            found.append(ResultLeaf("output", numbers[leaf], value=type(leaf)))
        elif source is not None:
            found.append(ResultLeaf("input", source))
        elif isinstance(leaf, torch.Tensor):
            found.append(ResultLeaf("state", state=_state_of(run, leaf, placeholders)))
        else:
            found.append(ResultLeaf("const", value=leaf))
    missing = set(range(len(run.dummies))) - {leaf.index for leaf in found if leaf.kind == "output"}
    missing -= run.bound_again
    if missing:
        node = run.graph.graph.output_node().args[0][min(missing)]  # type: ignore[index]
        raise StoresState(
            f"forward stores the result of '{node}' outside its return value",
            fix="return it, keep it in a buffer written with copy_(), or pass use_cache=False to a "
            "transformers model",
        )
    return structure, tuple(found), tuple(wrapped)


def _refuse_opaque(node: Structure, given: Sequence[Any]) -> None:
    for child in node.children:
        _refuse_opaque(child, given)
    value = node.value
    # torch's own enums, written in C, have members but no common class.
    is_plain = isinstance(value, (*PLAIN, type, torch.Size)) or hasattr(type(value), "__members__")
    if node.kind == "const" and not is_plain and not any(value is item for item in given):
        raise OpaqueResult(value=f"an object of type {type(value).__name__}")


def _dummy_of(leaf: Any, dummies: Sequence[Any]) -> int | None:
    if not isinstance(leaf, torch.Tensor) or type(leaf) in (torch.Tensor, torch.nn.Parameter):
        return None
    plain = leaf.as_subclass(torch.Tensor)
    tensors = [(at, each) for at, each in enumerate(dummies) if isinstance(each, torch.Tensor)]
    return next((at for at, each in tensors if storage_of(each) == storage_of(plain)), None)


def _with_class(cls: type, given: Sequence[torch.Tensor]) -> torch.Tensor:
    return given[0].as_subclass(cls)


def _state_of(run: DynamoRun, leaf: torch.Tensor, placeholders: Sequence[Placeholder]) -> StateRef | None:
    for placeholder, argument in zip(placeholders, run.arguments, strict=True):
        if leaf is argument:
            return placeholder.state
    for path, module in run.model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is leaf:
                    return StateRef(table, key, ".".join(filter(None, ("model", path, key))))
    raise ResultWithoutSource()
