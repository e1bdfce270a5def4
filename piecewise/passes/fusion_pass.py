"""Declares a fusion pass: patterns of aten ops and their replacements."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx

from piecewise.settings.fusions import PASS_NAMES
from piecewise.torch_api.pattern_matcher import PatternSet

FUSIONS: dict[str, FusionPass] = {}


@dataclasses.dataclass(frozen=True)
class FusionPass:
    name: str
    fill: Callable[[PatternSet], None]
    needs: Sequence[str]
    auto: Collection[str]
    expects: str
    ops: Collection[Any]
    where: Callable[[fx.Node], bool]
    then: Callable[[fx.Graph], None]

    @functools.cached_property
    def patterns(self) -> PatternSet:
        made = PatternSet(self.name)
        self.fill(made)
        return made

    def sweep(self, module: fx.GraphModule) -> int:
        found = self.patterns.sweep(module)
        if found:
            self.then(module.graph)
        return found

    def trigger(self, graph: fx.Graph) -> str | None:
        """Returns `expects` where the graph has ops that one would expect to match; else None."""
        found = any(node.target in self.ops and self.where(node) for node in graph.nodes)
        return self.expects if found else None


def fusion_pass(
    name: str,
    *,
    expects: str,
    ops: Collection[Any],
    where: Callable[[fx.Node], bool] = lambda node: True,
    needs: Sequence[str] = (),
    auto: Collection[str] = ("eager",),
    then: Callable[[fx.Graph], None] = lambda graph: None,
) -> Callable[[Callable[[PatternSet], None]], FusionPass]:
    """Declares the decorated function, which adds its patterns to a `PatternSet`, as the pass of this name.

    Args:
        expects: names the ops that one would expect to match, for a note where nothing does: nodes that call
            one of `ops` and satisfy `where`.
        needs: passes that must run before this one.
        auto: the values of `lowering` for which ``fusions=("auto",)`` has this pass. Inductor fuses norms and
            gated units with the ops around them, which a fused op would prevent.
        then: called on the graph after each walk that found a match.
    """

    def declare(fill: Callable[[PatternSet], None]) -> FusionPass:
        made = FusionPass(name, fill, tuple(needs), tuple(auto), expects, tuple(ops), where, then)
        FUSIONS[name] = made
        if name not in PASS_NAMES:
            PASS_NAMES.append(name)
        return made

    return declare
