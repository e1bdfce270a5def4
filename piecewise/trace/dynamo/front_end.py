"""Traces a model with Dynamo; the rest of the package sees only the `Trace`.

`run.py` runs Dynamo once, `layer_reuse.py` serves several layers with one layer's graph, `result.py` maps the
graph's inputs and outputs, and `state/` finds the Python state that the trace treats as constant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from piecewise import torch_api
from piecewise.calls.binder import refuse_backward_hooks
from piecewise.errors.trace import CompileIsOff, InputRequiresGrad, StoresState
from piecewise.report.startup_times import LayerReuse
from piecewise.trace.dynamo.result import placeholders_of, result_of
from piecewise.trace.dynamo.run import DynamoRun, run_dynamo
from piecewise.trace.layers.layer_reuse import run_in_layers
from piecewise.trace.state.state import FactFinder
from piecewise.trace.state.unguarded import add_unguarded, names_read, reads_flags
from piecewise.trace.trace import ExampleCall, Trace

# Fixes for Python state that the modules of a library change, by package.
_KNOWN_CHANGES = {
    "bitsandbytes": "load 8-bit weights with llm_int8_threshold=0.0, which keeps no outliers in Python, and "
    "call the model once before capture(), which lays the weights out; or load 4-bit weights"
}


def trace_with_dynamo(
    model: nn.Module, example: ExampleCall, *, forward: Any, static_dims: Mapping[int, Sequence[int]] = {}
) -> Trace:
    """Traces forward; see `FrontEnd`."""
    disabled = torch_api.dynamo_is_disabled()
    if disabled is not None:
        raise CompileIsOff(mode=disabled)
    refuse_backward_hooks(model, skip_root=forward is not model)

    def run(**options: Any) -> DynamoRun:
        return run_dynamo(model, example, forward=forward, static_dims=static_dims, **options)

    seen, layers = run_in_layers(model, run)
    if seen.changes:
        paths = seen.changes[0] + (f" and {len(seen.changes) - 1} more" if seen.changes[1:] else "")
        raise StoresState(model=type(model).__name__, paths=paths, fix=_fix_for(model, seen.changes[0]))
    if reads_flags(names_read(seen.code)):
        _refuse_flags(example)
    return _finished(seen, example, layers)


def _finished(run: DynamoRun, example: ExampleCall, layers: LayerReuse | None) -> Trace:
    fakes = [node.meta["example_value"] for node in run.placeholders()]
    torch_api.forget_tensors(torch_api.fake_mode_of(fakes))
    scope = run.scope()
    placeholders = placeholders_of(run, scope)
    structure, result_leaves, wrapped = result_of(run, placeholders)
    is_model = isinstance(run.forward, nn.Module)
    finder = FactFinder(run.model, skip_root=not is_model)
    finder.add_parameters(run.forward.forward if is_model else run.forward)
    for guard in run.guards:
        finder.add_guard(guard, scope)
    pairs = zip(placeholders, run.arguments, strict=True)
    places = {id(argument): each.state for each, argument in pairs if each.state is not None}
    add_unguarded(finder, run, places=places, scope=scope)
    seen = (re.match(r"L\['t(\d+)'\]", guard.source) for guard in run.guards)
    return Trace(
        run.graph, placeholders, structure, result_leaves, torch_api.shape_env_of(fakes), finder.facts(),
        example, leaves_seen=frozenset(int(found[1]) for found in seen if found),
        reads_flags=reads_flags(names_read(run.code)), layers=layers, wrapped=wrapped,
    )  # fmt: skip


def _fix_for(model: nn.Module, path: str) -> str | None:
    owners = [module for name, module in model.named_modules() if f"{path}.".startswith(f"model.{name}.")]
    return _KNOWN_CHANGES.get(type(owners[-1]).__module__.partition(".")[0]) if owners else None


def _refuse_flags(example: ExampleCall) -> None:
    """Refuses inputs whose flags forward would see, since the traced twins are plain tensors."""
    for index, leaf in enumerate(example.leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.requires_grad or isinstance(leaf, nn.Parameter)):
            raise InputRequiresGrad(
                name=example.names[index], kind=type(leaf).__name__, requires_grad=leaf.requires_grad
            )
