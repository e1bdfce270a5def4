"""Writes what a graph, a segment or a node does as a key, to compare programs."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, Literal

import torch
from torch import fx

from piecewise import torch_api
from piecewise.ir.nodes import fakes_of, value_of
from piecewise.ir.plan import Segment, SegmentPlan
from piecewise.ir.tensors import storage_of

# Makes keys of unnamed programs unique.
_serial = itertools.count()


def argument_key(value: Any, *, node: Callable[[fx.Node], Any], number: Callable[[Any], Any]) -> Any:
    """Writes arguments as a key; `node` and `number` write nodes, and symbolic or plain numbers."""

    def key(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return node(value)
        if isinstance(value, (tuple, list)):
            return ("list" if isinstance(value, list) else "tuple", *map(key, value))
        if isinstance(value, dict):
            return tuple((name, key(item)) for name, item in sorted(value.items()))
        if isinstance(value, slice):
            return ("slice", key(value.start), key(value.stop), key(value.step))
        if isinstance(value, torch_api.SYMBOLIC) or type(value) in (int, float):
            return number(value)
        return repr(value)

    return key(value)


def node_key(node: fx.Node) -> Any:
    """Makes a key, equal for nodes that do the same on tensors of one kind, as repeated layers have."""
    places = {argument: place for place, argument in enumerate(node.all_input_nodes)}

    def number(value: Any) -> Any:
        # Hashing an expression takes a fraction of the time of writing it.
        return value.node.expr if isinstance(value, torch_api.SYMBOLIC) else repr(value)

    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            sizes = (*value.shape, *value.stride())
            exprs = tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)
            return value.dtype, value.device, exprs
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(kind, value))
        return number(value)

    def described(argument: fx.Node) -> Any:
        return places[argument], kind(value_of(argument))

    # Two arguments that are one node, or share memory, differ from two that do not.
    order: dict[int, int] = {}
    pattern = tuple(order.setdefault(storage_of(fake), len(order)) for fake in fakes_of(node.all_input_nodes))
    arguments = argument_key((node.args, dict(node.kwargs)), node=described, number=number)
    return node.op, str(node.target), arguments, pattern, node.meta.get("autocast", ())


def graph_key(plan: SegmentPlan, segment: Segment, *, what: Literal["program", "inputs"] = "program") -> Any:
    """Makes a key of what a segment computes and of its tensors' geometry, equal in every process. "inputs"
    adds where inputs come from, and keeps of results only which may have any strides."""
    numbers: dict[int, int] = {}

    def described(index: int) -> tuple[Any, ...]:
        value = plan.values[index]
        memory = numbers.setdefault(value.memory, len(numbers))
        return str(value.dtype), str(value.device), value.geometry, memory

    inputs = tuple(map(described, segment.inputs))
    if what == "inputs":
        free = tuple(at for at, index in enumerate(segment.outputs) if plan.values[index].any_strides)
        origins = tuple(plan.values[index].origin for index in segment.inputs)
        return segment.lowering_key, inputs, origins, free
    outputs = tuple(map(described, segment.outputs))
    written = sorted(numbers[memory] for memory in segment.writes if memory in numbers)
    return segment.lowering_key, inputs, outputs, tuple(written)


def code_key(
    kind: str, source: str, names: Mapping[str, Any], modules: Mapping[str, Any], taken: Collection[str]
) -> str:
    """Makes a key of generated code that is not `taken`, equal in each process if the code uses only torch
    and Python; code that calls other functions gets a new key each time. `names` and `modules` are the
    objects behind globals and behind attributes of ``self``."""
    lines = [source, *(f"{name} = {_named(value)}" for name, value in sorted(names.items()))]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]
    key = f"{kind}-{digest}"
    # Two objects may share a name, so that their equality is unknown.
    is_known = not modules and all(map(_is_torchs, names.values()))
    return key if is_known and key not in taken else f"{key}-{next(_serial)}"


def _named(value: Any) -> str:
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return re.sub(r" at 0x\w+", "", repr(value))


def _is_torchs(value: Any) -> bool:
    if isinstance(value, (int, float, complex, str, torch.dtype, torch.device, type(None))):
        return True
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] in ("torch", "builtins", "_operator", "math")
