"""What the placeholders of a Dynamo run stand for, and how its result is put together."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from piecewise.calls.structure import Structure, flatten_structure
from piecewise.ir.array_places import ArrayPlace, array_source
from piecewise.ir.plan import ResultLeaf, WrappedLeaf
from piecewise.ir.tensors import storage_of
from piecewise.trace.dynamo.run import FIRST_DUMMY, DynamoRun
from piecewise.trace.dynamo.sources import Scope, resolve
from piecewise.trace.errors import refuse_opaque
from runners.errors import TraceError
from runners.state.state_check import StateRef


@dataclasses.dataclass(frozen=True, slots=True)
class Placeholder:
    """What a graph placeholder stands for: an input leaf, state of the model, or a symbol's value."""

    node: fx.Node
    kind: str
    leaf: int = -1
    state: StateRef | None = None


def placeholders_of(run: DynamoRun, scope: Scope) -> tuple[Placeholder, ...]:
    """What each placeholder stands for.

    Raises:
        TraceError: a tensor that cannot be found again from the model.
    """
    pairs = zip(run.placeholders(), run.arguments, strict=True)
    return tuple(_placeholder(run, node, argument, scope) for node, argument in pairs)


def _placeholder(run: DynamoRun, node: fx.Node, argument: Any, scope: Scope) -> Placeholder:
    for index, leaf in enumerate(run.leaves):
        is_tensor = isinstance(leaf, torch.Tensor)
        if (is_tensor and argument is leaf) or (not is_tensor and run.sources[node.name] == f"L['i{index}']"):
            return Placeholder(node, "input", leaf=index)
    if not isinstance(argument, torch.Tensor):
        return Placeholder(node, "symbol")
    source = run.sources[node.name]
    state = _state_at(source, argument, scope) if source else None
    if state is None and source and array_source(source) is not None:
        raise TraceError(
            f"forward reads a NumPy value that has no place in the model: {_brief_value(source, scope)}",
            expected="torch tensors, and Python's own ints and floats, as arguments",
            rule="what a call brings anew is copied in, or is part of its signature [I2, I10]",
            fix="pass int(value), float(value) or torch.from_numpy(array)",
        )
    if state is None:
        raise TraceError(
            f"forward reads a tensor through {source or 'an unnamed source'}",
            expected="an attribute, dict entry or list item reached from the model",
            rule="a tensor that a graph reads needs a recorded path, so that a move is noticed [I4]",
            fix="keep it as a parameter, buffer or plain attribute of a module",
        )
    return Placeholder(node, "state", state=state)


def _brief_value(source: str, scope: Scope) -> str:
    try:
        value = scope.find(array_source(source) or source).value
    except (KeyError, AttributeError, IndexError, ValueError):
        return source
    return f"{str(value)[:60]} ({type(value).__name__})"


def _state_at(source: str, argument: torch.Tensor, scope: Scope) -> StateRef | None:
    """The place of a tensor that Dynamo found at a source; None where it is not found there again."""
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
    """How the result is put together, where each of its leaves comes from, and which ones get another class.

    Raises:
        TraceError: it cannot be put together again, or forward kept some of it elsewhere.
    """
    by_id = {id(dummy): index for index, dummy in enumerate(run.dummies)}
    numbers = {FIRST_DUMMY + index: index for index in range(len(run.dummies))}
    structure, leaves = flatten_structure(
        run.result, is_leaf=lambda value: type(value) is float and value in numbers, share=True
    )
    refuse_opaque(structure, run.leaves)
    found: list[ResultLeaf] = []
    wrapped: list[WrappedLeaf] = []
    for leaf in leaves:
        if id(leaf) in by_id:
            found.append(ResultLeaf("output", by_id[id(leaf)]))
        elif (dummy := _dummy_of(leaf, run.dummies)) is not None:
            wrapped.append((len(found), (len(found),), functools.partial(_with_class, type(leaf))))
            found.append(ResultLeaf("output", dummy))
        elif isinstance(leaf, torch.Tensor):
            found.append(_tensor_leaf(run, leaf, placeholders))
        elif leaf in numbers:
            found.append(ResultLeaf("output", numbers[leaf], value=type(leaf)))
        else:
            source = next((i for i, given in enumerate(run.leaves) if given is leaf), None)
            found.append(ResultLeaf("const", value=leaf) if source is None else ResultLeaf("input", source))
    missing = set(range(len(run.dummies))) - {leaf.index for leaf in found if leaf.kind == "output"}
    missing -= run.bound_again
    if missing:
        node = run.graph.graph.output_node().args[0][min(missing)]  # type: ignore[index]
        raise TraceError(
            f"forward stores the result of '{node}' outside its return value",
            rule="a replay runs none of the model's Python, so what forward stores would be stale [I8]",
            fix="return it, keep it in a buffer written with copy_(), "
            "or pass use_cache=False to a transformers model",
        )
    return structure, tuple(found), tuple(wrapped)


def _dummy_of(leaf: Any, dummies: Sequence[Any]) -> int | None:
    """Which dummy a tensor is that Dynamo has given a class with `as_subclass`."""
    if not isinstance(leaf, torch.Tensor) or type(leaf) in (torch.Tensor, torch.nn.Parameter):
        return None
    plain = leaf.as_subclass(torch.Tensor)
    tensors = [(at, each) for at, each in enumerate(dummies) if isinstance(each, torch.Tensor)]
    return next((at for at, each in tensors if storage_of(each) == storage_of(plain)), None)


def _with_class(cls: type, given: Sequence[torch.Tensor]) -> torch.Tensor:
    return given[0].as_subclass(cls)


def _tensor_leaf(run: DynamoRun, leaf: torch.Tensor, placeholders: Sequence[Placeholder]) -> ResultLeaf:
    for index, given in enumerate(run.leaves):
        if leaf is given:
            return ResultLeaf("input", index)
    for placeholder, argument in zip(placeholders, run.arguments, strict=True):
        if leaf is argument:
            return ResultLeaf("state", state=placeholder.state)
    for path, tensor in itertools.chain(run.model.named_parameters(), run.model.named_buffers()):
        if leaf is tensor:
            owner, _, key = path.rpartition(".")
            module = run.model.get_submodule(owner)
            table = module._parameters if key in module._parameters else module._buffers
            return ResultLeaf("state", state=StateRef(table, key, f"model.{path}"))
    raise TraceError(
        "forward returns a tensor that is neither computed, an input, nor a parameter or buffer",
        rule="every output has a source that a replay can renew [I7]",
        fix="register it as a buffer",
    )
