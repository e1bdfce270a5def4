"""Cuts a classified graph into segments; pure: a graph and verdicts in, frozen data out.

Example, with `attn` a boundary op and `pick = x[-1:]` eager because it loses the token dim:

    before   embed · norm · linear · empty | attn | linear · add · norm | pick | lm_head
    after    graph 0                       | b. 1 | graph 2             | e. 3 | graph 4

`torch.fx`'s own `split_module` is not used: it reorders calls that return nothing, passes tuples and sizes
across borders, and renames nodes. Here a segment takes tensors and one row count; every size is computed
inside from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from piecewise import torch_api
from piecewise.analysis.classify import Classifier, Verdict
from piecewise.analysis.index_bounds import checks_values
from piecewise.analysis.normalize import module_path, source_line, target_name
from piecewise.analysis.rows.walk import makes_empty
from piecewise.cut.free_strides import with_free_strides
from piecewise.cut.segment_writer import SegmentWriter
from piecewise.cut.zero_fills import ZeroFills
from piecewise.ir.effects import fakes_of, is_tuple_item, written_storages
from piecewise.ir.plan import (
    ComputedNumber,
    EagerReason,
    PaddedRows,
    Segment,
    SegmentPlan,
    TokenDim,
    ValueSpec,
)
from piecewise.ir.sizes import SizeFunctions, holds
from piecewise.ir.tensors import storage_of
from runners.state.state_check import StateRef


class Splitter:
    """One cut of one trace. `cut()` returns the plan."""

    def __init__(self, classifier: Classifier, *, keeps_own: Mapping[fx.Node, str]) -> None:
        self.classifier = classifier
        self.trace, self.facts, self.token = classifier.trace, classifier.facts, classifier.token
        self.graph = self.trace.graph.graph
        self.verdicts: dict[fx.Node, Verdict] = classifier.run()
        kinds = {node: verdict.kind for node, verdict in self.verdicts.items()}
        self.fills = ZeroFills(self.graph, self.facts, kinds)
        self.keeps_own = keeps_own
        self.writers: list[SegmentWriter] = []
        self.values: list[ValueSpec] = []
        self._index_of: dict[fx.Node | sympy.Symbol, int] = {}
        self._memory: dict[int, int] = {}
        self._sizes = SizeFunctions(self.trace.shape_env, self.token.symbol)

    def _value(self, node: fx.Node) -> int:
        if node not in self._index_of:
            index = self._index_of[node] = len(self.values)
            self.values.append(self._spec(node, index))
        return self._index_of[node]

    def _spec(self, node: fx.Node, index: int) -> ValueSpec:
        fake = node.meta.get("example_value")
        origin, leaf, state = "state", -1, None
        if node in self.verdicts:
            origin = self.verdicts[node].kind
        elif node.op == "get_attr":
            fake = getattr(self.trace.graph, str(node.target))
            state = StateRef({node.name: fake}, node.name, node.name)
        else:
            placeholder = next(p for p in self.trace.placeholders if p.node is node)
            origin, leaf, state = placeholder.kind, placeholder.leaf, placeholder.state
        if not isinstance(fake, torch.Tensor):
            return ValueSpec(index, node.name, origin, leaf=leaf, state=state)
        token_dims = self._sizes.token_dims(fake)
        memory = self._memory.setdefault(storage_of(fake), len(self._memory))
        sizes, strides = self._sizes.of(fake.shape), self._sizes.of(fake.stride())
        return ValueSpec(
            index, node.name, origin, fake.dtype, fake.device, sizes, strides, token_dims, memory,
            leaf=leaf, state=state, offset=self._sizes.of((fake.storage_offset(),)),
            geometry=self._sizes.text(fake), units=self._units(fake), padded=self._padded(node, origin),
        )  # fmt: skip

    def _units(self, fake: torch.Tensor) -> tuple[int, ...]:
        """How many elements of each dim are one row: what padding repeats."""
        sizes = self.classifier.judge.sizes(fake.shape)
        return tuple(size.unit if size.constant is None else 1 for size in sizes) if sizes is not None else ()

    def _padded(self, node: fx.Node, origin: str) -> PaddedRows:
        if origin != "graph":
            return PaddedRows()
        (rows,) = self.classifier.rows.rows_of(node)
        counts = self.classifier.judge.known.counts

        def bounds(num_rows: int) -> tuple[int | None, int | None]:
            at = int(counts.searchsorted(num_rows))
            low, high = (int(side.values[at]) if side is not None else None for side in rows.bounds[:2])
            return low, high

        return PaddedRows(rows.is_real, bounds, self.classifier.rows.is_prefix(node))

    def symbol_value(self, symbol: sympy.Symbol) -> int:
        """Value index of a symbol that is not the token count: an int input, or a size of an input."""
        if symbol not in self._index_of:
            source = self._symbol_source_for(symbol)
            assert source is not None, f"symbol {symbol} belongs to no input"
            leaf, dim = source
            index = self._index_of[symbol] = len(self.values)
            self.values.append(ValueSpec(index, str(symbol), "symbol", leaf=leaf, dim=dim))
        return self._index_of[symbol]

    def _symbol_source_for(self, symbol: sympy.Symbol) -> tuple[int, int] | None:
        """(leaf, dim) of the input that gives the symbol its value; dim −1 for an int."""
        for placeholder in self.trace.placeholders:
            value = placeholder.node.meta.get("example_value")
            if placeholder.kind == "input" and isinstance(value, torch.Tensor):
                sizes = self.trace.symbols_of_leaf(placeholder.leaf)
                if symbol in sizes:
                    return placeholder.leaf, sizes.index(symbol)
            elif placeholder.kind == "input" and torch_api.expression(value, self.trace.shape_env) == symbol:
                return placeholder.leaf, -1
        return torch_api.symbol_source(self.trace.shape_env, symbol)  # an input that the graph does not read

    def groups(self) -> list[tuple[str, list[fx.Node]]]:
        """Consecutive nodes of one kind; a boundary op is a group of its own; scalars and floating views
        are in none."""
        found: list[tuple[str, list[fx.Node]]] = []
        for node in self.graph.nodes:
            verdict = self.verdicts.get(node)
            if verdict is None or verdict.kind == "scalar" or self.classifier.is_floating(node):
                continue
            if found and found[-1][0] == verdict.kind != "boundary":
                found[-1][1].append(node)
            else:
                found.append((verdict.kind, [node]))
        return found

    def cut(self) -> SegmentPlan:
        self.writers = [SegmentWriter(self, kind, nodes).write() for kind, nodes in self.groups()]
        used = [set(writer.input_nodes) for writer in self.writers]
        results = set(self.graph.output_node().all_input_nodes)
        functions: dict[str, Any] = {}
        return self._plan(
            tuple(
                self._segment(
                    index, writer, functions,
                    later=results.union(*used[index + 1 :]),
                    outside=results.union(*used[:index], *used[index + 1 :]),
                )
                for index, writer in enumerate(self.writers)
            )
        )  # fmt: skip

    def _crosses(self, node: fx.Node) -> bool:
        value = node.meta.get("example_value")
        return isinstance(value, torch.Tensor) or (
            self.is_eager(node) and not isinstance(value, (tuple, list))
        )

    def is_eager(self, node: fx.Node) -> bool:
        return node in self.verdicts and self.verdicts[node].kind == "eager"

    def _fill_empty(self, writer: SegmentWriter, outside: Iterable[fx.Node]) -> tuple[int, ...]:
        """Zeroes the memory of `empty*` that needs it [I2]; the memories that leave unwritten."""
        leaving = set(map(storage_of, fakes_of(outside)))
        written = written_storages(self.facts[node] for node in writer.nodes)
        unwritten: set[int] = set()
        for node in filter(makes_empty, writer.nodes):
            if self.fills.needs(node, segment=writer.nodes, leaving=leaving):
                writer.zero_fill(node)
            else:
                unwritten |= (self.facts[node].storages & leaving) - written
        return tuple(sorted(self._memory.setdefault(storage, len(self._memory)) for storage in unwritten))

    def _segment(
        self,
        index: int,
        writer: SegmentWriter,
        functions: dict[Any, Any],
        *,
        later: Collection[fx.Node],
        outside: Collection[fx.Node],
    ) -> Segment:
        """One segment.

        Args:
            later: what later segments and the caller take, as `outside` is what all others do.
        """
        nodes, facts = writer.nodes, [self.facts[node] for node in writer.nodes]
        outputs = [node for node in nodes if node in later and self._crosses(node)]
        is_graph = writer.kind == "graph"
        unwritten = self._fill_empty(writer, outside) if is_graph else ()
        function, key = writer.finish(outputs, functions)
        written = written_storages(facts)
        inputs = tuple(writer.inputs.values())
        memories = {self._memory[storage] for storage in written if storage in self._memory}
        counted = [node for node in nodes if not is_tuple_item(node)]
        reasons = tuple(
            EagerReason(verdict.code, target_name(node), verdict.detail, module_path(node), source_line(node))
            for node in counted
            if (verdict := self.verdicts[node]).code
        )
        paths = [path for node in nodes if (path := module_path(node))] or [""]
        return Segment(
            index, writer.kind, function, key, inputs, tuple(self._value(node) for node in outputs),
            tuple(sorted(memories)), len(counted), tuple(map(target_name, counted)),
            paths[0] if paths[0] == paths[-1] else f"{paths[0]} .. {paths[-1]}", reasons,
            views_only=is_graph and all(fact.is_view for fact in facts),
            op_call=writer.op_call() if writer.kind == "boundary" else None,
            captured_ops=sum(is_graph and fact.boundary is not None for fact in facts),
            unwritten=unwritten, own_function=function,
            keeps_own=next((self.keeps_own[node] for node in nodes if node in self.keeps_own), ""),
            checks_values=any(
                checks_values(call.op) for fact in facts if fact.recording for call in fact.recording.calls
            ),
        )  # fmt: skip

    def _plan(self, segments: tuple[Segment, ...]) -> SegmentPlan:
        result_values = [self._result_value(item) for item in self.graph.output_node().args[0]]  # type: ignore[union-attr]
        guards = torch_api.guard_expressions(self.trace.shape_env)
        others = {symbol for guard in guards for symbol in guard.free_symbols} - {self.token.symbol}
        known = [
            symbol
            for symbol in sorted(others, key=str)
            if not torch_api.is_unbacked(symbol) and self._symbol_source_for(symbol) is not None
        ]
        usable = [g for g in guards if g.free_symbols <= {self.token.symbol, *known}]
        check = torch_api.compile_expressions(usable, [self.token.symbol, *known])
        symbols = tuple(self.symbol_value(symbol) for symbol in known)
        given = [source for source in result_values if isinstance(source, int)]
        values = with_free_strides(self.values, segments, given)
        token_dim = TokenDim(str(self.token.symbol), *self.token.anchor, self.token.inputs)
        return SegmentPlan(
            token_dim, values, segments, self.trace.result, self.trace.result_leaves,
            tuple(result_values), holds(check), symbols, self.trace.state_facts,
            self._written_leaves(),
            dict(self.fills.found),
            step_memory=self._step_memory(), max_rows=self.classifier.rows.largest,
            metadata_leaves=frozenset(
                p.leaf for p in self.trace.placeholders if "is_metadata" in p.node.meta
            ),
        )  # fmt: skip

    def _step_memory(self) -> frozenset[int]:
        """Memory that captured forms write, and no other op."""
        forms, others = (
            written_storages(
                f for node, f in self.facts.items() if ("is_captured_form" in node.meta) is is_form
            )
            for is_form in (True, False)
        )
        return frozenset(self._memory[storage] for storage in forms - others if storage in self._memory)

    def _result_value(self, item: Any) -> Any:
        value = item
        if isinstance(item, fx.Node):
            value = item.meta.get("example_value")
            if isinstance(value, torch.Tensor) or self.is_eager(item):
                return self._value(item)
        expr = torch_api.expression(value, self.trace.shape_env)
        others = sorted(expr.free_symbols - {self.token.symbol}, key=str)  # type: ignore[union-attr]
        compute = torch_api.compile_expressions([expr], [self.token.symbol, *others])  # type: ignore[list-item]
        indices = tuple(self.symbol_value(symbol) for symbol in others)
        return ComputedNumber(compute, indices)

    def _written_leaves(self) -> tuple[int, ...]:
        written = written_storages(self.facts.values())
        return tuple(
            placeholder.leaf
            for placeholder in self.trace.placeholders
            if placeholder.kind == "input" and written & set(map(storage_of, fakes_of([placeholder.node])))
        )
