"""Traces a segment's function into a graph of aten ops for any row count, and compiles graphs to functions.

Runs the segment once on fakes in a new fake mode, whose only symbol is the row count. Ops that write stay
unchanged, so writes and shared memory are the same before and after.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.ir.plan import Segment, ValueSpec
from runners.errors import one_line


class NotTraceable(Exception):
    """Says why a segment keeps its own function."""


class AtenGraph(NamedTuple):
    """Holds a traced segment.

    Attributes:
        module: takes the row count and the segment's inputs; nodes have fakes in ``meta["val"]``.
        rows: the symbol of the row count; `num_rows` is its value at the trace.
        is_valid: row count → whether the graph holds for it.
    """

    module: fx.GraphModule
    fake_mode: Any
    rows: Any
    num_rows: int
    is_valid: Callable[[int], bool]

    def function(self, graph: fx.Graph | None = None) -> Callable[..., tuple]:
        """Compiles the graph, or another of the same constants, into a function that holds no FX object."""
        nodes = self.module.graph.find_nodes(op="get_attr")
        constants = {str(node.target): getattr(self.module, str(node.target)) for node in nodes}
        return function_of(graph if graph is not None else self.module.graph, constants)


def trace_aten(segment: Segment, values: Sequence[ValueSpec], *, num_rows: int) -> AtenGraph:
    """Traces a segment's function; computes nothing and reads no state.

    Args:
        num_rows: a row count of two or more for which the trace's guards hold.
    Raises:
        NotTraceable: a size is no function of the row count, or the ops cannot be traced.
    """
    # Captured boundary ops join several layers in one segment.
    fake_mode = torch_api.new_fake_mode(repeats=segment.captured_ops > 0)
    rows = torch_api.symbolic_count(fake_mode, "num_rows", num_rows)
    fakes = []
    for value in (values[index] for index in segment.inputs):
        if not value.is_tensor or value.sizes is None or value.strides is None:
            raise NotTraceable(f"{value.name} is not a tensor whose sizes follow the row count alone")
        sizes, strides = value.sizes(rows), value.strides(rows)
        with fake_mode:
            fakes.append(torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device))
    try:
        module = torch_api.trace_aten(segment.function, (rows, *fakes), fake_mode)
    except Exception as error:
        raise NotTraceable(one_line(error)) from error
    if any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in module.graph.nodes):
        raise NotTraceable("an op changes the shape of a tensor in place")
    return AtenGraph(module, fake_mode, rows, num_rows, torch_api.row_condition(fake_mode, rows))


def function_of(graph: fx.Graph, modules: dict[str, Any]) -> Callable[..., tuple]:
    """Compiles a graph to a plain function that holds no FX object; its get_attr nodes name `modules`."""
    code = graph.python_code("self")
    names = dict(code.globals)
    # A unique file name, so that a traceback shows the op's line.
    file = f"<piecewise segment {hashlib.sha256(code.src.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    exec(compile(code.src, file, "exec"), names)
    holder = nn.Module()
    for name, module in modules.items():
        setattr(holder, name, module)
    return functools.partial(names["forward"], holder)
