"""Traces a model with Dynamo; the rest of the package sees only the `Trace`.

`run.py` runs Dynamo once, `layer_reuse.py` serves several layers with one layer's graph, `result.py` maps the
graph's inputs and outputs, and `state/` finds the Python state that the trace treats as constant.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from piecewise import torch_api
from piecewise.calls.binder import refuse_backward_hooks
from piecewise.errors.trace import CompileIsOff, InputRequiresGrad, StoresState
from piecewise.trace.dynamo.result import placeholders_of, result_of
from piecewise.trace.dynamo.run import run_dynamo
from piecewise.trace.layers.layer_reuse import run_in_layers
from piecewise.trace.state.state import FactFinder
from piecewise.trace.state.unguarded import FLAGS, add_unguarded, names_read
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
    if (disabled := torch_api.dynamo_is_disabled()) is not None:
        raise CompileIsOff(mode=disabled)
    refuse_backward_hooks(model, skip_root=forward is not model)

    run_over_model = functools.partial(run_dynamo, model, example, forward=forward, static_dims=static_dims)
    run, layers = run_in_layers(model, run_over_model)
    if run.changes:
        paths = run.changes[0] + (f" and {len(run.changes) - 1} more" if run.changes[1:] else "")
        raise StoresState(model=type(model).__name__, paths=paths, fix=_fix_for(model, run.changes[0]))
    sees_flags = bool(names_read(run.code) & FLAGS)
    # Forward would see these flags, while the traced twins are plain tensors.
    for index, leaf in enumerate(example.leaves) if sees_flags else ():
        if isinstance(leaf, torch.Tensor) and (leaf.requires_grad or isinstance(leaf, nn.Parameter)):
            kind = type(leaf).__name__
            raise InputRequiresGrad(name=example.names[index], kind=kind, requires_grad=leaf.requires_grad)
    fakes = [node.meta["example_value"] for node in run.placeholders()]
    torch_api.forget_tensors(torch_api.fake_mode_of(fakes))
    scope = run.scope()
    placeholders = placeholders_of(run, scope)
    structure, result_leaves, wrapped = result_of(run, placeholders)
    finder = FactFinder(model, skip_root=forward is not model)
    finder.add_parameters(forward.forward if isinstance(forward, nn.Module) else forward)
    for guard in run.guards:
        finder.add_guard(guard, scope)
    pairs = zip(placeholders, run.arguments, strict=True)
    places = {id(argument): each.state for each, argument in pairs if each.state is not None}
    add_unguarded(finder, run, places=places, scope=scope)
    seen = (re.match(r"L\['t(\d+)'\]", guard.source) for guard in run.guards)
    return Trace(
        run.graph, placeholders, structure, result_leaves, torch_api.shape_env_of(fakes), finder.facts(),
        example, leaves_seen=frozenset(int(found[1]) for found in seen if found),
        reads_flags=sees_flags, layers=layers, wrapped=wrapped,
    )  # fmt: skip


def _fix_for(model: nn.Module, path: str) -> str | None:
    owners = [module for name, module in model.named_modules() if f"{path}.".startswith(f"model.{name}.")]
    return _KNOWN_CHANGES.get(type(owners[-1]).__module__.partition(".")[0]) if owners else None
