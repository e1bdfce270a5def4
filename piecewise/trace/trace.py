"""Model + example call → one flat FX graph with symbolic sizes, without running the model.

`dynamo_run.py` has how Dynamo is asked, `layer_reuse.py` how one layer's graph serves the others. Here what
they give becomes a `Trace`: what each placeholder stands for, how the result is put together, which Python
state it holds for constant. A dummy that does not turn up in the result was stored somewhere by forward: a
side effect that a replay would drop, so it is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.calls.form import refuse_backward_hooks
from piecewise.calls.structure import Structure
from piecewise.ir.plan import ResultLeaf, WrappedLeaf
from piecewise.report.startup_times import LayerReuse
from piecewise.trace.dynamo.result import Placeholder, placeholders_of, result_of
from piecewise.trace.dynamo.run import DynamoRun, ExampleCall, run_dynamo
from piecewise.trace.errors import fix_for_change, refuse_flags
from piecewise.trace.layers.layer_reuse import run_in_layers
from piecewise.trace.state.state import FactFinder
from piecewise.trace.state.unguarded import add_unguarded, names_read, reads_flags
from runners.errors import TraceError
from runners.state.state_check import StateFacts

__all__ = ["ExampleCall", "Placeholder", "Trace", "trace"]


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One traced forward.

    Attributes:
        graph: the Dynamo-level graph; placeholders carry fakes in ``meta["example_value"]``.
        placeholders: one per placeholder node, in order.
        result: structure of the result; `result_leaves` has one entry per leaf index.
        shape_env: where symbols are simplified, None for a graph without any.
        state_facts: what the trace saw of the model's Python state; none where it was not asked for.
        example: the call that was traced.
        leaves_seen: input tensors that forward looked at, if only at their sizes.
        reads_flags: whether forward may ask if an input is a Parameter or requires grad.
        layers: how many layers were traced, None for a model without any that look alike.
        wrapped: leaves of the result that are tensor subclasses.
    """

    graph: fx.GraphModule
    placeholders: tuple[Placeholder, ...]
    result: Structure
    result_leaves: tuple[ResultLeaf, ...]
    shape_env: torch_api.ShapeEnv | None
    state_facts: StateFacts
    example: ExampleCall
    leaves_seen: frozenset[int] = frozenset()
    reads_flags: bool = False
    layers: LayerReuse | None = None
    wrapped: tuple[WrappedLeaf, ...] = ()

    def symbols_of_leaf(self, leaf: int) -> tuple[sympy.Expr, ...]:
        """The simplified size expressions of an input tensor; empty for one that the graph does not read."""
        for placeholder in self.placeholders:
            if placeholder.kind == "input" and placeholder.leaf == leaf:
                fake = placeholder.node.meta["example_value"]
                if isinstance(fake, torch.Tensor):
                    return tuple(torch_api.expression(size, self.shape_env) for size in fake.shape)  # type: ignore[misc]
        return ()


def trace(
    model: nn.Module,
    example: ExampleCall,
    *,
    forward: Any,
    static_dims: Mapping[int, Sequence[int]] = {},
    finds_facts: bool = True,
) -> Trace:
    """Traces `forward(model's call)` with the example's structure; the model is not run and its state is
    unchanged.

    Args:
        model: the module whose state the trace records.
        forward: the callable to trace; reached from `model` (the module itself, or its own forward).
        static_dims: leaf index → dims that get no symbol; an int argument in here gets none either.
        finds_facts: whether the trace lists the Python state that it read; one that is only looked at, and
            never replayed, need not.
    Raises:
        TraceError: forward cannot be one graph, has side effects, or returns something that cannot be
            rebuilt.
    """
    disabled = torch_api.dynamo_is_disabled()
    if disabled is not None:
        raise TraceError(
            "the model cannot be traced",
            expected="torch.compile in its default stance",
            got=disabled,
            rule="the graph comes from one torch.compile trace",
            fix="leave that mode around capture(), or run the model eagerly",
        )

    refuse_backward_hooks(model, skip_root=forward is not model)

    def run(**options: Any) -> DynamoRun:
        return run_dynamo(model, example, forward=forward, static_dims=static_dims, **options)

    seen, layers = run_in_layers(model, run)
    if seen.changes:
        raise TraceError(
            f"{type(model).__name__}.forward changes {seen.changes[0]}"
            + (f" and {len(seen.changes) - 1} more" if seen.changes[1:] else ""),
            rule="a replay runs none of the model's Python, so what forward stores would be stale [I8]",
            fix=fix_for_change(model, seen.changes[0]),
        )
    if reads_flags(names_read(seen.code)):
        refuse_flags(example.leaves, example.names)
    return _finished(seen, example, layers, forward=forward, finds_facts=finds_facts)


def _finished(
    run: DynamoRun, example: ExampleCall, layers: LayerReuse | None, *, forward: Any, finds_facts: bool
) -> Trace:
    fakes = [node.meta["example_value"] for node in run.placeholders()]
    shape_env = torch_api.shape_env_of(fakes)
    torch_api.forget_tensors(torch_api.fake_mode_of(fakes))
    scope = run.scope()
    placeholders = placeholders_of(run, scope)
    structure, result_leaves, wrapped = result_of(run, placeholders)
    facts = StateFacts()
    if finds_facts:
        pairs = zip(placeholders, run.arguments, strict=True)
        places = {id(argument): each.state for each, argument in pairs if each.state is not None}
        ties = [(guard.source, guard.other) for guard in run.guards if guard.other]
        is_model = isinstance(forward, nn.Module)
        finder = FactFinder(run.model, skip_root=not is_model)
        finder.add_parameters(forward.forward if is_model else forward)
        for guard in run.guards:
            finder.add_guard(guard, scope)
        add_unguarded(
            finder, run.model, code=run.code, ties=ties, stores=run.stores, places=places, scope=scope
        )
        facts = finder.facts()
    seen = (re.match(r"L\['t(\d+)'\]", guard.source) for guard in run.guards)
    return Trace(
        run.graph, placeholders, structure, result_leaves, shape_env, facts, example,
        leaves_seen=frozenset(int(found[1]) for found in seen if found),
        reads_flags=reads_flags(names_read(run.code)), layers=layers, wrapped=wrapped,
    )  # fmt: skip
