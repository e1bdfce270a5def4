"""Cuts a classified graph into segments; pure: a graph and verdicts in, frozen data out.

Example, with `attn` a boundary op and `pick = x[-1:]` eager because it loses the token dim:

    before   embed · norm · linear · empty | attn | linear · add · norm | pick | lm_head
    after    graph 0                       | b. 1 | graph 2             | e. 3 | graph 4

`torch.fx`'s `split_module` reorders calls that return nothing, passes tuples and sizes across borders, and
renames nodes. Here a segment takes tensors and one row count, and computes every size inside.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from piecewise import torch_api
from piecewise.analysis.classify import Classifier
from piecewise.analysis.index_bounds import checks_values
from piecewise.cut.context import CutContext
from piecewise.cut.free_strides import with_free_strides
from piecewise.cut.segment_writer import SegmentWriter
from piecewise.cut.zero_fills import ZeroFills
from piecewise.ir.effects import written_storages
from piecewise.ir.nodes import is_tuple_item, makes_empty, module_path, source_line, storages_of, target_name
from piecewise.ir.plan import EagerReason, Segment, SegmentPlan, TokenDim
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
        self,
        index: int,
        writer: SegmentWriter,
        functions: dict[Any, Any],
        later: Collection[fx.Node],
        outside: Collection[fx.Node],
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
        known = [
            symbol
            for symbol in sorted(others, key=str)
            if not torch_api.is_unbacked(symbol) and context.source_of(symbol) is not None
        ]
        usable = [guard for guard in guards if guard.free_symbols <= {token.symbol, *known}]
        check = torch_api.compile_expressions(usable, [token.symbol, *known])
        symbols = tuple(map(context.value_of_symbol, known))
        given = [source for source in results if isinstance(source, int)]
        forms, others_write, written = (
            written_storages(
                fact for node, fact in context.facts.items() if ("is_captured_form" in node.meta) in kinds
            )
            for kinds in ((True,), (False,), (True, False))
        )
        return SegmentPlan(
            TokenDim(str(token.symbol), *token.anchor, token.inputs),
            with_free_strides(context.values, segments, given), segments, trace.result, trace.result_leaves,
            results, holds(check), symbols, trace.state_facts,
            tuple(
                placeholder.leaf
                for placeholder in trace.placeholders
                if placeholder.kind == "input" and written & storages_of([placeholder.node])
            ),
            dict(self.fills.found),
            step_memory=frozenset(context.known_memories(forms - others_write)),
            metadata_leaves=frozenset(p.leaf for p in trace.placeholders if "is_metadata" in p.node.meta),
            max_rows=self.classifier.rows.largest,
        )  # fmt: skip
