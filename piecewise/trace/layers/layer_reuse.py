"""Traces one layer, and uses its graph for other layers that Dynamo would trace to the same graph.

`layer_run.py` decides whether one graph serves another layer; docs/DESIGN.md lists what a layer could see
only in its place. If anything is unusual, the whole model is traced at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.calls.structure import Namespace
from piecewise.ir.nodes import call_on_fakes, copy_calls, is_call, value_of
from piecewise.ir.tensors import storage_of, tensors_in
from piecewise.report.startup_times import LayerReuse
from piecewise.trace.dynamo.run import DynamoRun
from piecewise.trace.dynamo.sources import resolve
from piecewise.trace.layers import layer_run
from piecewise.trace.layers.layer_run import LayerCall, LayerRun, NotReused, RepeatedLayer, call_layer, moved
from piecewise.trace.trace import Placeholder
from runners.errors import one_line


def run_in_layers(model: nn.Module, run: Callable[..., DynamoRun]) -> tuple[DynamoRun, LayerReuse | None]:
    """Runs Dynamo over one layer of each kind and the rest of the model, or over the whole model if it must.
    `run` takes `repeats` and a `namespace`."""
    with layer_run.one_at_a_time:
        if not (layers := layer_run.repeated_layers(model)):
            return run(repeats=True), None
        namespace = Namespace()
        try:
            with layer_run.layers_as_ops(layers):
                whole = run(repeats=False, namespace=namespace)
            return whole, _Inliner(whole, layers, namespace).inline_layers()
        except Exception as refusal:  # whatever it is, a run over all of it does without, or has the reason
            return run(repeats=True), LayerReuse(len(layers), len(layers), one_line(refusal))


# Attributes of the way through `nn.Module.__call__`, which modules themselves do not have.
_WAYS_TO_FORWARD = ("__call__", "_call_impl", "_compiled_call_impl")


class _Inliner:
    """Inlines the graphs of layers into the run over the rest of the model, in place."""

    def __init__(self, whole: DynamoRun, layers: Sequence[RepeatedLayer], namespace: Namespace) -> None:
        self.whole, self.namespace = whole, namespace
        self.layers = {layer.number: layer for layer in layers}
        self.graph = whole.graph.graph
        self.fake_mode = torch_api.fake_mode_of(list(map(value_of, whole.placeholders())))
        self.shape_env = getattr(self.fake_mode, "shape_env", None)
        self.runs: list[LayerRun] = []
        # Per run and key of a call, the fakes of the first copy.
        self.fakes: list[tuple[LayerRun, Any, dict[fx.Node, Any]]] = []
        passed = dict(zip(whole.placeholders(), whole.arguments, strict=True))
        symbols = [node for node in passed if isinstance(value_of(node), torch.SymInt)]
        exprs = ((torch_api.expression(value_of(node), self.shape_env), node) for node in symbols)
        self.sizes = {expr: node for expr, node in exprs if expr is not None}
        # Fake → the model's own tensor.
        leaves = set(map(id, whole.leaves))
        own = [
            (n, given)
            for n, given in passed.items()
            if isinstance(given, torch.Tensor) and id(given) not in leaves
        ]
        self.states = {id(value_of(node)): given for node, given in own}
        # Tensor's id → its node in the graph.
        self.held = {id(argument): node for node, argument in passed.items()}

    def inline_layers(self) -> LayerReuse | None:
        if not (num_calls := sum(node.target is call_layer for node in self.graph.nodes)):
            return None
        if self.fake_mode is None or any(written is None for written in self.whole.written):
            raise NotReused("forward writes state that is not found again")
        if self.whole.marks_tensors:
            raise NotReused("forward sets attributes of tensors, which a layer could read")
        for node in self.graph.nodes:
            if node.op == "get_attr" or layer_run.switches_mode(node):
                raise NotReused(f"'{node.name}' may surround layers")
        self.whole.guards = [guard for guard in self.whole.guards if not self._is_of_an_op(guard)]
        renewed: set[fx.Node] = set()
        kept = self._sized_by_data_apart()
        for node in list(self.graph.nodes):
            if node.target is call_layer:
                renewed.add(self._inline(node))
            elif is_call(node) and node not in kept and not renewed.isdisjoint(node.all_input_nodes):
                if layer_run.has_unbacked(node.meta.get("example_value")):
                    raise NotReused("data tell a size")
                node.meta["example_value"] = call_on_fakes(node, self.fake_mode)
                renewed.add(node)
        self.whole.graph.recompile()
        return LayerReuse(num_calls, len(self.runs))

    def _sized_by_data_apart(self) -> set[fx.Node]:
        """Finds nodes with data-dependent sizes and own memory; another run would rename their symbols."""
        holders: dict[int, fx.Node] = {}
        found = set()
        for node in self.graph.nodes:
            value = node.meta.get("example_value")
            storages = set(map(storage_of, tensors_in(value)))
            if storages and layer_run.has_unbacked(value) and storages.isdisjoint(holders):
                found.add(node)
            holders |= dict.fromkeys(storages - holders.keys(), node)
        return found

    def _is_of_an_op(self, guard: torch_api.SeenGuard) -> bool:
        """Whether Dynamo read this only because layers had the op as their forward."""
        source = guard.source
        places = [layer.source for layer in self.layers.values()]
        forward = re.match(r"(.+?)\.forward\b", source)
        if (forward and forward[1] in places) or source.endswith("['_compiled_call_impl']"):
            return True
        if source in places and guard.arguments.get("attr") in _WAYS_TO_FORWARD:
            return True
        place = resolve(source, self.whole.scope()) if source.endswith("['call_layer']") else None
        return place is not None and place.get() is call_layer

    def _inline(self, node: fx.Node) -> fx.Node:
        number, *args = node.args
        layer = self.layers[number]  # type: ignore[index]
        call = LayerCall(args, dict(node.kwargs), self.shape_env)
        given = [self.states[id(fake)] for fake in call.fakes() if id(fake) in self.states]
        if any(map(vars, given)):
            raise NotReused("a layer is given a tensor with attributes of its own")
        served = self._run_for(layer, call)
        if not set(map(id, given)).isdisjoint(map(id, itertools.chain(*served.read_in(layer)))):
            raise NotReused("a layer is given a tensor that it also holds")  # a run over it cannot tell
        # As a run over the whole model gives them for this layer.
        to = functools.partial(moved, layer_source=layer.source)
        self.whole.guards += [
            dataclasses.replace(g, source=to(g.source), other=to(g.other)) for g in served.own_guards
        ]
        values = self._copied(served, layer, call, node)
        outputs: Any = served.run.graph.graph.output_node().args[0]
        result = values[outputs[served.output]]
        like, made = node.meta["example_value"], result.meta["example_value"]
        wanted, got = (
            (fake.dtype, fake.device, fake.requires_grad, layer_run.geometry(fake, self.shape_env)[:-1])
            for fake in (like, made)
        )
        if not torch_api.is_fake(made) or wanted != got:
            raise NotReused("a layer returns another kind of tensor than it was given")
        if storage_of(made) in map(storage_of, call.fakes()):
            raise NotReused("a layer returns memory that it was given")
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)
        return result

    def _run_for(self, layer: RepeatedLayer, call: LayerCall) -> LayerRun:
        key = call.key()
        for known in self.runs:
            # Sizes that the model ties together had a symbol each before the first layer.
            if known.call.key() == key and known.serves(layer):
                return known
        made = LayerRun.over(layer, call, namespace=self.namespace)
        self.runs.append(made)
        made.check_reads(self.whole.written)
        made.evaluate_conditions(self.shape_env)
        self.whole.code += made.run.code
        self.whole.guards += made.shared_guards
        return made

    def _copied(
        self, served: LayerRun, layer: RepeatedLayer, call: LayerCall, place: fx.Node
    ) -> dict[fx.Node, Any]:
        nodes = [each.node for each in served.placeholders if each.kind == "state"]
        states = dict(zip(nodes, served.read_in(layer)[0], strict=True))

        def argument(each: Placeholder) -> Any:
            if each.kind == "input":
                return call.nodes[served.numbers[each.leaf]]
            if each.kind == "symbol":
                number, dim = served.size_of(each)
                return self._size(call.nodes[number], dim)
            source = str(served.run.sources[each.node.name])
            return self._state(states[each.node], moved(source, layer.source))

        values = {each.node: argument(each) for each in served.placeholders if each.node.users}
        outer = dict(place.meta.get("nn_module_stack") or {})
        stacks: dict[tuple[str, ...], dict[str, Any]] = {}

        def meta_of(node: fx.Node) -> dict[str, Any]:
            stack = node.meta.get("nn_module_stack") or {}
            if tuple(stack) not in stacks:
                stacks[tuple(stack)] = outer | {
                    f"{key}@{layer.number}": (moved(served.run.as_read(path), layer.source), cls)
                    for key, (path, cls) in stack.items()
                }
            return {**node.meta, "nn_module_stack": stacks[tuple(stack)]}

        # Two symbols may have become one since, which changes how sizes are written.
        key = call.key()
        like = next((fakes for run, known, fakes in self.fakes if run is served and known == key), None)
        inner, fake_mode = served.run.graph.graph, self.fake_mode
        fakes = copy_calls(inner, values, place, like=like, fake_mode=fake_mode, meta_of=meta_of)
        if like is None:
            self.fakes.append((served, key, fakes))
        return values

    def _state(self, tensor: Any, source: str) -> fx.Node:
        if not isinstance(tensor, torch.Tensor) or torch_api.has_dynamic_dims(tensor):
            raise NotReused("the state of a layer is no tensor of a fixed size")
        if id(tensor) not in self.held:
            node = self.held[id(tensor)] = self._placed(re.sub(r"\W+", "_", source), source, tensor)
            node.meta["example_value"] = torch_api.static_fake(self.fake_mode, tensor)
        return self.held[id(tensor)]

    def _size(self, node: fx.Node, dim: int) -> Any:
        size = node.meta["example_value"].shape[dim]
        expr = torch_api.expression(size, self.shape_env)
        if expr is None or expr.is_Integer:
            return int(size)
        if expr not in self.sizes and expr.is_Symbol:
            # Dynamo itself makes such a placeholder for a symbol that an op takes.
            if (source := torch_api.source_of_symbol(self.shape_env, expr)) is None:
                raise NotReused("a size that is no input's")
            self.sizes[expr] = self._placed(str(expr), source, torch_api.size_hint(size))
        elif expr not in self.sizes:
            after = node if node.op != "placeholder" else self.whole.placeholders()[-1]
            with self.graph.inserting_after(after):
                self.sizes[expr] = self.graph.call_method("size", (node, dim))
        self.sizes[expr].meta.setdefault("example_value", size)
        return self.sizes[expr]

    def _placed(self, name: str, source: str, argument: Any) -> fx.Node:
        with self.graph.inserting_after(self.whole.placeholders()[-1]):
            node = self.graph.placeholder(name)
        self.whole.sources[node.name] = source
        self.whole.arguments = (*self.whole.arguments, argument)
        return node
