"""Finds a model's layers of one kind, runs Dynamo over one, and decides whether its graph serves another
layer.

The graph does if the outer graph passes equivalent arguments and the run's guards give the same answers under
the other layer's sources. During a run over the rest of the model each such layer's `forward` is one op,
`call_layer`, which Dynamo does not trace into; hooks and the loop around the layers are traced as usual.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.calls.binder import CallBinder, FormBinder, is_wrapped
from piecewise.calls.structure import PLAIN, Namespace
from piecewise.ir.nodes import value_of
from piecewise.ir.tensors import map_tensors, tensors_in
from piecewise.trace.dynamo.guard_kinds import is_asked_of, is_same_to, looked_at
from piecewise.trace.dynamo.result import placeholders_of, result_of
from piecewise.trace.dynamo.run import DynamoRun, run_dynamo
from piecewise.trace.dynamo.sources import readable_path, source_reader
from piecewise.trace.state.unguarded import TABLES, names_read
from piecewise.trace.trace import ExampleCall, Placeholder

# Tracing fewer layers one by one is as fast.
_MIN_LAYERS = 3
# A linear or a norm alone is not worth it.
_MIN_SUBMODULES = 3
_numbers = itertools.count()


class RepeatedLayer(NamedTuple):
    """Describes one of several siblings of one class; `source` leads to it from ``L['model']``."""

    number: int
    module: nn.Module
    source: str


def repeated_layers(model: nn.Module) -> list[RepeatedLayer]:
    """Finds the outermost modules with at least two siblings of their class in one container."""
    found: dict[int, RepeatedLayer] = {}

    def walk(module: nn.Module, source: str) -> None:
        children = {key: child for key, child in module._modules.items() if child is not None}
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        kinds = Counter(map(type, children.values()))
        for key, child in children.items():
            place = f"{source}._modules[{key!r}]"
            is_code = isinstance(child, (torch.jit.ScriptModule, fx.GraphModule)) or "forward" in vars(child)
            is_large = sum(1 for _ in child.modules()) > _MIN_SUBMODULES
            if is_container and kinds[type(child)] >= _MIN_LAYERS and is_large and not is_code:
                found.setdefault(id(child), RepeatedLayer(next(_numbers), child, place))
            else:
                walk(child, place)

    walk(model, "L['model']")
    return list(found.values())


# Layers that are ops now. The modules outlive the block, since another trace may have seen the op.
_active: set[int] = set()
_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
# Held while layers are ops, so that no other trace of ours takes the op for a layer's own forward.
one_at_a_time = threading.RLock()


@torch.compiler.allow_in_graph
def call_layer(number: int, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of a layer, as one op. On fakes the op returns a tensor like its first one, which
    `layer_reuse.py` proves or does without; in another thread the op runs the forward."""
    given: list[torch.Tensor] = []
    map_tensors((args, kwargs), given.append)
    if number in _active and any(map(torch_api.is_fake, given)):
        like = given[0]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    module = _modules[number]
    return type(module).forward(module, *args, **kwargs)


@contextmanager
def layers_as_ops(layers: Sequence[RepeatedLayer]) -> Iterator[None]:
    """Turns each layer's forward into one op inside the block."""
    try:
        for layer in layers:
            _modules[layer.number] = layer.module
            _active.add(layer.number)
            # The number is part of the code, not a closure that Dynamo would guard.
            names: dict[str, Any] = {"call_layer": call_layer}
            exec(f"def forward(*args, **kw): return call_layer({layer.number}, *args, **kw)", names)
            names["forward"].__signature__ = inspect.signature(layer.module.forward)
            layer.module.__dict__["forward"] = names["forward"]
        yield
    finally:
        for layer in layers:
            layer.module.__dict__.pop("forward", None)
            _active.discard(layer.number)


_INPUT = re.compile(r"\bL\['[ti]\d+'\]")
_SIZE = re.compile(r"^L\['t(\d+)'\]\.size\(\)\[(\d+)\]$")
# The called function, which is compared for each module of the model; its contents are not.
_FORWARD = ("L['model'].forward", "L['model'].forward.__func__")


class NotReused(Exception):
    """Says why the whole model must be traced at once."""


def geometry(fake: torch.Tensor, shape_env: Any) -> tuple[Any, ...]:
    """Describes sizes, strides and offset, as far as their symbols are known now."""
    numbers = (*fake.shape, *fake.stride(), fake.storage_offset())
    return tuple(torch_api.expression(number, shape_env) for number in numbers)


class LayerCall:
    """Describes a layer's arguments as the outer graph passes them, and builds examples of them. Each is a
    tensor, a plain value or a tuple of such; `nodes` lists each tensor once, by number."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], shape_env: Any) -> None:
        self._args, self._kwargs, self._shape_env = tuple(args), kwargs, shape_env
        self.nodes: list[fx.Node] = []
        self._constants = self._described((self._args, *kwargs.items()))

    def _described(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self._described, value))
        if not isinstance(value, fx.Node):
            if not isinstance(value, (int, *PLAIN)):  # a list or a dict could be written
                raise NotReused(f"a layer is given a {type(value).__name__}")
            return type(value), repr(value) if isinstance(value, (float, complex)) else value  # -0.0 == 0.0
        fake: Any = value.meta.get("example_value")
        is_plain = torch_api.is_fake(fake) and not isinstance(fake, torch.nn.Parameter)
        if not is_plain or fake.requires_grad or fake.layout != torch.strided:
            raise NotReused("a layer is given something that is no plain tensor")
        # Found by its fake, as Dynamo compares identity: an op in place returns its input.
        number = next((i for i, known in enumerate(self.fakes()) if known is fake), len(self.nodes))
        self.nodes += [value] if number == len(self.nodes) else []
        return number

    def key(self) -> Any:
        """Makes a key, equal for calls that one trace may serve, as far as sizes are known now."""
        tensors = [(fake.dtype, fake.device, *geometry(fake, self._shape_env)) for fake in self.fakes()]
        return self._constants, tensors

    def fakes(self) -> list[Any]:
        return [node.meta["example_value"] for node in self.nodes]

    def example(self, binder: CallBinder) -> tuple[ExampleCall, dict[int, tuple[int, ...]], dict[int, int]]:
        """Makes the call on placeholder tensors, dims that get no symbol, and leaf → number of the tensor."""
        made = {}
        for fake in self.fakes():
            sizes, strides = (list(map(torch_api.size_hint, each)) for each in (fake.shape, fake.stride()))
            made[id(fake)] = torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
        args, kwargs = fx.node.map_arg((self._args, self._kwargs), lambda node: made[id(value_of(node))])
        example = ExampleCall.from_call(binder, args, kwargs)
        by_tensor = {id(tensor): number for number, tensor in enumerate(made.values())}
        leaves = enumerate(example.leaves)
        numbers = {at: by_tensor[id(leaf)] for at, leaf in leaves if isinstance(leaf, torch.Tensor)}
        static: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(example.leaves)), ())
        for at, number in numbers.items():
            exprs = [torch_api.expression(n, self._shape_env) for n in self.fakes()[number].shape]
            static[at] = tuple(dim for dim, size in enumerate(exprs) if size is None or size.is_number)
        return example, static, numbers


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRun:
    """Holds a run over one layer, with its inputs and outputs.

    Attributes:
        placeholders: those of the graph; states are named as if the layer were the model.
        output: which of the graph's outputs the layer returns.
        numbers: leaf index → number of the argument.
        own_guards: guards that read the layer, each once; `shared_guards` hold for each layer.
        read: a function of L: the layer's states, and for each own guard the values it compares.
    """

    layer: RepeatedLayer
    call: LayerCall
    run: DynamoRun
    placeholders: tuple[Placeholder, ...]
    output: int
    numbers: Mapping[int, int]
    own_guards: tuple[torch_api.SeenGuard, ...]
    shared_guards: tuple[torch_api.SeenGuard, ...]
    read: Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], ...]]

    @classmethod
    def over(cls, layer: RepeatedLayer, call: LayerCall, *, namespace: Namespace) -> LayerRun:
        """Runs Dynamo over a layer; raises `NotReused` if its graph cannot be copied or has unknown parts."""
        forward = layer.module.forward
        binder = FormBinder(forward) if is_wrapped(forward) else CallBinder(forward, fills_defaults=False)
        example, static, numbers = call.example(binder)
        run = run_dynamo(
            layer.module, example, forward=forward, static_dims=static, repeats=False, namespace=namespace
        )
        if run.changes or run.written:
            raise NotReused("a layer writes state")
        if run.marks_tensors or names_read(run.code) & TABLES:
            raise NotReused("a layer sets attributes of tensors, or reads names of attributes")
        for node in run.graph.graph.nodes:
            is_copied = node.op not in ("get_attr", "call_module") and not switches_mode(node)
            if not is_copied or has_unbacked(node.meta.get("example_value")):
                raise NotReused(f"'{node.name}' of a layer is of a kind that is not copied")
        placeholders = placeholders_of(run, run.scope())
        result, leaves, wrapped = result_of(run, placeholders)
        if result.kind != "tensor" or leaves[0].kind != "output" or wrapped:
            raise NotReused("a layer returns something else than one tensor that it has made")
        guards = [g for g in run.guards if not _INPUT.search(g.source) and g.source not in _FORWARD]
        own = {repr(guard): guard for guard in guards if "L['model']" in guard.source + guard.other}
        shared = tuple(guard for guard in guards if repr(guard) not in own)
        own_guards = tuple(filter(is_asked_of, own.values()))
        states = [str(run.sources[each.node.name]) for each in placeholders if each.kind == "state"]
        groups = [states, *map(looked_at, own_guards)]
        # One function for all: a deep model has many layers.
        tuples = (f"({''.join(f'{source}, ' for source in group)})" for group in groups)
        read = source_reader(tuples, run.function.__globals__)
        return cls(layer, call, run, placeholders, leaves[0].index, numbers, own_guards, shared, read)

    def read_in(self, layer: RepeatedLayer) -> tuple[tuple[Any, ...], ...]:
        """Reads in `layer` what the run read: the states, then for each own guard the compared values."""
        return self.read({"model": layer.module})

    def check_reads(self, written: Sequence[Any]) -> None:
        """Checks that the rest writes nothing that the layer reads later: traced alone, it saw old state."""
        ids, scope = set(map(id, written)), self.run.scope()
        for guard in (*self.own_guards, *self.shared_guards) if ids else ():
            if any(id(step.value) in ids for step in scope.steps_to(looked_at(guard)[0])):
                raise NotReused(f"a layer reads {readable_path(guard.source)}, which forward writes")

    def evaluate_conditions(self, shape_env: Any) -> None:
        """Turns the run's assumptions about sizes into guards of the outer graph."""
        # A symbol of the run is 2 or more, which is no guard of its own; the outer size may be less.
        sizes = [torch_api.expression(n, shape_env) for fake in self.call.fakes() for n in fake.shape]
        conditions = [sympy.Ge(size, 2) for size in sizes if size is not None and not size.is_number]
        if not all(torch_api.holds_as_guard(shape_env, condition) for condition in conditions):
            raise NotReused("a layer is given a size that is 1 in the example, and may be another")
        inner = torch_api.shape_env_of([node.meta["example_value"] for node in self.run.placeholders()])
        for condition in [guard.expr for guard in inner.guards] if inner is not None else ():
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
        """Whether everything that the run read is the same in `layer`."""
        if type(layer.module) is not type(self.layer.module):
            return False
        try:
            found = self.read_in(layer)
        except Exception:  # it lacks what was read; properties of the user's may raise anything
            return False
        seen = self.read_in(self.layer)
        if _which_are_one(seen) != _which_are_one(found):
            return False
        return all(map(is_same_to, self.own_guards, seen[1:], found[1:]))

    def size_of(self, placeholder: Placeholder) -> tuple[int, int]:
        """Finds (number of the argument, dim) of the size that a placeholder stands for."""
        if (found := _SIZE.match(self.run.sources[placeholder.node.name] or "")) is None:
            raise NotReused("a layer computes with a number that is no size")
        return self.numbers[int(found[1])], int(found[2])


def _which_are_one(values: Sequence[Sequence[Any]]) -> list[int]:
    """Numbers non-plain values by first occurrence, since forward may test identity."""
    places: dict[int, int] = {}
    found = [value for value in itertools.chain(*values) if not isinstance(value, (int, *PLAIN))]
    return [places.setdefault(id(value), place) for place, value in enumerate(found)]


def moved(source: str, layer_source: str) -> str:
    """Rewrites a source of a layer's run as one of the whole model."""
    return source.replace("L['model']", layer_source)


def switches_mode(node: fx.Node) -> bool:
    """Whether later ops run in another mode than ops before the node."""
    name = getattr(node.target, "__name__", str(node.target))
    return node.op == "call_function" and name.startswith(("_enter_", "_exit_", "_set_"))


def has_unbacked(value: Any) -> bool:
    if isinstance(value, torch_api.SYMBOLIC):
        expr = torch_api.expression(value, None)
        return expr is not None and torch_api.is_unbacked(expr)
    return any(has_unbacked(size) for tensor in tensors_in(value) for size in tensor.shape)
