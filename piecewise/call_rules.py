"""Which calls a trace is valid for: what each leaf must be, as the matcher of its signature [I10]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecewise import torch_internals as internals
from piecewise.compiler import TracedModel
from piecewise.plan import SegmentPlan
from piecewise.signature import LeafRule, same_count, write_matcher
from piecewise.trace import ExampleCall
from runners.errors import TraceError


def is_alike(first: TracedModel, other: TracedModel) -> bool:
    """Whether calls are recognised and results rebuilt for both traces in the same way."""
    rules, others = _leaf_rules(first), _leaf_rules(other)
    return first.trace.result == other.trace.result and all(
        rule.static == others[leaf].static and rule.exact == others[leaf].exact
        for leaf, rule in rules.items()
    )


def _leaf_rules(traced: TracedModel) -> dict[int, LeafRule]:
    """Leaf index → what it must be in a call that the trace is valid for."""
    trace, example = traced.trace, traced.trace.example
    symbolic = internals.symbolic_sizes(trace.shape_env)
    for placeholder in trace.placeholders:
        expr = internals.expression(placeholder.node.meta.get("example_value"), trace.shape_env)
        if placeholder.kind == "input" and expr is not None:
            symbolic[placeholder.leaf, -1] = expr
    read = {placeholder.leaf for placeholder in trace.placeholders if placeholder.kind == "input"}
    rules: dict[int, LeafRule] = {}
    for index, leaf in enumerate(example.leaves):
        if isinstance(leaf, torch.Tensor):
            # One that is passed twice is one placeholder, the first one's.
            first = next(i for i, other in enumerate(example.leaves) if other is leaf)
            sizes = trace.symbols_of_leaf(first) if first in read else ()
            static = {dim: int(expr) for dim, expr in enumerate(sizes) if expr.is_number}
            if first in trace.leaves_seen and first not in read:  # Python read it, and no op
                sized = {dim for (at, dim), expr in symbolic.items() if at == first and not expr.is_number}
                static = {dim: size for dim, size in enumerate(leaf.shape) if dim not in sized}
            rules[index] = LeafRule(leaf, static=static, exact=None, plain=trace.reads_flags)
        else:
            expr = symbolic.get((index, -1))
            rules[index] = LeafRule(leaf, static={}, exact=leaf if expr is None or expr.is_number else None)
    return rules


def matcher_of(traced: TracedModel, plan: SegmentPlan) -> Callable[[tuple], Any]:
    """What tells the calls that a trace is valid for, and takes them apart."""
    rules, example, token = _leaf_rules(traced), traced.trace.example, plan.token_dim
    dims = []
    for rule in token.inputs:
        for dim, size in rule.dims.items():
            if (rule.leaf, dim) != (token.leaf, token.dim):
                dims.append((rule.leaf, dim, same_count if dim == rule.anchor_dim else size))
    tensors = [index for index, leaf in enumerate(example.leaves) if isinstance(leaf, torch.Tensor)]
    groups: dict[int, list[int]] = {}
    for index in tensors:
        groups.setdefault(id(example.leaves[index]), []).append(index)
    distinct = [
        (written, other)
        for written in plan.written_leaves
        for other in tensors
        if example.leaves[other] is not example.leaves[written]
    ]
    _refuse_shared_memory(example, distinct)
    in_graphs = {memory for segment in plan.graph_segments() for memory in segment.writes}
    # At the addresses of now: a call finds a moved one, and runs eagerly, before it writes.
    states = [value.state.get() for value in plan.values if value.state and value.memory in in_graphs]
    written = {int(state.untyped_storage().data_ptr()) for state in states}
    return write_matcher(
        example.values, rules, anchor=(token.leaf, token.dim), token_dims=dims, distinct=distinct,
        apart_from=frozenset(written), same=tuple(groups.values()),
    )  # fmt: skip


def _refuse_shared_memory(example: ExampleCall, pairs: Sequence[tuple[int, int]]) -> None:
    for pair in pairs:
        one, other = (example.leaves[index].untyped_storage().data_ptr() for index in pair)
        if one == other:
            written, read = (f"'{example.names[index]}'" for index in pair)
            raise TraceError(
                f"inputs {written} and {read} share memory, and forward writes {written}",
                rule="what a graph reads was written for this call [I2]",
                fix="pass tensors of their own, or let forward write a copy",
            )
