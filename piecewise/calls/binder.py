"""Binds calls to forward's parameters, so that positional and keyword calls match alike [I10].

`CallBinder` maps `(args, kwargs)` to one value per parameter, through a generated function with forward's own
signature, so that Python's call machinery does the work; `FormBinder` keeps a call's form.
`write_matcher` generates the check of bound values against a trace's structure, which extracts the leaves.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from piecewise.calls.structure import PLAIN, MatchWriter, Namespace, Structure, build_source
from piecewise.errors.trace import BackwardHook


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


class _Source(str):
    def __repr__(self) -> str:
        return str(self)


MISSING = _Missing()
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallBinder:
    """Binds calls to forward's parameters; keeps the order of further keywords, which forward may see.

    An argument that was not passed becomes its plain default, so that both calls are equal, or else
    `MISSING`. An int default is not passed, since as an argument it would be a symbol. Without
    `fills_defaults` no default is passed.
    """

    def __init__(self, forward: Callable[..., Any], *, fills_defaults: bool = True) -> None:
        self.parameters = tuple(inspect.signature(forward).parameters.values())
        self.names = tuple(parameter.name for parameter in self.parameters)
        written = []
        names: dict[str, Any] = {"_missing": MISSING}
        for position, parameter in enumerate(self.parameters):
            kind = parameter.kind
            default: Any = parameter.empty
            if kind not in _VARIABLE:
                is_plain = isinstance(parameter.default, PLAIN) and kind != parameter.POSITIONAL_ONLY
                default = _Source(f"_default{position}" if is_plain and fills_defaults else "_missing")
                names.setdefault(default, parameter.default)
            written.append(parameter.replace(default=default, annotation=parameter.empty))
        source = f"lambda {str(inspect.Signature(written))[1:-1]}: ({''.join(f'{n},' for n in self.names)})"
        self.bind: Callable[..., tuple] = eval(source, names)
        self.bind.__qualname__ = "forward"  # a call that does not fit is told in forward's name

    def absent(self, bound: tuple) -> list[str]:
        """Names the parameters without a default and without a value in this bound call."""
        missing = (each for each, value in zip(self.parameters, bound, strict=True) if value is MISSING)
        return [each.name for each in missing if each.default is each.empty and each.kind not in _VARIABLE]

    def call_source(self, values: Structure, leaf_names: Sequence[str], namespace: Namespace) -> str:
        """Writes the argument list that repeats the bound call, by keyword wherever forward allows it."""
        pairs = list(zip(self.parameters, values.children, strict=True))
        has_star = any(each.kind == each.VAR_POSITIONAL and child.children for each, child in pairs)
        parts = []
        for parameter, child in pairs:
            positional = (parameter.POSITIONAL_ONLY, *([parameter.POSITIONAL_OR_KEYWORD] if has_star else []))
            by_position = parameter.kind in positional
            stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
            prefix = stars.get(parameter.kind, "" if by_position else f"{parameter.name}=")
            if child.kind != "const" or child.value is not MISSING:
                parts.append(prefix + build_source(child, leaf_names, namespace))
        return ", ".join(parts)

    def leaf_paths(self, values: Structure) -> dict[int, str]:
        """Names each leaf index as a user would: ``positions`` or ``features[2]['x']``."""
        paths: dict[int, str] = {}
        for path, node in self.leaf_nodes(values):
            if node.kind in ("tensor", "int"):
                paths.setdefault(node.index, path)
        return paths

    def leaf_nodes(self, values: Structure) -> Iterator[tuple[str, Structure]]:
        """Lists the nodes of leaves and constants under such names."""
        for name, child in self._named_children(values):
            yield from _ends(child, name)

    def _named_children(self, values: Structure) -> Iterator[tuple[str, Structure]]:
        for parameter, child in zip(self.parameters, values.children, strict=True):
            is_keywords = parameter.kind == parameter.VAR_KEYWORD
            yield from (
                zip(child.keys, child.children, strict=True) if is_keywords else [(parameter.name, child)]
            )


class FormBinder(CallBinder):
    """Keeps a call's form: which arguments were positional or left out, and the order of the keywords. Any
    call fits: a hook may add arguments that forward needs, and remove others."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(_any_call)
        try:
            self._named = tuple(inspect.signature(forward).parameters)
        except (TypeError, ValueError):  # a callable without a signature
            self._named = ()

    def _named_children(self, values: Structure) -> Iterator[tuple[str, Structure]]:
        positional, keywords = values.children
        names = [*self._named, *(f"args[{at}]" for at in range(len(self._named), len(positional.children)))]
        yield from zip(names, positional.children, strict=False)
        yield from zip(keywords.keys, keywords.children, strict=True)


def bound_call(binder: CallBinder, args: Any, kwargs: Any) -> tuple | None:
    try:
        return binder.bind(*args, **kwargs)
    except TypeError:
        return None


def _any_call(*args: Any, **kwargs: Any) -> None:
    """Has the signature that any call fits."""


def _ends(node: Structure, path: str) -> Iterator[tuple[str, Structure]]:
    if not node.children:
        yield path, node
    keys: Sequence[Any] = node.keys or range(len(node.children))
    for key, child in zip(keys, node.children, strict=True):
        named = node.kind in ("dataclass", "namedtuple")
        yield from _ends(child, f"{path}.{key}" if named else f"{path}[{key!r}]")


class LeafRule:
    """Describes what a leaf must be: a tensor of this dtype, device and these static dims, or an int.

    Attributes:
        static: dim → size that the trace holds as a constant.
        exact: the int's value, if it is a constant of the trace.
        plain: whether a Parameter, or a tensor that requires grad, is another kind of input.
    """

    __slots__ = ("contiguous", "device", "dtype", "exact", "kind", "plain", "rank", "static")

    def __init__(self, value: Any, *, static: dict[int, int], exact: int | None, plain: bool = False) -> None:
        self.plain = plain
        self.kind = "tensor" if isinstance(value, torch.Tensor) else "int"
        self.static, self.exact = dict(static), exact
        if self.kind == "tensor":
            self.dtype, self.device, self.rank = value.dtype, value.device, value.dim()
            self.contiguous = value.is_contiguous()

    def mismatches(self, name: str, namespace: Namespace) -> list[str]:
        if self.kind == "int":
            wrong_value = f" or {name} != {self.exact}" if self.exact is not None else ""
            return [f"type({name}) is not int{wrong_value}"]
        types = namespace.name((torch.Tensor,) if self.plain else (torch.Tensor, torch.nn.Parameter))
        flags = f" or {name}.requires_grad" if self.plain else ""
        dims = "".join(f" or {name}.shape[{dim}] != {size}" for dim, size in self.static.items())
        return [
            f"type({name}) not in {types} or {name}.dtype is not {namespace.name(self.dtype)}"
            f" or {name}.device != {namespace.name(self.device)} or {name}.dim() != {self.rank}{dims}"
            f" or {name}.is_contiguous() is not {self.contiguous}{flags}"
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenMemory:
    """Describes which inputs lie in memory that a call writes.

    Attributes:
        groups: tensor leaves by the memory that they share and the call writes.
        others: tensor leaves outside of these memories.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    others: tuple[int, ...] = ()


def write_matcher(
    values: Structure,
    rules: Mapping[int, LeafRule],
    *,
    anchor: tuple[int, int],
    token_dims: Sequence[tuple[int, int, Callable[[int], int]]] = (),
    written: WrittenMemory = WrittenMemory(),
    apart_from: frozenset[int] = frozenset(),
    apart_from_now: Sequence[tuple[Sequence[int], Callable[[], frozenset[int]]]] = (),
    same: Sequence[Sequence[int]] = (),
) -> Callable[[tuple], tuple[int, list[Any]] | None]:
    """Generates `match(bound)`: (token count, leaves), or None for a call of another signature.

    A call whose inputs disagree about the token count gives (-1, leaves).

    Args:
        values: the structure of the bound values, a tuple node.
        anchor: (leaf, dim) that gives the token count.
        token_dims: (leaf, dim, size as a function of the token count) of the other dims that carry tokens.
        apart_from: addresses of memory that graphs write, in which no leaf may lie.
        apart_from_now: tensor leaves, and a function that gives their forbidden memories at this call.
        same: groups of tensor leaves: those of one group are one object, those of two are not.
    """
    namespace = Namespace()
    writer = MatchWriter(namespace, lambda node, name: rules[node.index].mismatches(name, namespace))
    for position, child in enumerate(values.children):
        name = f"b{position}"
        writer.lines.append(f"{name} = bound[{position}]")
        writer.write(child, name)
    _write_memory_checks(writer, written, apart_from_now)
    if apart_from:
        name = namespace.name(apart_from, "addresses")
        for leaf, value in sorted(writer.leaf_names.items()):
            if rules[leaf].kind == "tensor":
                writer.reject(f"0 != {value}.untyped_storage().data_ptr() in {name}")
    for first, *rest in same:
        for leaf in rest:
            writer.reject(f"{writer.leaf_names[leaf]} is not {writer.leaf_names[first]}")
    firsts = [writer.leaf_names[group[0]] for group in same]
    if len(firsts) > 8:
        writer.reject(f"len({{{', '.join(f'id({name})' for name in firsts)}}}) != {len(firsts)}")
    elif len(firsts) > 1:  # quicker, while pairs are few
        writer.reject(" or ".join(f"{one} is {other}" for one, other in itertools.combinations(firsts, 2)))
    leaves = ", ".join(writer.leaf_names[index] for index in sorted(writer.leaf_names))
    writer.lines.append(f"rows = {writer.leaf_names[anchor[0]]}.shape[{anchor[1]}]")
    for leaf, dim, size in token_dims:
        expected = "rows" if size is same_count else f"{namespace.name(size, 'size')}(rows)"
        writer.lines.append(f"if {writer.leaf_names[leaf]}.shape[{dim}] != {expected}: return -1, [{leaves}]")
    body = "".join(f"    {line}\n" for line in writer.lines)
    exec(f"def match(bound):\n{body}    return rows, [{leaves}]\n", namespace.globals)
    return namespace.globals["match"]


def _write_memory_checks(
    writer: MatchWriter,
    written: WrittenMemory,
    apart_from_now: Sequence[tuple[Sequence[int], Callable[[], frozenset[int]]]],
) -> None:
    """Checks that groups and others have separate memories, and that no leaf is in forbidden memory."""
    places: dict[int, str] = {}

    def place(leaf: int) -> str:
        if leaf not in places:
            # Tensors without elements are all at address 0 but share no memory.
            name, places[leaf] = writer.leaf_names[leaf], f"place{leaf}"
            writer.lines.append(f"{places[leaf]} = {name}.untyped_storage().data_ptr() or {-1 - leaf}")
        return places[leaf]

    firsts = []
    for group in written.groups:
        first, *rest = [place(leaf) for leaf in group]
        firsts.append(first)
        for other in rest:
            writer.reject(f"{first} != {other}")
    if len(firsts) > 1:
        writer.reject(f"len({{{', '.join(firsts)}}}) != {len(firsts)}")
    if firsts and written.others:
        others = ", ".join(map(place, written.others))
        writer.reject(f"not {{{', '.join(firsts)}}}.isdisjoint(({others},))")
    for leaves, memory in apart_from_now:
        taken = ", ".join(map(place, leaves))
        writer.reject(f"not {writer.names.name(memory, 'memory')}().isdisjoint(({taken},))")


def same_count(rows: int) -> int:
    return rows


def is_plain_leaf(value: Any) -> bool:
    """Whether a graph can read this value: a strided tensor of no subclass, or anything but a tensor."""
    if not isinstance(value, torch.Tensor):
        return True
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and value.layout is torch.strided and not value.is_quantized


def describe_call(args: Any, kwargs: Any) -> str:
    """Describes the kind of a call in one line: dtypes, shapes, plain values, and identical tensors."""
    numbers: dict[int, int] = {}

    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            kind = "" if type(value) in (torch.Tensor, torch.nn.Parameter) else f"{type(value).__name__} "
            again = f" (tensor {numbers[id(value)]} again)" if id(value) in numbers else ""
            numbers.setdefault(id(value), len(numbers) + 1)
            return f"{kind}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{again}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(describe, value[:4]))}{', ...' if len(value) > 4 else ''}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in list(value.items())[:4]) + "}"
        text = repr(value)
        # An address would make each object another kind of call.
        return text if len(text) <= 40 and " at 0x" not in text else type(value).__name__

    named = (f"{key}={describe(value)}" for key, value in kwargs.items())
    return f"({', '.join([*map(describe, args), *named])})"


# Wrappers from these packages treat both forms alike; the tests call attached models in both.
_FORM_BLIND = frozenset({"torch", "transformers", "boundary_ops"}) | sys.stdlib_module_names
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Binders:
    """Binds the calls of `forward`, with one binder per answer of `sees_form`."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model, self._forward = model, forward
        own = model.forward if forward is model else forward
        self._by_form = {False: CallBinder(own), True: FormBinder(own)}

    def for_now(self) -> CallBinder:
        """Returns the binder for the model's present hooks; the same object each time."""
        return self._by_form[sees_form(self._model, self._forward)]


def sees_form(model: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a call passes code that may read its form: which arguments are positional, and which are
    passed. forward cannot tell `model(ids)` from `model(ids=ids)`, but a hook, a wrapper of forward or the
    model's own `__call__` can; each form is then a kind of call of its own, traced in this form."""
    if forward is not model:
        return is_wrapped(forward)
    ways = type(model).__call__, type(model)._call_impl
    hooks = [getattr(model, name) for name in _HOOKS]
    hooks += [getattr(module_hooks, f"_global{name}") for name in _HOOKS]
    return any(hooks) or not all(map(_is_form_blind, ways)) or is_wrapped(model.forward)


def is_wrapped(forward: Callable[..., Any]) -> bool:
    """Whether forward is more than a function with the parameters of its signature."""
    function: Any = getattr(forward, "__func__", forward)
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        if not _is_form_blind(function):
            return True
        function = function.__wrapped__
    return not isinstance(function, FunctionType) or hasattr(function, "__signature__")


def refuse_backward_hooks(model: nn.Module, *, skip_root: bool) -> None:
    """Raises `BackwardHook`, which names the module, for hooks that Dynamo does not trace."""
    for path, module in model.named_modules():
        if skip_root and not path:  # they run around the forward that is traced
            continue
        if module._backward_pre_hooks or (module._backward_hooks and module._is_full_backward_hook):
            owner = f"'{path}'" if path else "the model"
            raise BackwardHook(owner=f"{owner} ({type(module).__name__})")
    is_full = module_hooks._global_is_full_backward_hook
    if module_hooks._global_backward_pre_hooks or (module_hooks._global_backward_hooks and is_full):
        like = "torch.nn.modules.module.register_module_full_backward_hook and its like"
        raise BackwardHook(owner=f"every module ({like})")


def _is_form_blind(function: Any) -> bool:
    where = getattr(function, "__globals__", {}).get("__name__")
    return str(where).partition(".")[0] in _FORM_BLIND
