"""What an op's schema, token arguments and implementations must be for it to be a boundary op."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

from boundary_ops.declare.captured_form import CapturedForm
from boundary_ops.declare.whole_numbers import whole_number
from boundary_ops.errors import BoundaryOpError

DEVICES = ("cpu", "cuda", "xpu", "mps")
Implementation = Callable[..., object]
_TENSORS = ("Tensor", "Optional[Tensor]")


def parse(schema: str) -> Any:
    """The schema as torch reads it; its name has a namespace."""
    form = 'write it as "ns::op(Tensor q, Tensor(a!) out) -> ()"'
    try:
        parsed = torch._C.parse_schema(schema)
    except (RuntimeError, TypeError) as error:
        # The first line says where the text stops making sense; the rest draws it.
        reason = " ".join(line.strip() for line in str(error).splitlines()[:1])
        raise BoundaryOpError(
            f"schema {schema!r} cannot be parsed: {reason}",
            rule="an op is declared by its torch schema",
            fix=form,
        ) from error
    if "::" not in parsed.name:
        raise BoundaryOpError(
            f"schema {schema!r} names no namespace",
            expected="ns::op",
            got=parsed.name,
            rule="an op is found by its qualified name",
            fix=form,
        )
    return parsed


def find_mutated(name: str, schema: Any) -> tuple[str, ...]:
    """The names of the written arguments, once it is clear that the op can be a boundary."""
    mutated = tuple(
        argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
    )
    if schema.returns:
        raise BoundaryOpError(
            f"op '{name}'",
            expected="a schema that returns nothing, '-> ()'",
            got=f"'-> {', '.join(str(value.type) for value in schema.returns)}'",
            rule="a boundary op writes its result into memory of its caller, whose address stays the same",
            fix="allocate the result in the model (torch.empty), pass it as 'Tensor(a!) out', write into it; "
            "for an existing op, define a small op that calls it and copies its result",
        )
    if not mutated:
        raise BoundaryOpError(
            f"op '{name}'",
            expected="at least one argument marked as written, such as 'Tensor(a!) out'",
            got=str(schema),
            rule="an op that returns nothing and writes nothing is dead code in a graph",
            fix="mark each tensor that the op writes with its own alias letter: (a!), (b!), ...",
        )
    return mutated


def check_token_args(
    name: str, schema: Any, token_args: Mapping[str, int] | None
) -> Mapping[str, int] | None:
    """A frozen copy of `token_args`, once each names a dim of a tensor argument."""
    if token_args is None:
        return None
    if not isinstance(token_args, Mapping) or not token_args:
        raise BoundaryOpError(
            f"op '{name}', token_args",
            expected="a non-empty dict of argument name -> dim, or None",
            got=repr(token_args),
            rule="token_args say where the token count is",
            fix='pass for example {"q": 0, "out": 0}, or leave token_args out',
        )
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    tensors = [argument for argument in types if types[argument] in _TENSORS]
    for argument, dim in token_args.items():
        if argument not in tensors:
            raise BoundaryOpError(
                f"op '{name}', token_args {argument!r}",
                expected=f"one of the tensor arguments {tensors}",
                got=types.get(argument, "no such argument"),
                rule="only a tensor argument can carry the token dim",
                fix=near(str(argument), tensors) or "use the argument names of the schema",
            )
        number = whole_number(dim)
        if number is None or number < 0:
            raise BoundaryOpError(
                f"op '{name}', token_args {argument!r}",
                expected="a dim counted from the front, 0 or more",
                got=repr(dim),
                rule="a token dim is one dim of one tensor",
                fix="count the dim from the front, for example 0 for [num_tokens, heads, head_dim]",
            )
    return MappingProxyType({argument: int(dim) for argument, dim in token_args.items()})


def check_implementations(name: str, impl: Any) -> Mapping[str, Implementation] | Implementation:
    """`impl` as it is, or a frozen copy of it where it is a dict of devices."""
    if callable(impl):
        return impl
    if isinstance(impl, Mapping) and impl:
        wrong = [
            device for device, function in impl.items() if device not in DEVICES or not callable(function)
        ]
        if not wrong:
            return MappingProxyType(dict(impl))
        got = f"{wrong[0]!r}: {impl[wrong[0]]!r}"
    else:
        got = repr(impl)
    raise BoundaryOpError(
        f"op '{name}', impl",
        expected=f"a callable, or a dict from device ({', '.join(DEVICES)}) to callable",
        got=got,
        rule="each device that the op runs on has an implementation",
        fix='pass one callable for all devices, or for example {"cpu": f, "cuda": g}',
    )


def check_captured_form(
    name: str, mutated: tuple[str, ...], capture_safe: bool, form: CapturedForm | None
) -> None:
    """Raises unless the form, where there is one, can stand for the op in a graph."""
    if form is None:
        return
    if not capture_safe or not form.op.capture_safe or form.op.mutated != mutated:
        writes = ", ".join(mutated)
        raise BoundaryOpError(
            f"op '{name}', captured_form",
            expected=f"capture_safe=True for both ops, and a form that writes {writes}",
            got=f"capture_safe={capture_safe}, and '{form.op.name}' with capture_safe={form.op.capture_safe} "
            f"that writes {', '.join(form.op.mutated)}",
            rule="the form does in a graph what the op does outside of it",
            fix="declare both capture_safe=True, and give what they write the same names",
        )


def check_any_strides(
    name: str, schema: Any, mutated: tuple[str, ...], any_strides: Collection[str]
) -> tuple[str, ...]:
    """The names in `any_strides`, once each is a tensor argument that the op only reads."""
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    read = [argument for argument in types if types[argument] in _TENSORS and argument not in mutated]
    names = (any_strides,) if isinstance(any_strides, str) else tuple(any_strides)
    for argument in names:
        if isinstance(any_strides, str) or argument not in read:
            raise BoundaryOpError(
                f"op '{name}', any_strides {argument!r}",
                expected=f"a list of tensor arguments that are read alone, of {read}",
                got="a string" if isinstance(any_strides, str) else types.get(argument, "no such argument"),
                rule="what an op writes keeps the strides that the model gave it",
                fix=near(str(argument), read) or "use the argument names of the schema",
            )
    return names


def qualified(name: str, overload_name: str) -> str:
    """An op's name as the registry spells it: the default overload has none."""
    return f"{name}.{overload_name}" if overload_name and overload_name != "default" else name


def near(name: str, choices: list[str]) -> str | None:
    """A question that names the choices most like `name`, or None."""
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(repr(match) for match in close)}?" if close else None


def existing_names() -> set[str]:
    """All ops that torch's dispatcher knows, with their overloads."""
    return set(torch._C._dispatch_get_all_op_names())


def overload_of(name: str, overload_name: str) -> OpOverload:
    """An overload that exists; an empty name is the default one's."""
    namespace, local = name.split("::", 1)
    packet = getattr(getattr(torch.ops, namespace), local)
    overload: OpOverload = getattr(packet, overload_name or "default")
    return overload


def find_overload(name: str) -> OpOverload:
    """The op of that name: without an overload the default one, or the only one there is."""
    existing = existing_names()
    wanted = name.removesuffix(".default")
    plain, _, overload_name = wanted.partition(".")
    if "::" in wanted and wanted in existing:
        return overload_of(plain, overload_name)
    overloads = (
        sorted(other for other in existing if other.startswith(f"{plain}.")) if not overload_name else []
    )
    if len(overloads) == 1:
        return overload_of(plain, overloads[0].partition(".")[2])
    if overloads:
        raise BoundaryOpError(
            f"op '{name}' has several overloads and no default one",
            expected=f"one of {overloads}",
            got=name,
            rule="an op is one overload, because overloads differ in what they take and write",
            fix=f'name the overload: "{overloads[0]}"',
        )
    raise BoundaryOpError(
        f"op '{name}' does not exist in torch's dispatcher",
        expected='the name of a loaded op, "ns::op" or "ns::op.overload"',
        got=repr(name),
        rule="an op is declared once it exists; `boundary_ops.define` makes new ones",
        fix=near(wanted, sorted(existing)) or "import the library that defines the op first",
    )
