"""Removes dead code, casts and copies without effect, and duplicate views and results.

A temporary that is written in place once (`mean.add_(eps)`) becomes a functional result, since patterns do
not match across ops that write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from piecewise import torch_api
from piecewise.passes.fakes import aten, frozen, geometry, memory_of, run_node, value_of
from piecewise.torch_api.pattern_matcher import find_regions, is_mutation_op

_COPIES = (aten.clone.default, aten._to_copy.default)
_SAME = (aten.alias.default, aten.detach.default, aten.view.default, aten._unsafe_view.default,
         aten.reshape.default, aten.expand.default, aten.slice.Tensor)  # fmt: skip
_CAST_OPTIONS = frozenset({"dtype", "layout", "device"})


def sweep(module: fx.GraphModule) -> int:
    """Applies the first rewrite that finds anything; returns how many nodes it removed or replaced."""
    steps = (
        *(remove_dead_nodes, _drop_needless_options, _make_temporaries_plain, _remove_no_ops),
        *(_share_views, _share_results),
    )
    # One kind at a time: the caller updates fakes after each.
    return next((count for step in steps if (count := step(module.graph))), 0)


def _op_of(node: fx.Node) -> Any:
    return node.target if isinstance(node.target, torch_api.OpOverload) else None


def is_pure(node: fx.Node) -> bool:
    """Whether a node has no effect but its result."""
    if node.op != "call_function" or is_mutation_op(node):
        return False
    if (op := _op_of(node)) is None:  # arithmetic on sizes and items of tuples
        return getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return bool(op._schema.returns) and "assert" not in op._schema.name and not is_random


def remove_dead_nodes(graph: fx.Graph) -> int:
    """Erases nodes without users and effects, last first; returns how many."""
    dead = 0
    for node in reversed(list(graph.nodes)):
        if not node.users and is_pure(node):
            graph.erase_node(node)
            dead += 1
    return dead


def _drop_needless_options(graph: fx.Graph) -> int:
    """Makes a cast that names its input's own layout and device (`type_as`) a plain cast."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        value, kwargs = value_of(node.args[0]), dict(node.kwargs)
        for name in ("layout", "device"):
            if name in kwargs and kwargs[name] == getattr(value, name):
                del kwargs[name]
                changed += 1
        node.kwargs = kwargs
    return changed


def _make_temporaries_plain(graph: fx.Graph) -> int:
    """Rewrites `t = op(...); t.add_(x)`, with no other user of `t`, to `t.add(x)`."""
    changed = 0
    for node in list(graph.nodes):
        if (plain := _plain_twin_for(node)) is not None:
            node.target = plain
            del node.meta["val"]
            changed += 1
    return changed


def _plain_twin_for(node: fx.Node) -> Any:
    op = _op_of(node)
    if op is None or op.namespace != "aten" or not node.args:
        return None
    name = op._schema.name
    if not name.endswith("_") or name.endswith("__"):
        return None
    written = node.args[0]
    if not isinstance(written, fx.Node) or len(written.users) > 1 or is_mutation_op(written):
        return None
    memory, given = memory_of(value_of(written)), map(value_of, written.all_input_nodes)
    makes_memory = _op_of(written) is not None and memory is not None and memory not in map(memory_of, given)
    if not makes_memory or value_of(node) is None:  # it follows a node that was just made functional
        return None
    plain = getattr(getattr(aten, name.removeprefix("aten::")[:-1], None), op._overloadname, None)
    if plain is None or plain._schema.is_mutable:
        return None
    # An in-place op keeps the dtype of what it writes, a functional one may promote it.
    result = run_node(node, value_of(node).fake_mode, target=plain)
    return plain if geometry(result) == geometry(value_of(node)) else None


def _remove_no_ops(graph: fx.Graph) -> int:
    outputs = {memory_of(value_of(node)) for node in graph.output_node().all_input_nodes}
    writes = any(is_mutation_op(node) for node in graph.nodes)
    removed = 0
    for node in list(graph.nodes):
        source = _source_of_no_op(node) if node.op == "call_function" else None
        # A copy owns its memory, which matters where something is written or returned.
        owns = node.target in _COPIES and (writes or memory_of(value_of(node)) in outputs)
        if source is not None and not owns:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            removed += 1
    return removed


def _source_of_no_op(node: fx.Node) -> fx.Node | None:
    """Returns the input with the same values and geometry as the node's result; None without one."""
    if node.target not in _COPIES and node.target not in _SAME:
        return None
    source: Any = node.args[0]
    if node.target is aten._to_copy.default:
        if not set(node.kwargs) <= _CAST_OPTIONS:
            return None
        inner = source
        if inner.target is aten._to_copy.default and _widens(inner) and set(inner.kwargs) <= _CAST_OPTIONS:
            source = inner.args[0]
    return source if geometry(value_of(node)) == geometry(value_of(source)) else None


def _widens(cast: fx.Node) -> bool:
    before, after = value_of(cast.args[0]).dtype, value_of(cast).dtype
    if not before.is_floating_point or not after.is_floating_point:
        return False
    # torch does not promote one-byte floats.
    return min(before.itemsize, after.itemsize) > 1 and torch.promote_types(before, after) == after


def _share_equal(graph: fx.Graph, key_of: Callable[[fx.Node], Any]) -> int:
    """Replaces nodes with equal arguments and keys by the first of them; a node whose key is None stays."""
    known: dict[Any, fx.Node] = {}
    shared = 0
    for node in list(graph.nodes):
        if (key := key_of(node)) is None:
            continue
        first = known.setdefault((node.target, frozen(node.args), frozen(node.kwargs), key), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            shared += 1
    return shared


def _share_views(graph: fx.Graph) -> int:
    def memory_viewed(node: fx.Node) -> Any:
        op = _op_of(node)
        if op is None or not (op.is_view or op is aten._unsafe_view.default) or is_mutation_op(node):
            return None
        memory = memory_of(value_of(node))
        return memory if memory == memory_of(value_of(node.args[0])) else None

    return _share_equal(graph, memory_viewed)


def _share_results(graph: fx.Graph) -> int:
    """Replaces the second of two equal ops on equal tensors by the first: three linears may quantise one
    input. No write lies between the ops, and nobody writes or owns their results."""
    find_regions(graph)
    takers = [graph.output_node(), *filter(is_mutation_op, graph.nodes)]
    owned = {memory_of(value_of(each)) for taker in takers for each in taker.all_input_nodes}

    def region(node: fx.Node) -> Any:
        op, value = _op_of(node), value_of(node)
        if op is None or op.namespace != "aten" or "empty" in op._schema.name or not is_pure(node):
            return None
        is_shareable = isinstance(value, torch.Tensor) and memory_of(value) not in owned
        return node.meta["mutation_region_id"] if is_shareable else None

    return _share_equal(graph, region)
