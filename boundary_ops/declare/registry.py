"""Declares the ops that a model is cut at: in-place ops, with `define` (new) or `register` (existing).

A boundary op returns nothing and writes into tensors that its caller allocated. That is what makes a cut
possible: the memory on both sides of the op belongs to the graphs, so its address never changes, and the op
itself is free to do anything (read metadata from Python, launch kernels of changing shapes, call a library).

Ops are made with `torch.library.Library.define` and `impl`: calling one costs 3 µs, where `custom_op` costs
31 µs. Each op that `define` made has one kernel for its whole life, which looks its implementation up at
each call. So a module that is reloaded replaces the implementation, and graphs that hold the op see the new
one. `BoundaryOp.bind` goes past the dispatcher for calls that repeat.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from boundary_ops._torch import OpOverload, OpOverloadPacket, op_names
from boundary_ops.declare import schema as schemas
from boundary_ops.declare.boundary_op import Binder, BoundaryOp, CapturedForm, Definition
from boundary_ops.declare.schema import Implementation, OpSchema, near, qualified
from boundary_ops.errors.declare import NotDeclared, OpExists, SchemaChanged, WrongCapturedForm

_registered: dict[str, BoundaryOp] = {}
# Never shrinks: destroying a Library under a live OpOverload leaves a dangling handle.
_definitions: dict[str, Definition] = {}


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
        BoundaryOpError: the schema is none of a boundary op, something does not fit it, or the name is taken.
    """
    parsed = OpSchema.parse(schema)
    declared = _checked(parsed, token_args, any_strides, captured_form, capture_safe)
    name = parsed.name
    implementations = schemas.check_implementations(name, impl)
    definition = _definitions.get(name)
    if definition is None:
        if name in op_names():
            raise OpExists(op=name)
        definition = _definitions[name] = _define_in_torch(schema, parsed, implementations)
    elif definition.schema != str(parsed.parsed):
        raise SchemaChanged(op=name, expected=definition.schema, got=str(parsed.parsed))
    definition.implementations, definition.token_args = implementations, declared["token_args"]
    definition.bind = dict(bind or {})
    op = _declare(parsed.overload, warm_up=warm_up, repeatable=repeatable, **declared)
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
        BoundaryOpError: there is no such op, it is no boundary op, or something does not fit its schema.
    """
    overload = schemas.find_overload(name)
    schema = OpSchema(overload._schema)
    declared = _checked(schema, token_args, any_strides, captured_form, capture_safe)
    return _declare(overload, warm_up=warm_up, repeatable=repeatable, **declared)


def registered() -> tuple[BoundaryOp, ...]:
    """Returns all declared ops, in the order in which they were first declared."""
    return tuple(_registered.values())


def lookup(target: object) -> BoundaryOp | None:
    """Returns the declared op that an FX node's target or a name stands for, or None.

    `target` is an `OpOverload`, an `OpOverloadPacket` (its default overload, else the first one declared), a
    `BoundaryOp`, or a name: "ns::op", "ns::op.overload".
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
    """Returns the declared ops by name, as a table that changes with them; not to be written."""
    return _registered


def unregister(name: str) -> None:
    """Takes a declaration back; the op stays callable and can be defined again with the same schema.

    Raises BoundaryOpError where no op of that name is declared.
    """
    op = lookup(name)
    if op is None:
        raise NotDeclared(op=name, declared=sorted(_registered), fix=near(name, list(_registered)))
    del _registered[op.name]


def _checked(
    schema: OpSchema, token_args: Any, any_strides: Any, form: CapturedForm | None, capture_safe: bool
) -> dict[str, Any]:
    """Returns the fields of a `BoundaryOp` that depend on its schema, once they fit it and each other."""
    written = schema.find_written()
    tokens = schema.check_token_args(token_args)
    if form is not None and not (capture_safe and form.op.capture_safe and form.op.mutated == written):
        theirs = f"'{form.op.name}' with capture_safe={form.op.capture_safe}"
        got = f"capture_safe={capture_safe}, and {theirs} that writes {', '.join(form.op.mutated)}"
        raise WrongCapturedForm(op=schema.name, writes=", ".join(written), got=got)
    strided = schema.check_any_strides(written, any_strides)
    return {
        "name": schema.name, "mutated": written, "token_args": tokens, "any_strides": strided,
        "captured_form": form, "capture_safe": capture_safe,
    }  # fmt: skip


def _declare(overload: OpOverload, *, name: str, **fields: Any) -> BoundaryOp:
    op = BoundaryOp(name=name, overload=overload, definition=_definitions.get(name), **fields)
    _registered[name] = op
    return op


def _define_in_torch(schema: str, parsed: OpSchema, implementations: Any) -> Definition:
    namespace, local = parsed.parsed.name.split("::", 1)
    library = torch.library.Library(namespace, "FRAGMENT")
    text, names = str(parsed.parsed), tuple(parsed.arguments)
    definition = Definition(parsed.name, text, names, library, implementations, None, {})
    # A trace would fix an `int` though it changes; a `SymInt` takes the same calls.
    head, bracket, arguments = schema.strip().removeprefix(f"{namespace}::").partition("(")
    library.define(head + bracket + re.sub(r"\bint(?=[?\[ ])", "SymInt", arguments))
    library.impl(qualified(local, parsed.parsed.overload_name), definition.run, "CompositeExplicitAutograd")
    # Registered apart from the kernel, which would otherwise run on fakes and meta tensors too.
    torch.library.register_fake(parsed.name, definition.fake, lib=library)
    return definition
