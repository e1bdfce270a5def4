"""Exports the passes' part of `torch._inductor.pattern_matcher`, for torch 2.11 to 2.13.

Matches never span an op that writes, so segments are rewritten without functionalization: writes and shared
memory stay as in the model.
"""

# ruff: noqa: F401

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    CallFunction,
    KeywordArg,
    Match,
    PatternMatcherPass,
    compute_mutation_region_ids,
    is_mutation_op,
    register_graph_pattern,
    same_mutation_regions,
)

Rewrite = Callable[[Match], None]


class PatternSet:
    """Holds patterns and their rewrites; earlier patterns are tried first at each node."""

    def __init__(self, name: str) -> None:
        self._patterns = PatternMatcherPass(pass_name=name)

    def add(self, pattern: Any, check: Callable[[Match], bool], rewrite: Rewrite) -> None:
        """Registers a pattern; nodes that lose their last user are removed after `rewrite`. `check` accepts
        or rejects a structural match, before any change."""

        def apply(match: Match, **_: Any) -> None:
            rewrite(match)

        def is_match(match: Match) -> bool:
            # The pattern must name all keyword arguments, such as `alpha`; torch's matcher ignores others.
            pairs = [(p, n) for p, n in match.ctx.pattern_to_node.items() if isinstance(p, CallFunction)]
            says_all = all(n is None or set(n.kwargs) <= set(p.kwargs) for p, n in pairs)
            # Nodes that an earlier match of this sweep left without users are dead and must not match.
            return bool(match.output_node().users) and says_all and check(match)

        register_graph_pattern(pattern, extra_check=is_match, pass_dict=self._patterns)(apply)  # type: ignore[arg-type]

    def sweep(self, module: fx.GraphModule) -> int:
        """Matches all nodes once; returns the number of matches."""
        find_regions(module.graph)
        return self._patterns.apply(module)


def find_regions(graph: fx.Graph) -> None:
    """Numbers the regions between writing ops anew; `same_mutation_regions` compares two nodes' numbers."""
    compute_mutation_region_ids(graph)


def replace_output(match: Match, op: Any, arguments: tuple[Any, ...], *, item: int | None = None) -> None:
    """Replaces the match's last node by a call of `op`, or by an item of its result."""
    last = match.output_node()
    with last.graph.inserting_before(last):
        made = last.graph.call_function(op, arguments)
        if item is not None:
            made = last.graph.call_function(operator.getitem, (made, item))
        last.replace_all_uses_with(made)
    last.graph.erase_node(last)
