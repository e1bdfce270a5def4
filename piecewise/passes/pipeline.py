"""Which passes there are, in which order, and how they run: each to a fixed point, then all again.

Order                Why there
clean_up             first, and again with all others: patterns are written for graphs without no-ops, and
                     dead code goes before anything could make an op's only effect a write
pack_linears         before what reads linears' results, which become slices of one tensor
rms_norm             before `add_rms_norm`, which joins its ops with the sums that they norm
add_rms_norm         after it
add_rms_norm_quant   after both, over the ops that they left
silu_and_mul         anywhere behind `pack_linears`
rotary               likewise; behind the norms of q and k, whose ops it reads
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from piecewise.passes import clean_up, pack_linears, rms_norm, rms_norm_quant, rotary, silu_and_mul
from piecewise.passes.fakes import propagate
from piecewise.settings.fusions import PASS_NAMES

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


# What must have run before a pass finds anything.
_NEEDS = {"add_rms_norm": ("rms_norm",), "add_rms_norm_quant": ("rms_norm", "add_rms_norm")}


def passes_named(names: Sequence[str], *, groups: Sequence[pack_linears.LinearGroup] = ()) -> list[GraphPass]:
    """The passes of these names and those that they need, in their order; `clean_up` is always one.

    Args:
        groups: the linears that may be packed, for `pack_linears`.
    """
    known = (
        GraphPass("clean_up", clean_up.sweep, lambda graph: None),
        GraphPass("pack_linears", lambda module: pack_linears.sweep(module, groups), pack_linears.trigger),
        GraphPass("rms_norm", rms_norm.rms_norm_patterns().sweep, rms_norm.trigger),
        GraphPass("add_rms_norm", rms_norm.add_rms_norm_patterns().sweep, rms_norm.add_trigger),
        GraphPass("add_rms_norm_quant", rms_norm_quant.patterns().sweep, rms_norm_quant.trigger),
        GraphPass("silu_and_mul", silu_and_mul.silu_and_mul_patterns().sweep, silu_and_mul.trigger),
        GraphPass("rotary", rotary.sweep, rotary.trigger),
    )
    assert tuple(each.name for each in known) == PASS_NAMES
    wanted = {"clean_up", *names, *(need for name in names for need in _NEEDS.get(name, ()))}
    return [each for each in known if each.name in wanted]


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
