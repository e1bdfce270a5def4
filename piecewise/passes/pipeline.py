"""Orders the passes, and runs each to a fixed point, then all again until none finds a match.

`clean_up` comes first: patterns are written for graphs without no-ops, and dead code must go before a write
could become an op's only effect. `pack_linears` comes before the passes that read the results of linears,
which become slices of one tensor. Each fusion follows those that it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import fx

import piecewise.passes.fusions  # noqa: F401  (they declare themselves)
from piecewise.passes import clean_up, pack_linears
from piecewise.passes.fakes import propagate
from piecewise.passes.fusion_pass import FUSIONS

# A pass that finds work this often does not converge.
_MAX_SWEEPS = 100


class GraphPass(NamedTuple):
    """Describes one rewrite; `sweep` and `trigger` are as in `FusionPass`."""

    name: str
    sweep: Callable[[fx.GraphModule], int]
    trigger: Callable[[fx.Graph], str | None]


def passes_for(fusions: Sequence[str], lowering: str) -> tuple[str, ...]:
    """Lists the passes for the settings `fusions` and `lowering`."""
    if tuple(fusions) != ("auto",):
        return tuple(fusions)
    return ("clean_up", "pack_linears", *(each for each in sorted(FUSIONS) if lowering in FUSIONS[each].auto))


def passes_named(names: Sequence[str], *, groups: Sequence[pack_linears.LinearGroup] = ()) -> list[GraphPass]:
    """Returns `clean_up`, the passes of these names and those that they need, in order."""
    found = {"clean_up": GraphPass("clean_up", clean_up.sweep, lambda graph: None)}
    if "pack_linears" in names:
        sweep = partial(pack_linears.sweep, groups=groups)
        found["pack_linears"] = GraphPass("pack_linears", sweep, pack_linears.trigger)

    def add(name: str) -> None:
        fusion = FUSIONS[name]
        for need in fusion.needs:
            add(need)
        found.setdefault(name, GraphPass(name, fusion.sweep, fusion.trigger))

    for name in sorted(set(names) & set(FUSIONS)):
        add(name)
    return list(found.values())


def run_passes(module: fx.GraphModule, passes: Sequence[GraphPass], fake_mode: Any) -> Counter[str]:
    """Rewrites an aten graph in place, fakes included, until no pass matches; returns matches per pass."""
    found: Counter[str] = Counter()
    while True:
        before = found.total()
        for each in passes:
            for _ in range(_MAX_SWEEPS):
                count = each.sweep(module)
                found[each.name] += count
                if not count:
                    break
                clean_up.remove_dead_nodes(module.graph)
                propagate(module.graph, fake_mode)
            else:
                raise AssertionError(f"pass {each.name} still matches after {_MAX_SWEEPS} sweeps")
        if found.total() == before:
            module.recompile()
            return found
