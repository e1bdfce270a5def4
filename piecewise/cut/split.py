"""Cuts a classified graph into segments; pure: a graph and verdicts in, frozen data out.

Example, with `attn` a boundary op and `pick = x[-1:]` eager because it loses the token dim:

    before   embed · norm · linear · empty | attn | linear · add · norm | pick | lm_head
    after    graph 0                       | b. 1 | graph 2             | e. 3 | graph 4

`torch.fx`'s `split_module` reorders calls that return nothing, passes tuples and sizes across borders, and
renames nodes. Here a segment takes tensors and one row count, and computes every size inside.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx

import boundary_ops
from boundary_ops import BoundaryOp
from piecewise import torch_api
from piecewise.analysis.classify import Classifier
from piecewise.analysis.index_bounds import checks_values
from piecewise.cut.segment_writer import CutContext, SegmentWriter
from piecewise.ir import nodes as ir_nodes
from piecewise.ir.effects import Facts, written_storages
from piecewise.ir.nodes import is_tuple_item, makes_empty, module_path, source_line, storages_of, target_name
from piecewise.ir.plan import EagerReason, InputAt, Segment, SegmentPlan, TokenDim, ValueSpec
from piecewise.ir.sizes import holds


class Splitter:
    """Cuts one trace; `cut()` returns the plan."""

    def __init__(self, classifier: Classifier, *, keeps_own: Mapping[fx.Node, str]) -> None:
        self.classifier, self.keeps_own = classifier, keeps_own
        self.context = CutContext(classifier)
        self.verdicts = self.context.verdicts
        kinds = {node: verdict.kind for node, verdict in self.verdicts.items()}
        self.fills = ZeroFills(self.context.graph, self.context.facts, kinds)
        self.writers: list[SegmentWriter] = []

    def groups(self) -> list[tuple[str, list[fx.Node]]]:
        """Groups consecutive nodes of one kind, boundary ops alone, without scalars and floating views."""
        found: list[tuple[str, list[fx.Node]]] = []
        for node, verdict in self.verdicts.items():
            if verdict.kind == "scalar" or self.classifier.is_floating(node):
                continue
            if found and found[-1][0] == verdict.kind != "boundary":
                found[-1][1].append(node)
            else:
                found.append((verdict.kind, [node]))
        return found

    def cut(self) -> SegmentPlan:
        self.writers = [SegmentWriter(self.context, kind, nodes).write() for kind, nodes in self.groups()]
        used = [set(writer.input_nodes) for writer in self.writers]
        results = set(self.context.graph.output_node().all_input_nodes)
        functions: dict[Any, Any] = {}
        segments = []
        for index, writer in enumerate(self.writers):
            later = results.union(*used[index + 1 :])
            segments.append(self._segment(index, writer, functions, later, later.union(*used[:index])))
        return self._plan(tuple(segments))

    def _fill_empty(self, writer: SegmentWriter, outside: Collection[fx.Node]) -> tuple[int, ...]:
        """Zeroes the memory of `empty*` that needs it [I2]; returns the memories that leave unwritten."""
        leaving = storages_of(outside)
        unwritten: set[int] = set()
        for node in filter(makes_empty, writer.nodes):
            if self.fills.needs(node, segment=writer.nodes, leaving=leaving):
                writer.zero_fill(node)
            else:
                unwritten |= self.context.facts[node].storages & leaving
        unwritten -= written_storages(map(self.context.facts.__getitem__, writer.nodes))
        return tuple(sorted(map(self.context.memory_of, unwritten)))

    def _segment(
        self, index: int, writer: SegmentWriter, functions: dict, later: set[fx.Node], outside: set[fx.Node]
    ) -> Segment:
        """Makes a segment; later ones and the caller read `later`, all others and the caller `outside`."""
        nodes, facts = writer.nodes, [self.context.facts[node] for node in writer.nodes]
        outputs = [node for node in nodes if node in later and self.context.crosses(node)]
        is_graph = writer.kind == "graph"
        unwritten = self._fill_empty(writer, outside) if is_graph else ()
        function, key = writer.finish(outputs, functions)
        memories = self.context.known_memories(written_storages(facts))
        counted = [node for node in nodes if not is_tuple_item(node)]
        reasons = tuple(
            EagerReason(verdict.code, target_name(node), verdict.detail, module_path(node), source_line(node))
            for node in counted
            if (verdict := self.verdicts[node]).code
        )
        paths = [path for node in nodes if (path := module_path(node))] or [""]
        ops = {call.op for fact in facts if fact.recording is not None for call in fact.recording.calls}
        return Segment(
            index, writer.kind, function, key, tuple(writer.inputs.values()),
            tuple(map(self.context.value_of, outputs)), tuple(sorted(memories)), len(counted),
            tuple(map(target_name, counted)),
            paths[0] if paths[0] == paths[-1] else f"{paths[0]} .. {paths[-1]}", reasons,
            views_only=is_graph and all(fact.is_view for fact in facts),
            op_call=writer.op_call() if writer.kind == "boundary" else None,
            captured_ops=sum(is_graph and fact.boundary is not None for fact in facts),
            unwritten=unwritten, own_function=function,
            keeps_own=next((self.keeps_own[node] for node in nodes if node in self.keeps_own), ""),
            checks_values=any(map(checks_values, ops)),
        )  # fmt: skip

    def _plan(self, segments: tuple[Segment, ...]) -> SegmentPlan:
        context, trace, token = self.context, self.context.trace, self.context.token
        outputs: Any = context.graph.output_node().args[0]
        results = tuple(map(context.result_value, outputs))
        guards = torch_api.guard_expressions(trace.shape_env)
        others: Any = {symbol for guard in guards for symbol in guard.free_symbols} - {token.symbol}
        backed = [symbol for symbol in sorted(others, key=str) if not torch_api.is_unbacked(symbol)]
        known = [symbol for symbol in backed if context.source_of(symbol) is not None]
        usable = [guard for guard in guards if guard.free_symbols <= {token.symbol, *known}]
        check = torch_api.compile_expressions(usable, [token.symbol, *known])
        symbols = tuple(map(context.value_of_symbol, known))
        given = [source for source in results if isinstance(source, int)]
        forms, others_write = (
            written_storages(f for n, f in context.facts.items() if ("is_captured_form" in n.meta) is is_form)
            for is_form in (True, False)
        )
        return SegmentPlan(
            TokenDim(str(token.symbol), *token.anchor, token.inputs),
            with_free_strides(context.values, segments, given), segments, trace.result, trace.result_leaves,
            results, holds(check), symbols, trace.state_facts,
            tuple(
                placeholder.leaf
                for placeholder in trace.placeholders
                if placeholder.kind == "input" and (forms | others_write) & storages_of([placeholder.node])
            ),
            dict(self.fills.found),
            step_memory=frozenset(context.known_memories(forms - others_write)),
            metadata_leaves=frozenset(p.leaf for p in trace.placeholders if "is_metadata" in p.node.meta),
            max_rows=self.classifier.rows.largest,
        )  # fmt: skip


class ZeroFills:
    """Decides for the `empty*` nodes of one graph; `found` becomes `SegmentPlan.fills`."""

    def __init__(self, graph: fx.Graph, facts: Facts, kinds: Mapping[fx.Node, str]) -> None:
        self._facts = facts
        self._readers: dict[int, str] = {}
        self.found: Counter[str] = Counter()
        for node in graph.nodes:
            fact = facts.get(node)
            if fact is not None and kinds[node] == "graph" and (fact.boundary or fact.calls_op_of_others):
                # An op handles the memory that it writes itself.
                read = storages_of(argument for argument in fact.reads if argument not in fact.writes)
                why = f"{target_name(node)} reads it, which is no op of torch"
                self._readers.update(dict.fromkeys(read, why))

    def needs(self, node: fx.Node, *, segment: Sequence[fx.Node], leaving: Collection[int]) -> bool:
        """Whether an `empty*` node must start as zeros; other segments use the memories `leaving`."""
        memory = self._facts[node].storages
        facts = map(self._facts.__getitem__, segment)
        writers = [fact for fact in facts if not memory.isdisjoint(storages_of(fact.writes))]
        if memory.isdisjoint(leaving) and all(fact.boundary is None for fact in writers):
            return False  # what graphs alone write is eager's, row by row
        reason = next((self._readers[storage] for storage in memory if storage in self._readers), None)
        if not all(fake.dtype.is_floating_point for fake in ir_nodes.fakes_of([node])):
            reason = "it holds integers, which may be indices"
        elif any(fact.boundary is None for fact in writers):
            reason = reason or "ops of its own segment write a part of it"
        self.found[reason or "needless"] += 1
        return reason is not None


def with_free_strides(
    values: Sequence[ValueSpec], segments: Sequence[Segment], results: Collection[int]
) -> tuple[ValueSpec, ...]:
    """Frees the values that need not have eager's strides; the caller receives `results`."""
    in_memory = Counter(value.memory for value in values)
    taken = {index for segment in segments for index in segment.inputs}
    bound = {index for segment in segments for index in _counted_on(segment)} | set(results)
    made = []
    for value in values:
        is_read = value.index in taken and value.index not in bound
        # Eager's elements of one row are contiguous, and must stay so.
        is_dense = value.strides is not None and value.strides(2)[-1:] == (1,)
        if value.origin == "graph" and in_memory[value.memory] == 1 and is_read and is_dense:
            geometry = f"{value.geometry}, any strides"
            value = dataclasses.replace(value, strides=None, any_strides=True, geometry=geometry)
        made.append(value)
    return tuple(made)


def takers_of_any_strides(segments: Sequence[Segment], values: Sequence[ValueSpec]) -> set[str]:
    """Names the boundary ops whose declaration lets values have other strides than eager's."""
    takers = (segment for segment in segments if any(values[index].any_strides for index in segment.inputs))
    return {segment.op_call.name for segment in takers if segment.op_call is not None}


def op_of(segment: Segment) -> BoundaryOp | None:
    return boundary_ops.lookup(segment.op_call.name) if segment.op_call is not None else None


def _counted_on(segment: Segment) -> set[int]:
    op = op_of(segment)
    if segment.op_call is None or op is None:
        return set(segment.inputs)
    pairs = zip(op.overload._schema.arguments, segment.op_call.arguments, strict=False)
    counted = [given for named, given in pairs if named.name not in op.any_strides]
    return {segment.inputs[given.position] for given in counted if isinstance(given, InputAt)}
