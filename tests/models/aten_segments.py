"""Segments made by hand, for tests of the passes alone: a function of tensors, with a row count."""

from __future__ import annotations

from piecewise.ir.aten import function_of, trace_aten
from piecewise.ir.plan import Segment, ValueSpec
from piecewise.passes.fakes import geometry, value_of
from piecewise.passes.fuse import keep_geometry, passes_named, run_passes
from piecewise.passes.pack_linears import find_groups

# Sizes that are this in an example are the row count.
ROWS = 11


def spec(index, tensor, *, origin="graph"):
    def sizes(rows):
        return tuple(rows if size == ROWS else size for size in tensor.shape)

    def strides(rows):
        if all(stride % ROWS for stride in tensor.stride()):
            return tensor.stride()  # slices of packed rows keep their own
        return tuple(stride // ROWS * rows if stride % ROWS == 0 else stride for stride in tensor.stride())

    return ValueSpec(index, f"v{index}", origin, tensor.dtype, tensor.device, sizes, strides, memory=index)


def segment_of(function, tensors):
    """A segment that calls `function(*tensors)`, and its values."""

    def run(num_rows, *inputs):
        results = function(*inputs)
        return results if isinstance(results, tuple) else (results,)

    values = tuple(spec(index, tensor) for index, tensor in enumerate(tensors))
    inputs = tuple(range(len(tensors)))
    segment = Segment(0, "graph", run, "graph-0", inputs, (), (), 1, (), "")
    return segment, values


class Rewritten:
    """A function before and after some passes.

    Attributes:
        matches: per pass; `targets`: names of the ops that are left, in order.
    """

    def __init__(self, function, tensors, *names):
        segment, values = segment_of(function, tensors)
        traced = trace_aten(segment, values, num_rows=ROWS)
        module = traced.module
        self.matches = run_passes(module, passes_named(()), traced.fake_mode)
        before = [value_of(node) for node in module.graph.output_node().args[0]]
        groups = find_groups(module.graph)
        self.matches += run_passes(module, passes_named(names, groups=groups), traced.fake_mode)
        keep_geometry(module.graph, before, traced.fake_mode)
        self.module, self.is_valid = module, traced.is_valid
        self.own, self.function = segment.function, function_of(module.graph, {})
        after = [value_of(node) for node in module.graph.output_node().args[0]]
        assert list(map(geometry, after)) == list(map(geometry, before))

    @property
    def targets(self):
        nodes = [node for node in self.module.graph.nodes if node.op == "call_function"]
        names = [getattr(node.target, "_schema", None) or node.target for node in nodes]
        return [getattr(each, "name", None) or each.__name__ for each in names]

    def outputs(self, tensors, rows=ROWS):
        """(own, rewritten) results for the same inputs; what each writes into its inputs is undone."""
        before = [tensor.clone() for tensor in tensors]
        found = []
        for function in (self.own, self.function):
            results = tuple(result.clone() for result in function(rows, *tensors))
            found.append((*results, *(tensor.clone() for tensor in tensors)))
            for tensor, kept in zip(tensors, before, strict=True):
                tensor.copy_(kept)
        return found
