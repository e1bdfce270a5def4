"""Numbers the values of one cut: values across segment borders, inputs, state, and sizes of inputs."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from piecewise import torch_api
from piecewise.analysis.classify import Classifier, Verdict
from piecewise.ir.nodes import value_of
from piecewise.ir.plan import ComputedNumber, PaddedRows, ValueSpec
from piecewise.ir.sizes import SizeFunctions
from piecewise.ir.tensors import storage_of
from runners.state.state_check import StateRef


class CutContext:
    """Holds what is known of one classified trace during the cut: verdicts, and values by number."""

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier
        self.trace, self.facts, self.token = classifier.trace, classifier.facts, classifier.token
        self.graph = self.trace.graph.graph
        self.verdicts: dict[fx.Node, Verdict] = classifier.run()
        self.values: list[ValueSpec] = []
        self._index_of: dict[fx.Node | sympy.Symbol, int] = {}
        self._memory: dict[int, int] = {}
        self._placeholders = {placeholder.node: placeholder for placeholder in self.trace.placeholders}
        self._sizes = SizeFunctions(self.trace.shape_env, self.token.symbol)

    def is_eager(self, node: fx.Node) -> bool:
        return node in self.verdicts and self.verdicts[node].kind == "eager"

    def crosses(self, node: fx.Node) -> bool:
        """Whether the node's value can leave its segment: no size and no tuple."""
        value = value_of(node)
        return isinstance(value, torch.Tensor) or (
            self.is_eager(node) and not isinstance(value, (tuple, list))
        )

    def memory_of(self, storage: int) -> int:
        """Returns the number of a memory, which all values in it share."""
        return self._memory.setdefault(storage, len(self._memory))

    def known_memories(self, storages: set[int]) -> set[int]:
        """Returns the numbers of the memories that hold a value."""
        return {self._memory[storage] for storage in storages if storage in self._memory}

    def value_of(self, node: fx.Node) -> int:
        """Returns the number of a node's value."""
        if node not in self._index_of:
            self._index_of[node] = len(self.values)
            self.values.append(self._spec(node, len(self.values)))
        return self._index_of[node]

    def _spec(self, node: fx.Node, index: int) -> ValueSpec:
        fake, leaf, state = value_of(node), -1, None
        if node in self.verdicts:
            origin = self.verdicts[node].kind
        elif node.op == "get_attr":
            fake = getattr(self.trace.graph, str(node.target))
            origin, state = "state", StateRef({node.name: fake}, node.name, node.name)
        else:
            placeholder = self._placeholders[node]
            origin, leaf, state = placeholder.kind, placeholder.leaf, placeholder.state
        if not isinstance(fake, torch.Tensor):
            return ValueSpec(index, node.name, origin, leaf=leaf, state=state)
        sizes, strides = self._sizes.of(fake.shape), self._sizes.of(fake.stride())
        units = self.classifier.judge.sizes(fake.shape) or ()
        return ValueSpec(
            index, node.name, origin, fake.dtype, fake.device, sizes, strides, self._sizes.token_dims(fake),
            self.memory_of(storage_of(fake)), leaf=leaf, state=state,
            offset=self._sizes.of((fake.storage_offset(),)), geometry=self._sizes.text(fake),
            units=tuple(size.unit if size.constant is None else 1 for size in units),
            padded=self._padded(node) if origin == "graph" else PaddedRows(),
        )  # fmt: skip

    def _padded(self, node: fx.Node) -> PaddedRows:
        (rows,) = self.classifier.rows.rows_of(node)
        counts = self.classifier.judge.known.counts

        def bounds(num_rows: int) -> tuple[int | None, int | None]:
            at = int(counts.searchsorted(num_rows))
            low, high = (int(side.values[at]) if side is not None else None for side in rows.bounds[:2])
            return low, high

        return PaddedRows(rows.is_real, bounds, self.classifier.rows.is_prefix(node))

    def value_of_symbol(self, symbol: sympy.Symbol) -> int:
        """Returns the number of a symbol other than the token count: an int input, or a size of an input."""
        if symbol not in self._index_of:
            source = self.source_of(symbol)
            assert source is not None, f"symbol {symbol} belongs to no input"
            leaf, dim = source
            self._index_of[symbol] = len(self.values)
            self.values.append(ValueSpec(len(self.values), str(symbol), "symbol", leaf=leaf, dim=dim))
        return self._index_of[symbol]

    def source_of(self, symbol: sympy.Symbol) -> tuple[int, int] | None:
        """Finds (leaf, dim) of the input that gives the symbol its value; dim −1 for an int."""
        sizes = torch_api.symbolic_sizes(self.trace.shape_env)
        return next((place for place, expr in sizes.items() if expr == symbol), None)

    def expression(self, value: Any) -> sympy.Expr | None:
        """Simplifies, as `torch_api.expression`."""
        return torch_api.expression(value, self.trace.shape_env)

    def result_value(self, item: Any) -> int | ComputedNumber:
        """Returns an output of the graph as the number of a value, or as a number computed from sizes."""
        value = value_of(item) if isinstance(item, fx.Node) else item
        if isinstance(item, fx.Node) and (isinstance(value, torch.Tensor) or self.is_eager(item)):
            return self.value_of(item)
        expr: Any = self.expression(value)
        others = sorted(expr.free_symbols - {self.token.symbol}, key=str)
        compute = torch_api.compile_expressions([expr], [self.token.symbol, *others])
        return ComputedNumber(compute, tuple(map(self.value_of_symbol, others)))
