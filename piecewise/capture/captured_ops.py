"""Replaces calls of boundary ops by their captured form, which can be inside a graph.

The form's metadata tensors enter the graph as constants that it owns; docs/DESIGN.md has the consequences.
A node that is not replaced says why in `meta["kept_out"]`.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from boundary_ops.declare.boundary_op import BoundaryOp, CapturedForm, CaptureLimits, StepMetadata
from boundary_ops.declare.registry import lookup
from piecewise import torch_api
from piecewise.errors.capture import MissingCaptureLimit
from piecewise.ir.effects import NodeFacts
from piecewise.ir.tensors import bound_arguments, tensors_in
from piecewise.settings.config import PiecewiseConfig
from piecewise.trace.trace import Trace
from runners.state.state_check import StateRef

# One form's metadata, and the places of the model's tensors that it was made for.
MetadataMade: TypeAlias = tuple[StepMetadata, tuple[StateRef, ...]]


def write_captured_forms(trace: Trace, config: PiecewiseConfig) -> tuple[MetadataMade, ...]:
    """Replaces, in place, the calls of boundary ops that have a captured form; none with boundary="eager".

    Returns the metadata that the new calls read, one per form; raises ConfigError if a form needs a limit
    that the settings leave out.
    """
    if config.boundary != "captured":
        return ()
    enabled = enabled_ops(config)
    state = {p.node: p.state for p in trace.placeholders if p.state is not None}
    found: dict[CapturedForm, list[tuple[fx.Node, BoundaryOp, dict[str, Any]]]] = {}
    for node in trace.graph.graph.nodes:
        op = lookup(node.target) if node.op == "call_function" else None
        if op is None or op.captured_form is None or (enabled is not None and op.name not in enabled):
            continue
        call = bound_arguments(op.overload, node.args, node.kwargs)
        why = op.captured_form.refusal(_known_values(state, call))
        if why is None:
            found.setdefault(op.captured_form, []).append((node, op, call))
        else:
            node.meta["kept_out"] = why
    made: list[MetadataMade] = []
    for form, calls in found.items():
        limits = _limits(config, calls[0][1])
        metadata = form.metadata(limits, [_known_values(state, call) for _, _, call in calls])
        constants = _constants(trace.graph, metadata.tensors, len(made))
        for node, _, call in calls:
            overload, values = form.op.overload, {**call, **constants}
            node.target, node.kwargs = overload, {}
            node.args = tuple(values[argument.name] for argument in overload._schema.arguments)
            node.meta["is_captured_form"] = True
        arguments = {value for _, _, call in calls for value in call.values() if isinstance(value, fx.Node)}
        made.append((metadata, tuple(ref for node, ref in state.items() if node in arguments)))
    return tuple(made)


def enabled_ops(config: PiecewiseConfig) -> frozenset[str] | None:
    """Lists the names of the ops to cut at, captured forms included; None for all that are registered."""
    if config.boundary_ops is None:
        return None
    forms = (op.captured_form for name in config.boundary_ops if (op := lookup(name)) is not None)
    return frozenset(config.boundary_ops) | {form.op.name for form in forms if form is not None}


def fix_metadata_inputs(trace: Trace, facts: Mapping[fx.Node, NodeFacts], symbol: sympy.Symbol) -> None:
    """Marks the metadata inputs of captured ops and fixes their sizes: a graph has one shape [I2]."""
    waiting = [
        argument
        for node, fact in facts.items()
        if fact.boundary is not None and fact.boundary.capture_safe
        for argument in node.all_input_nodes
    ]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        sizes = [size for tensor in tensors_in(node.meta.get("example_value")) for size in tensor.shape]
        symbols = [torch_api.expression(size, trace.shape_env) for size in sizes]
        if node in seen or any(expr is not None and symbol in expr.free_symbols for expr in symbols):
            continue
        seen.add(node)
        waiting += node.all_input_nodes
        if node.op == "placeholder":
            node.meta["is_metadata"] = True
            for size in sizes:
                int(size)  # adds Eq(size, hint) to the ShapeEnv


def _known_values(state: Mapping[fx.Node, StateRef], call: Mapping[str, Any]) -> dict[str, Any]:
    known = ((name, each) for name, each in call.items() if not isinstance(each, fx.Node) or each in state)
    return {name: state[x].get().detach() if isinstance(x, fx.Node) else x for name, x in known}


def _limits(config: PiecewiseConfig, op: BoundaryOp) -> CaptureLimits:
    missing = [name for name in ("max_num_seqs", "max_seq_len") if getattr(config, name) is None]
    if missing or config.max_num_seqs is None or config.max_seq_len is None:
        raise MissingCaptureLimit(op=op.name, missing=" and ".join(missing), first=missing[0])
    tokens = config.max_num_tokens if config.max_num_tokens is not None else max(config.buckets)
    return CaptureLimits(config.max_num_seqs, tokens, config.max_seq_len)


def _constants(graph: fx.GraphModule, tensors: Mapping[str, torch.Tensor], index: int) -> dict[str, fx.Node]:
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    nodes = {}
    for name, tensor in tensors.items():
        path = f"step_metadata_{index}_{name}"
        graph.register_buffer(path, tensor, persistent=False)
        with graph.graph.inserting_before(first):
            nodes[name] = graph.graph.get_attr(path)
        nodes[name].meta["example_value"] = tensor
    return nodes
