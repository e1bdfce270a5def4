"""Declares a fusion pass: patterns of aten ops, each with what takes its place."""

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
    """Holds what `fusion_pass` was given; see there."""

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
        """Rewrites what it finds in one walk; returns the number of matches. It changes the graph only."""
        found = self.patterns.sweep(module)
        if found:
            self.then(module.graph)
        return found

    def trigger(self, graph: fx.Graph) -> str | None:
        """Names the ops for which a reader would expect a match, where the graph has them; else None."""
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
    """Declares the function below it, which adds its patterns to a `PatternSet`, as the pass of this name.

    Args:
        expects: names in words the ops for which a reader would expect a match, for a note where there is
            none: nodes that call one of `ops`, and of which `where` is true.
        needs: passes that must have run before this one finds anything.
        auto: the values of `lowering` for which ``fusions=("auto",)`` has this pass. Inductor joins the ops
            of norms and gated units with what is around them, which fused ops would hide from it.
        then: is called on the graph after each walk that found something.
    """

    def declare(fill: Callable[[PatternSet], None]) -> FusionPass:
        made = FusionPass(name, fill, tuple(needs), tuple(auto), expects, tuple(ops), where, then)
        FUSIONS[name] = made
        if name not in PASS_NAMES:
            PASS_NAMES.append(name)
        return made

    return declare
