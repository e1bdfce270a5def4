"""Which passes there are, in which order, and how they run: each to a fixed point, then all again.

Order                Why there
clean_up             first, and again with all others: patterns are written for graphs without no-ops, and
                     dead code goes before anything could make an op's only effect a write
pack_linears         before what reads linears' results, which become slices of one tensor
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from piecewise.passes import PASS_NAMES, clean_up, pack_linears
from piecewise.passes.fakes import propagate

# A pass that finds work this often does not converge.
_MAX_SWEEPS = 100

Sweep = Callable[[fx.GraphModule], int]


@dataclasses.dataclass(frozen=True, slots=True)
class GraphPass:
    """One rewrite.

    Attributes:
        sweep: rewrites what it finds in one walk; returns the number of matches. It changes the graph only.
        trigger: the op for which a reader would expect a match, where the graph has it; else None.
    """

    name: str
    sweep: Sweep
    trigger: Callable[[fx.Graph], str | None]


def passes_named(names: Sequence[str], *, groups: Sequence[pack_linears.LinearGroup] = ()) -> list[GraphPass]:
    """The passes of these names, in their order; `clean_up` is always one.

    Args:
        groups: the linears that may be packed, for `pack_linears`.
    """
    known = (
        GraphPass("clean_up", clean_up.sweep, lambda graph: None),
        GraphPass("pack_linears", lambda module: pack_linears.sweep(module, groups), pack_linears.trigger),
    )
    assert tuple(each.name for each in known) == PASS_NAMES
    return [each for each in known if each.name == "clean_up" or each.name in names]


def run_passes(module: fx.GraphModule, passes: Sequence[GraphPass], fake_mode: Any) -> Counter[str]:
    """Rewrites `module` until no pass finds a match.

    Args:
        module: an aten graph whose nodes carry fakes in ``meta["val"]``; changed in place.
    Returns:
        Matches per pass.
    """
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
