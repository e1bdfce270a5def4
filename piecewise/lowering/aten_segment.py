"""Converts a graph segment to the functional graph of aten ops that a compiler takes.

Its inputs are the row count, where that is a symbol, and tensors that share no memory, weights included; it
returns what it makes, as a tuple. Autocast and sizes are resolved: aten and custom ops on tensors, and
numbers computed from the row count, are left. Each write into an argument is one `aten.copy_` at the end.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.ir.aten import AtenGraph
from piecewise.ir.plan import Segment
from piecewise.lowering.layout import SegmentLayout
from runners.row_views import place_of


@dataclasses.dataclass(frozen=True, slots=True)
class AtenSegment:
    """Holds a segment's graph, with fakes in ``meta["val"]`` and as `arguments`. Its row count `rows` is a
    number, or the symbol of the first placeholder."""

    module: fx.GraphModule
    rows: Any
    arguments: tuple[Any, ...]
    fake_mode: Any

    @classmethod
    def of(cls, segment: Segment, layout: SegmentLayout, *, rows: int, is_dynamic: bool) -> AtenSegment:
        """Traces the segment for `rows` rows, or for any count with that hint; may raise any error."""
        fake_mode = torch_api.new_fake_mode()
        count = torch_api.symbolic_count(fake_mode, "num_rows", rows) if is_dynamic else rows
        tensors = []
        with fake_mode:
            for value in layout.inputs:
                sizes, strides, _ = place_of(value, count)
                tensors.append(torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device))

        def program(*arguments: Any) -> tuple[torch.Tensor, ...]:
            own_rows, *given = arguments if is_dynamic else (rows, *arguments)
            outputs = segment.function(own_rows, *given)
            return tuple(outputs[position] for position in layout.made)

        placeholders = (count, *tensors) if is_dynamic else tuple(tensors)
        module = torch_api.functional_aten_graph(program, placeholders, fake_mode)
        return cls(module, count, placeholders, fake_mode)

    @classmethod
    def of_graph(cls, graph: AtenGraph, layout: SegmentLayout) -> AtenSegment | None:
        """Reuses the graph of a segment's function; None where it writes, which only a trace resolves."""
        if not all(map(_is_functional, graph.module.graph.nodes)):
            return None
        copied = fx.Graph()
        outputs: Any = copied.graph_copy(graph.module.graph, {})
        copied.output(tuple(outputs[position] for position in layout.made))
        copied.eliminate_dead_code()
        placeholders = tuple(node.meta["val"] for node in copied.find_nodes(op="placeholder"))
        return cls(fx.GraphModule(nn.Module(), copied), graph.rows, placeholders, graph.fake_mode)

    def compiled(self) -> Callable[..., Any]:
        """Compiles the graph to `function(rows, *tensors)`, consuming it; may raise any error."""
        function = torch_api.compile_aten_graph(self.module, self.arguments, self.fake_mode)
        if isinstance(self.rows, int):
            return lambda rows, *tensors: function(*tensors)
        return function


def _is_functional(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(node.target, torch_api.OpOverload):
        return not node.target._schema.is_mutable
    # Arithmetic on sizes and items of tuples.
    return node.target is operator.getitem or getattr(node.target, "__module__", "") in ("_operator", "math")
