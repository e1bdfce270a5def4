"""Flattens nested arguments and results once; generated straight-line code matches and rebuilds them.

`flatten_structure` gives a `Structure` and its leaves: tensors and ints, which may follow the token count.
From a structure, `build_source` generates the expression that builds the object again, and `MatchWriter` the
lines that check another object and extract its leaves. Bools are constants; other plain values are compared
by equality, other objects by identity.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from piecewise import torch_api

PLAIN = (
    *(type(None), bool, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """Describes one node of a nested object; `kind` decides which fields hold. tensor, int: `index` among the
    leaves. const: `value`. list, tuple: `children`. dict, dataclass, namedtuple: `children` beside their
    `keys`, and `type`. pytree: any other registered container, with its `spec` and its flat `children`."""

    kind: str
    index: int = -1
    value: Any = None
    type: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    spec: Any = None


def flatten_structure(
    value: Any, *, is_leaf: Callable[[Any], bool] = lambda _: False, share: bool = False
) -> tuple[Structure, list[Any]]:
    """Flattens `value` into its structure and its leaves, in order of appearance.

    Args:
        is_leaf: finds further leaves of kind "int", such as floats that are placeholders of computed numbers.
        share: whether a tensor met twice is one leaf.
    """
    leaves: list[Any] = []

    def leaf(kind: str, value: Any) -> Structure:
        if share and kind == "tensor":
            for index, seen in enumerate(leaves):
                if seen is value:
                    return Structure(kind, index=index)
        leaves.append(value)
        return Structure(kind, index=len(leaves) - 1)

    return _structure_of(value, leaf, is_leaf), leaves


def _structure_of(
    value: Any, leaf: Callable[[str, Any], Structure], is_leaf: Callable[[Any], bool]
) -> Structure:
    # An inner function that calls itself would keep the leaves alive until a garbage collection.
    def walk_all(values: Iterable[Any]) -> tuple[Structure, ...]:
        return tuple(_structure_of(each, leaf, is_leaf) for each in values)

    cls = type(value)
    if isinstance(value, torch.Tensor):
        return leaf("tensor", value)
    if cls is int or is_leaf(value):
        return leaf("int", value)
    if isinstance(value, PLAIN):
        return Structure("const", value=value)
    if cls in (list, tuple):
        return Structure(cls.__name__, children=walk_all(value))
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return Structure("namedtuple", type=cls, keys=cls._fields, children=walk_all(value))
    if cls is dict:
        return Structure("dict", keys=tuple(value), children=walk_all(value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
        keys = tuple(field.name for field in dataclasses.fields(value))
        children = walk_all(getattr(value, key) for key in keys)
        return Structure("dataclass", type=cls, keys=keys, children=children)
    if cls in torch_api.SUPPORTED_NODES:
        flat, spec = torch_api.tree_flatten(value)
        return Structure("pytree", type=cls, children=walk_all(flat), spec=spec)
    return Structure("const", value=value)


def rebuild_dataclass(cls: type, keys: Sequence[str], values: Sequence[Any]) -> Any:
    """Makes an instance as the model left it: sets fields directly, without running `__post_init__` again."""
    instance: Any = object.__new__(cls)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(instance, key, value)
    return instance


class Namespace:
    """Names the objects that generated source refers to, one name per object identity."""

    def __init__(self) -> None:
        self.globals: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def name(self, value: Any, prefix: str = "c") -> str:
        if (known := self._names.get(id(value))) is None:
            known = self._names[id(value)] = f"{prefix}{len(self.globals)}"
            self.globals[known] = value
        return known


def build_source(node: Structure, leaf_names: Sequence[str], namespace: Namespace) -> str:
    """Writes the Python expression that builds the object from the variables `leaf_names`."""
    if node.kind in ("tensor", "int"):
        return leaf_names[node.index]
    if node.kind == "const":
        is_literal = node.value is None or type(node.value) is bool
        return repr(node.value) if is_literal else namespace.name(node.value)
    parts = [build_source(child, leaf_names, namespace) for child in node.children]
    if node.kind == "list":
        return f"[{', '.join(parts)}]"
    if node.kind == "tuple":
        return f"({''.join(f'{part}, ' for part in parts)})"
    if node.kind == "dict":
        items = (f"{_key(key, namespace)}: {part}" for key, part in zip(node.keys, parts, strict=True))
        return f"{{{', '.join(items)}}}"
    if node.kind == "namedtuple":
        return f"{namespace.name(node.type)}({', '.join(parts)})"
    if node.kind == "dataclass":
        rebuild = namespace.name(rebuild_dataclass)
        return f"{rebuild}({namespace.name(node.type)}, {namespace.name(node.keys)}, [{', '.join(parts)}])"
    return f"{namespace.name(torch_api.tree_unflatten)}([{', '.join(parts)}], {namespace.name(node.spec)})"


def _key(key: Any, namespace: Namespace) -> str:
    return repr(key) if type(key) in (str, int) else namespace.name(key)


class MatchWriter:
    """Writes the body of `match(values)`, which returns None if the structure differs. `leaf_check(node,
    name)` gives conditions, true if the leaf in the variable `name` differs."""

    def __init__(self, namespace: Namespace, leaf_check: Callable[[Structure, str], list[str]]) -> None:
        self.lines: list[str] = []
        self.leaf_names: dict[int, str] = {}
        self.names, self._leaf_check = namespace, leaf_check
        self._count = 0

    def reject(self, condition: str) -> None:
        self.lines.append(f"if {condition}: return None")

    def _fresh(self, expression: str) -> str:
        self._count += 1
        name = f"v{self._count}"
        self.lines.append(f"{name} = {expression}")
        return name

    def write(self, node: Structure, name: str) -> None:
        """Appends the lines that match the object in the variable `name`."""
        names = self.names
        if node.kind in ("tensor", "int"):
            self.leaf_names[node.index] = name
            for condition in self._leaf_check(node, name):
                self.reject(condition)
        elif node.kind == "const" and (node.value is None or type(node.value) is bool):
            self.reject(f"{name} is not {node.value!r}")
        elif node.kind == "const":
            value, const = node.value, names.name(node.value)
            if (
                type(value) in (float, complex) and value == 0
            ):  # 0.0 and -0.0 are equal, and divide differently
                self.reject(f"type({name}) is not type({const}) or repr({name}) != {repr(value)!r}")
            elif isinstance(value, PLAIN):
                differs = f"type({name}) is not type({const}) or {name} != {const}"
                self.reject(f"{name} is not {const} and ({differs})")
            else:
                self.reject(f"{name} is not {const}")
        else:
            if node.kind == "pytree":
                self.reject(f"type({name}) is not {names.name(node.type)}")
                name = self._fresh(f"{names.name(torch_api.tree_flatten)}({name})")
                condition = f"{name}[1] != {names.name(node.spec)}"
                places = [f"[0][{position}]" for position in range(len(node.children))]
            elif node.kind == "dict":
                condition = f"type({name}) is not dict or tuple({name}) != {names.name(node.keys)}"
                places = [f"[{_key(key, names)}]" for key in node.keys]
            elif node.kind == "dataclass":
                condition = f"type({name}) is not {names.name(node.type)}"
                places = [f".{key}" for key in node.keys]
            else:  # list, tuple, namedtuple
                cls = names.name(node.type) if node.type else node.kind
                condition = f"type({name}) is not {cls} or len({name}) != {len(node.children)}"
                places = [f"[{position}]" for position in range(len(node.children))]
            self.reject(condition)
            for place, child in zip(places, node.children, strict=True):
                self.write(child, self._fresh(name + place))
