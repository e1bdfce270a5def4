"""One layer traced, and its graph used for the others that Dynamo would trace to the same.

`layer_run.py` says when one layer's graph is another's, and docs/DESIGN.md what a layer could see only in its
place; where anything is out of the ordinary, all is traced at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.calls.structure import Namespace
from piecewise.ir.nodes import call_on_fakes
from piecewise.ir.tensors import storage_of, tensors_in
from piecewise.report.startup_times import LayerReuse
from piecewise.trace.dynamo.result import Placeholder
from piecewise.trace.dynamo.run import DynamoRun
from piecewise.trace.dynamo.sources import resolve
from piecewise.trace.layers.layer_call import LayerCall, NotReused, geometry
from piecewise.trace.layers.layer_fakes import LayerFakes
from piecewise.trace.layers.layer_run import LayerRun, has_unbacked, moved, switches_mode
from piecewise.trace.layers.repeated_layers import (
    RepeatedLayer,
    call_layer,
    layers_as_ops,
    one_at_a_time,
    repeated_layers,
)
from runners.errors import told


def run_in_layers(model: nn.Module, run: Callable[..., DynamoRun]) -> tuple[DynamoRun, LayerReuse | None]:
    """A run over the model that goes through one layer of each kind, or through all where it has to.

    Args:
        run: runs Dynamo over the example call; takes `repeats` and a `namespace`.
    Raises:
        TraceError: as `run`.
    """
    with one_at_a_time:
        layers = repeated_layers(model)
        if not layers:
            return run(repeats=True), None
        namespace = Namespace()
        try:
            with layers_as_ops(layers):
                whole = run(repeats=False, namespace=namespace)
            return whole, _Weaver(whole, layers, namespace).weave()
        except Exception as refusal:  # whatever it is, a run over all of it does without, or has the reason
            return run(repeats=True), LayerReuse(len(layers), len(layers), told(refusal))


# Attributes that `nn.Module.__call__` has, and the modules themselves do not.
_WAYS_TO_FORWARD = ("__call__", "_call_impl", "_compiled_call_impl")


class _Weaver:
    """Puts the graphs of layers into the run over the rest of the model, which it changes in place."""

    def __init__(self, whole: DynamoRun, layers: Sequence[RepeatedLayer], namespace: Namespace) -> None:
        self.whole, self.namespace = whole, namespace
        self.layers = {layer.number: layer for layer in layers}
        self.graph = whole.graph.graph
        self.fake_mode = whole.fake_mode()
        self.shape_env = getattr(self.fake_mode, "shape_env", None)
        self.runs: list[LayerRun] = []
        self.fakes: list[tuple[LayerRun, Any, LayerFakes]] = []
        self.sizes = {
            expr: node
            for node in whole.placeholders()
            if isinstance(node.meta["example_value"], torch.SymInt)
            and (expr := torch_api.expression(node.meta["example_value"], self.shape_env)) is not None
        }
        passed = dict(zip(whole.placeholders(), whole.arguments, strict=True))
        # The model's own tensors, by their fakes.
        self.states = {
            id(node.meta["example_value"]): argument
            for node, argument in passed.items()
            if isinstance(argument, torch.Tensor) and not any(argument is leaf for leaf in whole.leaves)
        }
        # By tensor: where the graph has it already.
        self.held = {id(argument): node for node, argument in passed.items()}

    def weave(self) -> LayerReuse | None:
        num_calls = sum(node.target is call_layer for node in self.graph.nodes)
        if not num_calls:
            return None
        self._check_rest()
        self._forget_ops()
        renewed: set[fx.Node] = set()
        kept = self._sized_by_data_apart()
        for node in list(self.graph.nodes):
            if node.target is call_layer:
                renewed |= self._put_in(node)
            elif node.op.startswith("call") and not renewed.isdisjoint(node.all_input_nodes):
                if node in kept:
                    continue
                if has_unbacked(node.meta.get("example_value")):
                    raise NotReused("data tell a size")
                node.meta["example_value"] = call_on_fakes(node, self.fake_mode)
                renewed.add(node)
        self.whole.graph.recompile()
        return LayerReuse(num_calls, len(self.runs))

    def _sized_by_data_apart(self) -> set[fx.Node]:
        """Nodes whose results have sizes that data tell, in memory of their own: what the first run says of
        them holds whichever layers came before, and another run would name the sizes anew."""
        holders: dict[int, fx.Node] = {}
        for node in self.graph.nodes:
            for tensor in tensors_in(node.meta.get("example_value")):
                holders.setdefault(storage_of(tensor), node)
        found = set()
        for node in self.graph.nodes:
            tensors = list(tensors_in(node.meta.get("example_value")))
            is_apart = tensors and all(holders[storage_of(tensor)] is node for tensor in tensors)
            if is_apart and has_unbacked(node.meta["example_value"]):
                found.add(node)
        return found

    def _check_rest(self) -> None:
        """That layers can be traced apart from the rest."""
        if self.fake_mode is None or any(written is None for written in self.whole.written):
            raise NotReused("forward writes state that is not found again")
        if self.whole.marks_tensors:
            raise NotReused("forward sets attributes of tensors, which a layer could read")
        for node in self.graph.nodes:
            if node.op == "get_attr" or switches_mode(node):
                raise NotReused(f"'{node.name}' may surround layers")

    def _forget_ops(self) -> None:
        """Drops what Dynamo looked at only because layers had a forward of their own, the op."""
        places = [layer.source for layer in self.layers.values()]
        forwards = re.compile(rf"(?:{'|'.join(map(re.escape, places))})\\.forward\\b")

        def is_of_an_op(guard: torch_api.SeenGuard) -> bool:
            source = guard.source
            if forwards.match(source) or source.endswith("['_compiled_call_impl']"):
                return True
            if source in places and guard.arguments.get("attr") in _WAYS_TO_FORWARD:
                return True
            # The op itself: a global of the forwards that layers had.
            place = resolve(source, self.whole.scope()) if source.endswith("['call_layer']") else None
            return place is not None and place.get() is call_layer

        self.whole.guards = [guard for guard in self.whole.guards if not is_of_an_op(guard)]

    def _put_in(self, node: fx.Node) -> set[fx.Node]:
        """Replaces a call of a layer by the layer's graph; returns the nodes that stand for its result."""
        number, *args = node.args
        layer = self.layers[number]  # type: ignore[index]
        call = LayerCall(args, dict(node.kwargs), self.shape_env)
        given = [self.states[id(fake)] for fake in call.fakes() if id(fake) in self.states]
        if any(map(vars, given)):
            raise NotReused("a layer is given a tensor with attributes of its own")
        served = self._run_for(layer, call)
        if served.reads_one_of(given, layer):
            raise NotReused("a layer is given a tensor that it also holds")
        self.whole.guards += served.guards_of(layer)
        values = self._copied(served, layer, call, node)
        return self._replaced(node, call, served, values)

    def _run_for(self, layer: RepeatedLayer, call: LayerCall) -> LayerRun:
        key = call.key()
        for known in self.runs:
            # Sizes that the model ties together were one symbol each before the first layer.
            if known.call.key() == key and known.serves(layer):
                return known
        self.runs.append(self._run_over(layer, call))
        return self.runs[-1]

    def _run_over(self, layer: RepeatedLayer, call: LayerCall) -> LayerRun:
        made = LayerRun.over(layer, call, namespace=self.namespace)
        made.check_reads(self.whole.written)
        made.evaluate_conditions(self.shape_env)
        self.whole.code += made.run.code
        self.whole.guards += made.shared_guards
        return made

    def _copied(
        self, served: LayerRun, layer: RepeatedLayer, call: LayerCall, place: fx.Node
    ) -> dict[fx.Node, Any]:
        """Copies the nodes of a layer's graph in front of `place`; returns node → copy."""
        states = served.states_of(layer)
        values = {
            each.node: self._argument(served, each, layer, call, states)
            for each in served.placeholders
            if each.node.users
        }
        # Symbols that were two have become one since, and sizes would be written in another way.
        key = call.key()
        like = next(
            (fakes.values for run, known, fakes in self.fakes if run is served and known == key), None
        )
        fakes = LayerFakes(values, like, self.fake_mode)
        if like is None:
            self.fakes.append((served, key, fakes))
        outer = dict(place.meta.get("nn_module_stack") or {})
        stacks: dict[tuple[str, ...], dict[str, Any]] = {}
        with self.graph.inserting_before(place):
            for node in served.run.graph.graph.nodes:
                if not node.op.startswith("call"):
                    continue
                copy = values[node] = self.graph.node_copy(node, lambda old: values[old])
                stack = node.meta.get("nn_module_stack") or {}
                if tuple(stack) not in stacks:
                    stacks[tuple(stack)] = outer | {
                        f"{key}@{layer.number}": (moved(served.run.as_read(path), layer.source), cls)
                        for key, (path, cls) in stack.items()
                    }
                copy.meta["nn_module_stack"] = stacks[tuple(stack)]
                copy.meta["example_value"] = fakes.of(node, copy)
        return values

    def _argument(
        self,
        served: LayerRun,
        placeholder: Placeholder,
        layer: RepeatedLayer,
        call: LayerCall,
        states: Mapping[fx.Node, Any],
    ) -> Any:
        if placeholder.kind == "input":
            return call.nodes[served.numbers[placeholder.leaf]]
        if placeholder.kind == "symbol":
            number, dim = served.size_of(placeholder)
            return self._size(call.nodes[number], dim)
        tensor = states[placeholder.node]
        if not isinstance(tensor, torch.Tensor) or torch_api.has_dynamic_dims(tensor):
            raise NotReused("the state of a layer is no tensor of a fixed size")
        if id(tensor) not in self.held:
            source = served.source(placeholder, layer)
            node = self.held[id(tensor)] = self._placed(re.sub(r"\W+", "_", source), source, tensor)
            node.meta["example_value"] = torch_api.static_fake(self.fake_mode, tensor)
        return self.held[id(tensor)]

    def _size(self, node: fx.Node, dim: int) -> Any:
        size = node.meta["example_value"].shape[dim]
        expr = torch_api.expression(size, self.shape_env)
        if expr is None or expr.is_Integer:
            return int(size)
        if expr not in self.sizes:
            self.sizes[expr] = self._new_symbol(expr, size) if expr.is_Symbol else self._new_size(node, dim)
            self.sizes[expr].meta["example_value"] = size
        return self.sizes[expr]

    def _new_size(self, node: fx.Node, dim: int) -> fx.Node:
        after = node if node.op != "placeholder" else self.whole.placeholders()[-1]
        with self.graph.inserting_after(after):
            return self.graph.call_method("size", (node, dim))

    def _new_symbol(self, symbol: sympy.Expr, size: Any) -> fx.Node:
        """A placeholder, as Dynamo itself makes it for a symbol that an op is given."""
        source = torch_api.source_of_symbol(self.shape_env, symbol)
        if source is None:
            raise NotReused("a size that is no input's")
        return self._placed(str(symbol), source, torch_api.size_hint(size))

    def _placed(self, name: str, source: str, argument: Any) -> fx.Node:
        """A new placeholder behind the others, and what stands for it."""
        with self.graph.inserting_after(self.whole.placeholders()[-1]):
            node = self.graph.placeholder(name)
        self.whole.sources[node.name] = source
        self.whole.arguments = (*self.whole.arguments, argument)
        return node

    def _replaced(
        self, node: fx.Node, call: LayerCall, served: LayerRun, values: Mapping[fx.Node, Any]
    ) -> set[fx.Node]:
        outputs: Any = served.run.graph.graph.output_node().args[0]
        real = values[outputs[served.output]]
        made = real.meta["example_value"]
        if not _is_alike(node.meta["example_value"], made, self.shape_env):
            raise NotReused("a layer returns another kind of tensor than it was given")
        if storage_of(made) in map(storage_of, call.fakes()):
            raise NotReused("a layer returns memory that it was given")
        node.replace_all_uses_with(real)
        self.graph.erase_node(node)
        return {real}


def _is_alike(left: Any, right: Any, shape_env: Any) -> bool:
    return (
        torch_api.is_fake(right)
        and (left.dtype, left.device, left.requires_grad) == (right.dtype, right.device, right.requires_grad)
        and geometry(left, shape_env)[:-1] == geometry(right, shape_env)[:-1]
    )
