"""Restores the strides of a rewritten graph's results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from piecewise.ir.sizes import size_node
from piecewise.passes.fakes import aten, geometry, memory_of, propagate, value_of


def keep_geometry(
    graph: fx.Graph, wanted: Sequence[Any], fake_mode: Any, *, free: Collection[int] = ()
) -> None:
    """Copies results whose strides a rewrite changed from those of `wanted`: a segment's readers may rely on
    them. Readers of the results at positions in `free` need only that the last stride is 1."""
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    for position, (node, fake) in enumerate(zip(results, wanted, strict=True)):
        if not isinstance(node, fx.Node) or geometry(value_of(node)) == geometry(fake):
            continue
        if position in free and value_of(node).stride()[-1] == 1 and _is_alone(graph, node, results):
            continue
        with graph.inserting_before(output):
            sizes = [_as_argument(graph, size) for size in fake.shape]
            strides = [_as_argument(graph, stride) for stride in fake.stride()]
            dense = graph.call_function(aten.new_empty_strided.default, (node, sizes, strides))
            results[position] = graph.call_function(aten.copy_.default, (dense, node))
    output.args = (tuple(results),)
    propagate(graph, fake_mode)


def _is_alone(graph: fx.Graph, node: fx.Node, results: Sequence[Any]) -> bool:
    others = [*graph.find_nodes(op="placeholder"), *(each for each in results if isinstance(each, fx.Node))]
    memory = memory_of(value_of(node))
    # A result that is returned twice is in the list twice.
    return sum(memory_of(other.meta.get("val")) == memory for other in others) == 1


def _as_argument(graph: fx.Graph, size: Any) -> Any:
    """Returns a size as a number, or as ops on the row count, the first placeholder."""
    if not isinstance(size, torch.SymInt):
        return size
    rows = next(iter(graph.nodes))
    return size_node(graph, size.node.expr, {value_of(rows).node.expr: rows})
