"""Offers what the passes use of `torch._inductor.pattern_matcher`, for torch 2.11 to 2.13.

Its matcher never lets a match span an op that writes, so segments are rewritten without making them
functional first: what they write, and who shares memory with whom, stays as the model has it.
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
    PatternExpr,
    PatternMatcherPass,
    compute_mutation_region_ids,
    is_mutation_op,
    register_graph_pattern,
    same_mutation_regions,
)

Rewrite = Callable[[Match], None]


class PatternSet:
    """Patterns with what is done where each matches; earlier ones are tried first at each node."""

    def __init__(self, name: str) -> None:
        self._patterns = PatternMatcherPass(pass_name=name)

    def add(self, pattern: Any, check: Callable[[Match], bool], rewrite: Rewrite) -> None:
        """Registers a pattern: `check` says whether a structural match is one, before anything is changed;
        `rewrite` changes the graph, and nodes that lose their last user are removed afterwards.
        """

        def apply(match: Match, **_: Any) -> None:
            rewrite(match)

        def is_match(match: Match) -> bool:
            # What an earlier match of this sweep left without users is dead, and not there to be matched.
            return bool(match.output_node().users) and _says_all(match) and check(match)

        register_graph_pattern(pattern, extra_check=is_match, pass_dict=self._patterns)(apply)  # type: ignore[arg-type]

    def sweep(self, module: fx.GraphModule) -> int:
        """Walks over the graph once; returns the number of matches."""
        find_regions(module.graph)
        return self._patterns.apply(module)


def _says_all(match: Match) -> bool:
    """Whether no node has a keyword argument that its pattern does not name, such as the `alpha` of a sum:
    torch's matcher looks at those alone that are named."""
    return all(
        set(node.kwargs) <= set(pattern.kwargs)
        for pattern, node in match.ctx.pattern_to_node.items()
        if isinstance(pattern, CallFunction) and node is not None
    )


def find_regions(graph: fx.Graph) -> None:
    """Numbers the stretches between writing ops anew; `same_mutation_regions` compares two nodes' numbers."""
    compute_mutation_region_ids(graph)


def replace_output(match: Match, op: Any, arguments: tuple[Any, ...], *, item: int | None = None) -> None:
    """Puts a call of `op` in the place of the match's last node, or an item of its result."""
    last = match.output_node()
    with last.graph.inserting_before(last):
        made = last.graph.call_function(op, arguments)
        if item is not None:
            made = last.graph.call_function(operator.getitem, (made, item))
        last.replace_all_uses_with(made)
    last.graph.erase_node(last)
