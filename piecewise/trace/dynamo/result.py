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
from piecewise.errors import trace as errors
from piecewise.ir.plan import ResultLeaf, WrappedLeaf
from piecewise.ir.tensors import ArrayPlace, array_source, storage_of
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
    array = array_source(source) if source else None
    state = resolve(array or source, scope) if source else None
    if array is not None:
        state = StateRef(ArrayPlace(state), 0, state.path) if state is not None else None
        if state is None or state.get() is None:
            raise errors.NumpyValue(value=_brief_value(array, scope) or source)
    if state is None or not (array or state.get() is argument):  # another object is there
        raise errors.TensorWithoutPath(source=source or "an unnamed source")
    return Placeholder(node, "state", state=state)


def _brief_value(source: str, scope: Scope) -> str | None:
    try:
        value = scope.find(source).value
    except (KeyError, AttributeError, IndexError, ValueError):
        return None
    return f"{str(value)[:60]} ({type(value).__name__})"


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
        raise errors.StoresState(
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
        raise errors.OpaqueResult(value=f"an object of type {type(value).__name__}")


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
    raise errors.ResultWithoutSource()
