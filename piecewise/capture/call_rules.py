"""Writes the matcher of the calls that a trace is valid for: what each leaf of a call must be [I10]."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from piecewise import torch_api
from piecewise.calls.binder import LeafRule, WrittenMemory, same_count, write_matcher
from piecewise.capture.analyse import TracedModel
from piecewise.errors.capture import InputsShareMemory
from piecewise.ir.effects import written_storages
from piecewise.ir.plan import SegmentPlan
from piecewise.ir.tensors import storage_of
from piecewise.trace.trace import ExampleCall
from runners.state.state_check import StateRef


def is_alike(first: TracedModel, other: TracedModel) -> bool:
    """Whether both traces recognise calls and rebuild results in the same way."""
    rules, others = leaf_rules(first), leaf_rules(other)
    if _written_memory(first) != _written_memory(other):
        return False
    return first.trace.result == other.trace.result and all(
        rule.static == others[leaf].static and rule.exact == others[leaf].exact
        for leaf, rule in rules.items()
    )


def leaf_rules(traced: TracedModel) -> dict[int, LeafRule]:
    """Finds what each leaf of a call must be: leaf index → rule."""
    trace, example = traced.trace, traced.trace.example
    symbolic = torch_api.symbolic_sizes(trace.shape_env)
    for placeholder in trace.placeholders:
        expr = torch_api.expression(placeholder.node.meta.get("example_value"), trace.shape_env)
        if placeholder.kind == "input" and expr is not None:
            symbolic[placeholder.leaf, -1] = expr
    read = {placeholder.leaf for placeholder in trace.placeholders if placeholder.kind == "input"}
    rules: dict[int, LeafRule] = {}
    for index, leaf in enumerate(example.leaves):
        if isinstance(leaf, torch.Tensor):
            # A leaf that is passed twice has one placeholder, the first one's.
            first = next(i for i, other in enumerate(example.leaves) if other is leaf)
            sizes = trace.symbols_of_leaf(first) if first in read else ()
            static = {dim: int(expr) for dim, expr in enumerate(sizes) if expr.is_number}
            if first in trace.leaves_seen and first not in read:  # read by Python but by no op
                sized = {dim for (at, dim), expr in symbolic.items() if at == first and not expr.is_number}
                static = {dim: size for dim, size in enumerate(leaf.shape) if dim not in sized}
            rules[index] = LeafRule(leaf, static=static, exact=None, plain=trace.reads_flags)
        else:
            expr = symbolic.get((index, -1))
            rules[index] = LeafRule(leaf, static={}, exact=leaf if expr is None or expr.is_number else None)
    return rules


def matcher_of(traced: TracedModel, plan: SegmentPlan) -> Callable[[tuple], Any]:
    """Makes the matcher of calls that a trace is valid for: bound values → (token count, leaves) or None."""
    rules, example, token = leaf_rules(traced), traced.trace.example, plan.token_dim
    dims = []
    for rule in token.inputs:
        for dim, size in rule.dims.items():
            if (rule.leaf, dim) != (token.leaf, token.dim):
                dims.append((rule.leaf, dim, same_count if dim == rule.anchor_dim else size))
    tensors = [index for index, leaf in enumerate(example.leaves) if isinstance(leaf, torch.Tensor)]
    groups: dict[int, list[int]] = {}
    for index in tensors:
        groups.setdefault(id(example.leaves[index]), []).append(index)
    written = _written_memory(traced)
    _refuse_shared_memory(example, written)
    in_graphs = {memory for segment in plan.graph_segments() for memory in segment.writes}
    # Present addresses suffice: a call finds a moved tensor, and runs eagerly, before it writes.
    states = [value.state.get() for value in plan.values if value.state and value.memory in in_graphs]
    fixed = {int(state.untyped_storage().data_ptr()) for state in states}
    return write_matcher(
        example.values, rules, anchor=(token.leaf, token.dim), token_dims=dims, written=written,
        apart_from=frozenset(fixed), apart_from_now=_apart_from_state(plan, in_graphs),
        same=tuple(groups.values()),
    )  # fmt: skip


def _apart_from_state(
    plan: SegmentPlan, written_in_graphs: set[int]
) -> list[tuple[list[int], Callable[[], frozenset[int]]]]:
    """Lists inputs with the memory of state that they may not share at a call: graphs read a copy of one,
    which would be out of date once the other is written. State that graphs write is at fixed addresses.
    State of other dtypes is not looked up: pools are many, and token ids are no view of one."""
    read = {index for segment in plan.graph_segments() for index in segment.inputs}
    copied = {v.memory for v in plan.values if v.index in read and v.origin in ("input", "eager")}
    written = {memory for segment in plan.segments for memory in segment.writes}
    states = {
        value.index: (value, value.state)
        for value in plan.values
        if value.state is not None and value.memory not in written_in_graphs
    }
    found: dict[tuple[int, ...], list[int]] = {}
    for value in plan.values:
        if value.origin != "input" or not value.is_tensor:
            continue
        shared = tuple(
            state.index
            for state, _ in states.values()
            if (state.dtype, state.device) == (value.dtype, value.device) and state.memory != value.memory
            and (value.memory in copied and state.memory in written
                 or state.memory in copied and value.memory in written)
        )  # fmt: skip
        if shared:
            found.setdefault(shared, []).append(value.leaf)
    return [(leaves, partial(_memory_of, [states[i][1] for i in at])) for at, leaves in found.items()]


def _memory_of(places: Sequence[StateRef]) -> frozenset[int]:
    """Finds the addresses of the tensors at these places; the state check finds tensors that are gone."""
    tensors = (place.get() for place in places)
    return frozenset(x.untyped_storage().data_ptr() for x in tensors if isinstance(x, torch.Tensor))


def _written_memory(traced: TracedModel) -> WrittenMemory:
    """Groups the inputs that lie in memory which a call writes, as the trace has it: one memory per group.

    The plan follows memory, not tensors: after each write, what graphs read of the memory is copied in again,
    through any of its inputs. So halves of a pool, or overlapping views, are served if they share as traced.
    """
    memory: dict[int, int] = {}
    for placeholder in traced.trace.placeholders:
        fake = placeholder.node.meta.get("example_value")
        if placeholder.kind == "input" and isinstance(fake, torch.Tensor):
            memory.setdefault(placeholder.leaf, storage_of(fake))
    written = written_storages(traced.facts.values())
    groups: dict[int, list[int]] = {storage: [] for storage in memory.values() if storage in written}
    others: list[int] = []
    for leaf, storage in sorted(memory.items()):
        groups.get(storage, others).append(leaf)
    return WrittenMemory(tuple(map(tuple, groups.values())), tuple(others))


def _refuse_shared_memory(example: ExampleCall, written: WrittenMemory) -> None:
    """Refuses memory sharing that no trace sees: different storages that begin at the same address."""
    groups = [*written.groups, *((leaf,) for leaf in written.others)]
    for at, group in enumerate(written.groups):
        for leaf, other in itertools.product(group, itertools.chain(*groups[at + 1 :])):
            one, two = (example.leaves[index].untyped_storage().data_ptr() for index in (leaf, other))
            if one == two != 0:
                raise InputsShareMemory(name=example.names[leaf], other=example.names[other])
