"""Which ops the model is cut at: in-place ops, declared here with `define` (new) or `register` (existing).

A boundary op returns nothing and writes into tensors that its caller allocated. That is what makes a cut
possible: the memory on both sides of the op belongs to the graphs, so its address never changes, and the op
itself is free to do anything (read metadata from Python, launch kernels of changing shapes, call a library).

Ops are made with `torch.library.Library.define` and `impl`: calling one costs 3 µs, where `custom_op` costs
31 µs. Each op that `define` made has one kernel for its whole life, which looks its implementation up at
each call. So a module that is reloaded replaces the implementation, and graphs that hold the op see the new
one. `BoundaryOp.bind` goes past the dispatcher for calls that repeat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch._ops import OpOverload, OpOverloadPacket

from boundary_ops.declare.captured_form import CapturedForm
from boundary_ops.declare.schema import (
    Implementation,
    check_any_strides,
    check_captured_form,
    check_implementations,
    check_token_args,
    existing_names,
    find_mutated,
    find_overload,
    near,
    overload_of,
    parse,
    qualified,
)
from boundary_ops.errors import BoundaryOpError

__all__ = ["BoundaryOp", "define", "lookup", "register", "registered", "unregister"]


# Arguments of a call → what serves calls that look like it, or None where that is the implementation itself.
Binder = Callable[..., Callable[..., object] | None]


class BoundOp:
    """One op made ready for calls that repeat with arguments of one look: shapes, strides, dtypes, devices
    and all that is no tensor.

    A call through the dispatcher boxes every argument, enters Python again, finds the device and looks the
    call up among those seen before: more host time than the launch itself takes.

    Attributes:
        function: called with the arguments that `BoundaryOp.bind` was given, in the same places; tensors may
            be others of the same look. To be read anew for each call: defining the op again replaces it.
            Grad mode must be off.
    """

    __slots__ = ("__weakref__", "function")

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryOp:
    """One declared op. Calling it calls the op; Dynamo sees one node, as with `torch.ops.ns.op(...)`.

    Attributes:
        name: "ns::op", or "ns::op.overload" for an overload that is not the default one.
        overload: the torch op.
        token_args: argument name -> the dim of it that counts tokens; None where the trace has to find that.
        capture_safe: the op may be captured into a graph: it takes padded rows, finds the step's token count
            and lengths on the device, writes nothing for a padded row, and its launch depends on shapes
            alone. Its metadata are tensors among its arguments, for which zeros are a step of no tokens, or
            it has a `captured_form`. Its `token_args` name all arguments that carry tokens.
        warm_up: called with `num_tokens` before capture, and where it takes more, with the arguments of such
            a call, to look at; works on scratch memory. None where nothing compiles on first use.
        captured_form: what is captured in its place, where its metadata is Python state; None where the op
            itself can be captured, or nothing can.
        mutated: names of the arguments that the schema marks as written, in schema order.
        repeatable: what the op leaves behind belongs to the running step: nobody else reads it before the
            step is over, and the step, repeated from its first op, writes it anew. So a call may run ahead of
            the check that its graphs are still right, and run eagerly after all.
        any_strides: names of arguments, read alone, whose rows may lie apart or in another order than in
            eager's tensor: it takes any strides of them, of which the last one is 1. So a compiler's result
            or a part of a packed projection is not copied for it.
    """

    name: str
    overload: OpOverload
    token_args: Mapping[str, int] | None
    capture_safe: bool
    warm_up: Callable[..., object] | None
    mutated: tuple[str, ...]
    captured_form: CapturedForm | None = None
    repeatable: bool = False
    any_strides: tuple[str, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.overload(*args, **kwargs)

    def bind(self, *args: Any) -> BoundOp:
        """The op made ready for calls that repeat with arguments that look like these.

        Args:
            args: the schema's arguments, all positional, of a call that the op has just served.
        """
        definition = _definitions.get(self.name)
        if definition is None:
            return BoundOp(self.overload)
        bound = BoundOp(_bound_function(self.name, definition, args))
        definition.bound.add(bound)
        return bound


@dataclass(slots=True, eq=False)
class _Definition:
    """What keeps an op of ours alive, and what its one kernel and its fake read at each call."""

    schema: str
    library: torch.library.Library
    implementations: Mapping[str, Implementation] | Implementation
    token_args: Mapping[str, int] | None
    bind: Mapping[str, Binder]
    bound: WeakSet[BoundOp] = field(default_factory=WeakSet)


_registered: dict[str, BoundaryOp] = {}
# Never shrinks: destroying a Library under a live OpOverload leaves a dangling handle.
_definitions: dict[str, _Definition] = {}


def define(
    schema: str,
    impl: Implementation | Mapping[str, Implementation],
    *,
    token_args: Mapping[str, int] | None = None,
    capture_safe: bool = False,
    warm_up: Callable[..., object] | None = None,
    bind: Mapping[str, Binder] | None = None,
    captured_form: CapturedForm | None = None,
    repeatable: bool = False,
    any_strides: Collection[str] = (),
) -> BoundaryOp:
    """Makes a new in-place op and declares it as a boundary op.

    The op is not differentiable: its implementation runs without grad mode, and no gradient flows through it.
    Defining a name again with the same schema (a module reload, a notebook cell) replaces the implementation
    and the declaration, also for calls between graphs that were captured before. Graphs that hold the op
    itself are not replayed any longer.

    Args:
        schema: "ns::op(Tensor q, Tensor(a!) out, ...) -> ()". At least one argument is marked as written,
            nothing is returned.
        impl: one callable for all devices, or one per device: {"cpu": f, "cuda": g}. Called with the
            schema's arguments, trailing ones left out where they equal the schema's default.
        token_args: which dim of which tensor argument counts tokens. Those dims are then known to be equal
            in a trace, which ties the arguments' symbols together.
        capture_safe, warm_up, captured_form, repeatable, any_strides: see `BoundaryOp`.
        bind: per device, how to serve calls that repeat with less host time than `impl` takes: called with
            the arguments of one such call, returns a function that is called in `impl`'s place with arguments
            of the same shapes, strides, dtypes, devices and the same values that are no tensors; or None.

    Returns:
        The declared op; keep it or not, the registry keeps it.

    Raises:
        BoundaryOpError: the schema cannot be parsed, returns something or writes nothing, `impl`,
            `token_args`, `captured_form` or `any_strides` do not fit it, or the name is taken by an op with
            another schema.
    """
    parsed = parse(schema)
    declared = _checked(
        parsed, token_args, any_strides,
        capture_safe=capture_safe, warm_up=warm_up, captured_form=captured_form, repeatable=repeatable,
    )  # fmt: skip
    name, tokens = declared["name"], declared["token_args"]
    implementations = check_implementations(name, impl)
    definition = _definitions.get(name)
    if definition is None:
        if name in existing_names():
            raise BoundaryOpError(
                f"op '{name}': it exists already and was not defined here",
                rule="`define` makes new ops",
                fix=f'declare the existing op with boundary_ops.register("{name}"), or choose another name',
            )
        definition = _define_in_torch(name, schema, parsed, implementations, tokens)
        _definitions[name] = definition
    elif definition.schema != str(parsed):
        raise BoundaryOpError(
            f"op '{name}' is already defined with another schema",
            expected=definition.schema,
            got=str(parsed),
            rule="an op keeps its schema for the life of the process, because graphs hold on to it",
            fix="choose another name, or restart Python",
        )
    else:
        definition.implementations, definition.token_args = implementations, tokens
    definition.bind = dict(bind or {})
    op = _registered[name] = BoundaryOp(overload=overload_of(parsed.name, parsed.overload_name), **declared)
    for bound in definition.bound:
        bound.function = op.overload
    definition.bound.clear()
    return op


def register(
    name: str,
    *,
    token_args: Mapping[str, int] | None = None,
    capture_safe: bool = False,
    warm_up: Callable[..., object] | None = None,
    captured_form: CapturedForm | None = None,
    repeatable: bool = False,
    any_strides: Collection[str] = (),
) -> BoundaryOp:
    """Declares an op that exists already as a boundary op. Registering a name again replaces the declaration.

    Args:
        name: "ns::op" or "ns::op.overload". Without an overload: the default one, or the only one there is.
        token_args: as for `define`, but read by the splitter only: the op keeps the fake kernel that its
            library gave it.
        capture_safe, warm_up, captured_form, repeatable, any_strides: see `BoundaryOp`.

    Raises:
        BoundaryOpError: there is no such op, it returns something or writes nothing, or `token_args`,
            `captured_form` or `any_strides` do not fit it.
    """
    overload = find_overload(name)
    declared = _checked(
        overload._schema, token_args, any_strides,
        capture_safe=capture_safe, warm_up=warm_up, captured_form=captured_form, repeatable=repeatable,
    )  # fmt: skip
    op = _registered[declared["name"]] = BoundaryOp(overload=overload, **declared)
    return op


def registered() -> tuple[BoundaryOp, ...]:
    """All declared ops, in the order in which they were first declared."""
    return tuple(_registered.values())


def lookup(target: object) -> BoundaryOp | None:
    """The declared op that an FX node's target or a name stands for, or None.

    Args:
        target: an `OpOverload`, an `OpOverloadPacket` (its default overload, else the first one declared), a
            `BoundaryOp`, or a name: "ns::op", "ns::op.overload". Anything else is no boundary op.
    """
    if isinstance(target, OpOverload):
        return _registered.get(qualified(target._schema.name, target._schema.overload_name))
    if isinstance(target, OpOverloadPacket):
        target = target._qualified_op_name
    if isinstance(target, str):
        name = target.removesuffix(".default")
        found = _registered.get(name)
        if found is None and "." not in name:
            return next((op for key, op in _registered.items() if key.startswith(f"{name}.")), None)
        return found
    return target if isinstance(target, BoundaryOp) and target in _registered.values() else None


def declarations() -> Mapping[str, BoundaryOp]:
    """The declared ops by name, as a table that changes with them; not to be written."""
    return _registered


def unregister(name: str) -> None:
    """Takes a declaration back. The op stays callable, and can be defined again with the same schema.

    Raises:
        BoundaryOpError: no op of that name is declared.
    """
    op = lookup(name)
    if op is None:
        raise BoundaryOpError(
            f"op '{name}' is not declared as a boundary op",
            expected=f"one of {sorted(_registered)}",
            rule="only a declared op can be taken back",
            fix=near(name, list(_registered)) or "boundary_ops.registered() lists the declared ops",
        )
    del _registered[op.name]


def _checked(
    schema: Any, token_args: Mapping[str, int] | None, any_strides: Collection[str], **said: Any
) -> dict[str, Any]:
    """The fields of a `BoundaryOp` but its overload, once they fit the schema and each other."""
    name = qualified(schema.name, schema.overload_name)
    mutated = find_mutated(name, schema)
    tokens = check_token_args(name, schema, token_args)
    check_captured_form(name, mutated, said["capture_safe"], said["captured_form"])
    strided = check_any_strides(name, schema, mutated, any_strides)
    return {"name": name, "mutated": mutated, "token_args": tokens, "any_strides": strided, **said}


def _define_in_torch(
    name: str,
    schema: str,
    parsed: Any,
    implementations: Mapping[str, Implementation] | Implementation,
    token_args: Mapping[str, int] | None,
) -> _Definition:
    namespace, local = parsed.name.split("::", 1)
    library = torch.library.Library(namespace, "FRAGMENT")
    definition = _Definition(str(parsed), library, implementations, token_args, {})
    names = tuple(argument.name for argument in parsed.arguments)
    library.define(_with_symbolic_ints(schema.strip()).removeprefix(f"{namespace}::"))
    library.impl(
        qualified(local, parsed.overload_name), _kernel(name, definition), "CompositeExplicitAutograd"
    )
    # Registered apart from the kernel, which would otherwise run on fakes and meta tensors too.
    torch.library.register_fake(name, _fake(name, names, definition), lib=library)
    return definition


def _with_symbolic_ints(schema: str) -> str:
    """A trace would fix an `int` that changes from call to call; a `SymInt` takes the same calls."""
    head, bracket, arguments = schema.partition("(")
    return head + bracket + re.sub(r"\bint(?=[?\[ ])", "SymInt", arguments)


def _kernel(name: str, definition: _Definition) -> Callable[..., None]:
    """The op's one kernel: chooses the implementation by the device of the first tensor."""

    def run(*args: Any, **kwargs: Any) -> None:
        implementation = _implementation_for(
            name, definition, _device_of((*args, *kwargs.values()) if kwargs else args)
        )
        if torch.is_grad_enabled():
            # Otherwise autograd would record the writes, and a cache would keep every call's graph alive.
            with torch.no_grad():
                implementation(*args, **kwargs)
        else:
            implementation(*args, **kwargs)

    return run


def _device_of(values: tuple[Any, ...]) -> str:
    # A plain loop: a generator costs three times as much, on each call of each layer.
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"


def _implementation_for(name: str, definition: _Definition, device: str) -> Implementation:
    implementations = definition.implementations
    if not isinstance(implementations, Mapping):
        return implementations
    found = implementations.get(device)
    if found is None:
        raise BoundaryOpError(
            f"op '{name}' has no implementation for device '{device}'",
            expected=f"tensors on one of {sorted(implementations)}",
            got=device,
            rule="an op runs only on the devices that it was defined for",
            fix=f'add "{device}" to the impl dict of boundary_ops.define, or move the model',
        )
    return found


def _bound_function(name: str, definition: _Definition, args: tuple[Any, ...]) -> Callable[..., object]:
    device = _device_of(args)
    binder = definition.bind.get(device)
    served = binder(*args) if binder is not None else None
    return served or _implementation_for(name, definition, device)


def _fake(name: str, names: tuple[str, ...], definition: _Definition) -> Callable[..., None]:
    """Writes nothing; states that all declared token dims are equal, so that their symbols become one."""

    def check_token_dims(*args: Any, **kwargs: Any) -> None:
        if definition.token_args is None:
            return
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        first: tuple[str, Any] | None = None
        for argument, dim in definition.token_args.items():
            tensor = values.get(argument)
            if tensor is None:
                continue
            if dim >= tensor.dim():
                raise BoundaryOpError(
                    f"op '{name}', argument '{argument}'",
                    expected=f"at least {dim + 1} dims, because token_args declare dim {dim}",
                    got=str(list(tensor.shape)),
                    rule="the declared token dim exists in every call",
                    fix="correct token_args, or the shape that the model passes",
                )
            size = tensor.shape[dim]
            if first is None:
                first = (argument, size)
            else:
                text = f"op '{name}': '{argument}' and '{first[0]}' carry different numbers of tokens"
                torch._check(size == first[1], lambda text=text: text)  # type: ignore[misc]

    return check_token_dims
