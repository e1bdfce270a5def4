"""A run of Dynamo over one layer, and whether its graph serves another layer, too: by its guards, which are
asked about the other layer what they were asked about this one, under the sources that lead there.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from torch import fx, nn

from piecewise import torch_api
from piecewise.calls.binder import CallBinder, FormBinder
from piecewise.calls.form import is_wrapped
from piecewise.calls.structure import PLAIN, Namespace
from piecewise.ir.tensors import tensors_in
from piecewise.trace.dynamo.guard_answers import is_same_to, looked_at
from piecewise.trace.dynamo.guard_kinds import is_asked_of
from piecewise.trace.dynamo.result import Placeholder, placeholders_of, result_of
from piecewise.trace.dynamo.run import DynamoRun, run_dynamo
from piecewise.trace.dynamo.sources import Scope, readable_path
from piecewise.trace.layers.layer_call import LayerCall, NotReused
from piecewise.trace.layers.repeated_layers import RepeatedLayer
from piecewise.trace.state.unguarded import names_read, reads_attribute_tables

_INPUT = re.compile(r"\bL\['[ti]\d+'\]")
_SIZE = re.compile(r"^L\['t(\d+)'\]\.size\(\)\[(\d+)\]$")
# What is called, which is compared for each module of the model; what it holds is not.
_FORWARD = ("L['model'].forward", "L['model'].forward.__func__")
# Ops that change the modes of those after them.
_MODE_SWITCHES = ("_enter_", "_exit_", "_set_")


def _reader(
    states: Sequence[str], guarded: Sequence[Sequence[str]], names: dict[str, Any]
) -> Callable[[nn.Module], tuple[list[Any], list[tuple[Any, ...]]]]:
    """What a run over a layer read, as one function of the layer: a deep model has many layers.

    Args:
        states: sources of tensors. `guarded`: for each guard those of what it looks at.
        names: those that sources use as G.
    """
    parts = [f"({''.join(f'{source}, ' for source in sources)})" for sources in guarded]
    text = f"lambda L: ([{', '.join(states)}], [{', '.join(parts)}])"
    read = eval(text, {**torch_api.names_in_sources(), "G": names})  # Dynamo's own source text
    return lambda layer: read({"model": layer})


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRun:
    """A run over one layer, and what its graph takes and gives.

    Attributes:
        layer, call: what was run, with which arguments.
        placeholders: those of the graph; a state is named as if the layer were the model.
        output: which of the graph's outputs the layer returns.
        numbers: leaf index → number of the argument that it is.
        own_guards: those that look at the layer, each once; `shared_guards` hold for each layer.
        read: the states in a layer, and per own guard what it looks at there.
    """

    layer: RepeatedLayer
    call: LayerCall
    run: DynamoRun
    placeholders: tuple[Placeholder, ...]
    output: int
    numbers: Mapping[int, int]
    own_guards: tuple[torch_api.SeenGuard, ...]
    shared_guards: tuple[torch_api.SeenGuard, ...]
    read: Callable[[nn.Module], tuple[list[Any], list[tuple[Any, ...]]]]

    @classmethod
    def over(cls, layer: RepeatedLayer, call: LayerCall, *, namespace: Namespace) -> LayerRun:
        """Runs Dynamo over a layer.

        Raises:
            NotReused: its graph could not be copied, or says too little.
            TraceError: it is not one graph.
        """
        forward = layer.module.forward
        binder = FormBinder(forward) if is_wrapped(forward) else CallBinder(forward, fills_defaults=False)
        example, static, numbers = call.example(binder)
        run = run_dynamo(
            layer.module, example, forward=forward, static_dims=static, repeats=False, namespace=namespace
        )
        if run.changes or run.written:
            raise NotReused("a layer writes state")
        if run.marks_tensors or reads_attribute_tables(names_read(run.code)):
            raise NotReused("a layer sets attributes of tensors, or reads names of attributes")
        for node in run.graph.graph.nodes:
            is_copied = node.op not in ("get_attr", "call_module") and not switches_mode(node)
            if not is_copied or has_unbacked(node.meta.get("example_value")):
                raise NotReused(f"'{node.name}' of a layer is of a kind that is not copied")
        placeholders = placeholders_of(run, run.scope())
        result, leaves, wrapped = result_of(run, placeholders)
        if result.kind != "tensor" or leaves[0].kind != "output" or wrapped:
            raise NotReused("a layer returns something else than one tensor that it has made")
        guards = [
            guard for guard in run.guards if not _INPUT.search(guard.source) and guard.source not in _FORWARD
        ]
        own = {repr(guard): guard for guard in guards if "L['model']" in guard.source + guard.other}
        shared = tuple(guard for guard in guards if repr(guard) not in own)
        own_guards = tuple(filter(is_asked_of, own.values()))
        states = [_source_of(run, each) for each in placeholders if each.kind == "state"]
        read = _reader(states, list(map(looked_at, own_guards)), run.function.__globals__)
        return cls(layer, call, run, placeholders, leaves[0].index, numbers, own_guards, shared, read)

    def check_reads(self, written: Sequence[Any]) -> None:
        """That the layer reads nothing which the rest writes before the call: alone it saw the old state.

        Raises:
            NotReused: it does.
        """
        ids, scope = set(map(id, written)), self.run.scope()
        for guard in (*self.own_guards, *self.shared_guards) if ids else ():
            if any(id(value) in ids for value in _values_along(guard, scope)):
                raise NotReused(f"a layer reads {readable_path(guard.source)}, which forward writes")

    def evaluate_conditions(self, shape_env: Any) -> None:
        """Makes what the run assumed of sizes conditions of the graph around it.

        Raises:
            NotReused: it is not about sizes, or does not hold there.
        """
        # A symbol of the run is 2 or more, which is no condition of its own; what it stands for may be less.
        sizes = [torch_api.expression(n, shape_env) for fake in self.call.fakes() for n in fake.shape]
        conditions = [sympy.Ge(size, 2) for size in sizes if size is not None and not size.is_number]
        if not all(torch_api.holds_as_guard(shape_env, condition) for condition in conditions):
            raise NotReused("a layer is given a size that is 1 in the example, and may be another")
        inner = torch_api.shape_env_of([node.meta["example_value"] for node in self.run.placeholders()])
        for condition in torch_api.raw_guards(inner):
            taken = {}
            for symbol in condition.free_symbols:
                leaf, dim = torch_api.symbol_source(inner, symbol) or (-1, -1)
                if dim < 0:
                    raise NotReused("a condition on a number that is no size")
                size = self.call.fakes()[self.numbers[leaf]].shape[dim]
                taken[symbol] = torch_api.expression(size, shape_env)
            if not torch_api.holds_as_guard(shape_env, condition.xreplace(taken)):
                raise NotReused("a layer's condition does not hold in the whole")

    def serves(self, layer: RepeatedLayer) -> bool:
        """Whether all that the run read is the same in `layer`."""
        if type(layer.module) is not type(self.layer.module):
            return False
        try:
            states, guarded = self.read(layer.module)
        except Exception:  # it lacks what was read; properties of the user's may raise anything
            return False
        old_states, seen = self.read(self.layer.module)
        if _which_are_one(old_states, *seen) != _which_are_one(states, *guarded):
            return False
        return all(map(is_same_to, self.own_guards, seen, guarded))

    def reads_one_of(self, tensors: Sequence[Any], layer: RepeatedLayer) -> bool:
        """Whether `layer` itself leads to one of these tensors: a run over it takes them for others."""
        states, guarded = self.read(layer.module)
        read = set(map(id, itertools.chain(states, *guarded)))
        return any(id(tensor) in read for tensor in tensors)

    def guards_of(self, layer: RepeatedLayer) -> list[torch_api.SeenGuard]:
        """The layer's own guards, as a run over the whole model gives them for `layer`."""
        return [
            dataclasses.replace(
                guard, source=moved(guard.source, layer.source), other=moved(guard.other, layer.source)
            )
            for guard in self.own_guards
        ]

    def source(self, placeholder: Placeholder, layer: RepeatedLayer) -> str:
        """The source of a state, for `layer`."""
        return moved(_source_of(self.run, placeholder), layer.source)

    def states_of(self, layer: RepeatedLayer) -> dict[fx.Node, Any]:
        """Placeholder of a state → what it stands for in `layer`."""
        states = [each.node for each in self.placeholders if each.kind == "state"]
        return dict(zip(states, self.read(layer.module)[0], strict=True))

    def size_of(self, placeholder: Placeholder) -> tuple[int, int]:
        """(number of the argument, dim) of the size that a placeholder stands for.

        Raises:
            NotReused: it is another number.
        """
        found = _SIZE.match(self.run.sources[placeholder.node.name] or "")
        if found is None:
            raise NotReused("a layer computes with a number that is no size")
        return self.numbers[int(found[1])], int(found[2])


def _which_are_one(*values: Sequence[Any]) -> list[int]:
    """For each value that is no plain one, where it is met first: forward may ask which are one object."""
    places: dict[int, int] = {}
    found = [value for value in itertools.chain(*values) if not isinstance(value, (int, *PLAIN))]
    return [places.setdefault(id(value), place) for place, value in enumerate(found)]


def _values_along(guard: torch_api.SeenGuard, scope: Scope) -> list[Any]:
    """The values at each step of the way to what a guard looks at."""
    try:
        return [step.value for step in scope.steps(looked_at(guard)[0])]
    except Exception:  # there is nothing, or a property of the user's
        return []


def moved(source: str, layer_source: str) -> str:
    """A source of a run over a layer, as the whole model's."""
    return source.replace("L['model']", layer_source)


def _source_of(run: DynamoRun, placeholder: Placeholder) -> str:
    text = run.sources[placeholder.node.name]
    assert text is not None, "state has a path"
    return text


def switches_mode(node: fx.Node) -> bool:
    """Whether ops after the node run in another mode than those before it."""
    name = getattr(node.target, "__name__", str(node.target))
    return node.op == "call_function" and name.startswith(_MODE_SWITCHES)


def has_unbacked(value: Any) -> bool:
    """Whether data tell a size in it, or a number."""
    if isinstance(value, torch_api.SYMBOLIC):
        expr = torch_api.expression(value, None)
        return expr is not None and torch_api.is_unbacked(expr)
    return any(has_unbacked(size) for tensor in tensors_in(value) for size in tensor.shape)
