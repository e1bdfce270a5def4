"""Linears that read the same input become one, over a weight that holds theirs one after the other.

    before   mm(x, t(wq)) · mm(x, t(wk)) · mm(x, t(wv))
    after    y = mm(x, t(as_strided(wq, [nq + nk + nv, hidden]))) · y[:, :nq] · y[:, nq:nq + nk] · ...

`packed_weights.py` has laid the weights out so. What is written into one of them is seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch
from torch import fx

from piecewise.passes.fakes import aten, geometry, value_of
from piecewise.passes.matcher import find_regions, same_mutation_regions

_LINEARS = (aten.mm.default, aten.addmm.default)


@dataclasses.dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears of one input, in the order in which they run.

    Attributes:
        weights, biases: positions of their parameters among the graph's placeholders; `biases` has one for
            each weight, or none.
    """

    weights: tuple[int, ...]
    biases: tuple[int, ...] = ()


def find_groups(graph: fx.Graph, parameters: Collection[int] | None = None) -> list[LinearGroup]:
    """Groups of two or more linears that could be one.

    Args:
        parameters: positions of the placeholders that are the model's own tensors; None for all.
    """
    return list(_linears(graph, parameters))


def sweep(module: fx.GraphModule, groups: Sequence[LinearGroup]) -> int:
    """Packs those of `groups` that the graph has; returns how many."""
    packed = 0
    for group, nodes in _linears(module.graph, None).items():
        if group in groups:
            _pack(module.graph, nodes)
            packed += 1
    return packed


def trigger(graph: fx.Graph) -> str | None:
    return "linears of one input" if _linears(graph, None) else None


def _linears(graph: fx.Graph, parameters: Collection[int] | None) -> dict[LinearGroup, list[fx.Node]]:
    placeholders = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    find_regions(graph)
    together: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _LINEARS:
            continue
        used = _parameters_of(node)
        if used is None or any(each not in placeholders for each in used):
            continue
        if parameters is not None and any(placeholders[each] not in parameters for each in used):
            continue
        weight = value_of(used[0])
        key = (node.args[-2], node.target, weight.dtype, weight.device, node.meta["mutation_region_id"])
        together.setdefault(key, []).append(node)
    found = {}
    for nodes in together.values():
        pairs = [[placeholders[each] for each in _parameters_of(node) or ()] for node in nodes]
        weights = tuple(pair[0] for pair in pairs)
        if len(nodes) > 1 and len(set(weights)) == len(weights):
            found[LinearGroup(weights, tuple(pair[1] for pair in pairs if len(pair) > 1))] = nodes
    return found


def _parameters_of(node: fx.Node) -> list[fx.Node] | None:
    """[weight] or [weight, bias] where the node is a plain linear over contiguous placeholders."""
    *bias, _, turned = node.args
    if not isinstance(turned, fx.Node) or turned.target is not aten.t.default or node.kwargs:
        return None
    used = [turned.args[0], *bias]
    found = [each for each in used if isinstance(each, fx.Node) and each.op == "placeholder"]
    if len(found) != len(used):
        return None
    weight = value_of(found[0])
    whole = all(isinstance(value_of(each), torch.Tensor) and value_of(each).is_contiguous() for each in found)
    if not whole or any(isinstance(size, torch.SymInt) for size in weight.shape):
        return None
    if len(found) > 1 and geometry(value_of(found[1]))[2] != (weight.shape[0],):
        return None
    return found


def _pack(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    assert all(same_mutation_regions(nodes[0], node) for node in nodes)
    parameters = [_parameters_of(node) or [] for node in nodes]
    rows = [int(value_of(pair[0]).shape[0]) for pair in parameters]
    columns = int(value_of(parameters[0][0]).shape[1])
    with graph.inserting_before(nodes[0]):
        weight = graph.call_function(
            aten.as_strided.default, (parameters[0][0], [sum(rows), columns], [columns, 1])
        )
        turned = graph.call_function(aten.t.default, (weight,))
        bias = [
            graph.call_function(aten.as_strided.default, (first, [sum(rows)], [1]))
            for first in parameters[0][1:]
        ]
        arguments = (*bias, nodes[0].args[-2], turned)
        packed = graph.call_function(nodes[0].target, arguments)  # type: ignore[arg-type]
        begin = 0
        for node, size in zip(nodes, rows, strict=True):
            part = graph.call_function(aten.slice.Tensor, (packed, 1, begin, begin + size))
            node.replace_all_uses_with(part)
            begin += size
    for node in nodes:
        graph.erase_node(node)
