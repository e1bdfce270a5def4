"""Checks what an op's schema, token arguments and implementations must be for it to be a boundary op."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from boundary_ops._torch import OpOverload, op_names, parse_schema
from boundary_ops.errors import declare as errors
from boundary_ops.whole_numbers import whole_number

DEVICES = ("cpu", "cuda", "xpu", "mps")
Implementation = Callable[..., object]


class OpSchema:
    """Reads an op's schema, and checks what is declared about its arguments.

    `arguments` maps names to types as text; `tensors` names the arguments that are tensors.
    """

    def __init__(self, parsed: Any) -> None:
        self.parsed = parsed
        self.name = qualified(parsed.name, parsed.overload_name)
        self.arguments = {argument.name: str(argument.type) for argument in parsed.arguments}
        kinds = ("Tensor", "Optional[Tensor]")
        self.tensors = [name for name, kind in self.arguments.items() if kind in kinds]

    @classmethod
    def parse(cls, text: str) -> OpSchema:
        """Reads the text of a schema, whose name must have a namespace."""
        try:
            parsed = parse_schema(text)
        except (RuntimeError, TypeError) as error:
            # The first line says where the text stops making sense; the rest draws it.
            reason = f"cannot be parsed: {str(error).partition(chr(10))[0].strip()}"
            raise errors.UnreadableSchema(schema=text, reason=reason) from error
        if "::" not in parsed.name:
            raise errors.UnreadableSchema(schema=text, reason="names no namespace")
        return cls(parsed)

    @property
    def overload(self) -> OpOverload:
        return overload_of(self.parsed.name, self.parsed.overload_name)

    def find_written(self) -> tuple[str, ...]:
        """Returns the names of the written arguments, once it is clear that the op can be a boundary."""
        parsed = self.parsed
        if parsed.returns:
            returns = ", ".join(str(value.type) for value in parsed.returns)
            raise errors.ReturnsResult(op=self.name, returns=returns)
        marked = ((each.name, each.alias_info) for each in parsed.arguments)
        written = tuple(name for name, info in marked if info and info.is_write)
        if not written:
            raise errors.WritesNothing(op=self.name, schema=parsed)
        return written

    def check_argument(self, option: str, argument: Any, choices: Collection[str], kind: str) -> None:
        """Raises unless the argument that an option names is one of the choices."""
        if argument not in choices:
            raise errors.UnknownArgument(
                op=self.name, option=f"{option} {argument!r}", kind=kind, choices=list(choices),
                got=self.arguments.get(str(argument), "no such argument"), fix=near(str(argument), choices),
            )  # fmt: skip

    def check_dim(self, option: str, dim: Any, *words: str) -> Any:
        """Returns the dim as an int, or the word that stands for dims; raises for anything else."""
        number = whole_number(dim)
        if number is not None and number >= 0:
            return number
        if not isinstance(dim, str) or dim not in words:
            said = "".join(f" or {word!r}" for word in words)
            raise errors.WrongTokenDim(op=self.name, option=option, words=said, got=repr(dim))
        return dim

    def check_token_args(self, token_args: Mapping[str, int] | None) -> Mapping[str, int] | None:
        """Returns a frozen copy of `token_args`, once each names a dim of a tensor argument."""
        if token_args is None:
            return None
        if not isinstance(token_args, Mapping) or not token_args:
            raise errors.WrongTokenArgs(op=self.name, got=repr(token_args))
        return self.check_places(token_args)

    def check_places(self, token_args: Mapping[str, Any], *words: str) -> Mapping[str, Any]:
        """Returns a frozen copy of a mapping from tensor arguments to dims or words."""
        for argument in token_args:
            self.check_argument("token_args", argument, self.tensors, "tensor arguments")
        option = "token_args {!r}".format
        return MappingProxyType({k: self.check_dim(option(k), v, *words) for k, v in token_args.items()})

    def check_any_strides(self, written: tuple[str, ...], any_strides: Collection[str]) -> tuple[str, ...]:
        """Returns the names in `any_strides`, once each is a tensor argument that the op only reads."""
        read, kind = [name for name in self.tensors if name not in written], "tensor arguments only read"
        if isinstance(any_strides, str):  # it would be taken letter by letter
            option, got = f"any_strides {any_strides!r}", "a string instead of a list"
            raise errors.UnknownArgument(op=self.name, option=option, kind=kind, choices=read, got=got)
        for name in any_strides:
            self.check_argument("any_strides", name, read, kind)
        return tuple(any_strides)


def check_implementations(op: str, impl: Any) -> Mapping[str, Implementation] | Implementation:
    """Returns `impl` as it is, or a frozen copy of it where it is a dict of devices."""
    if callable(impl):
        return impl
    got = repr(impl)
    if isinstance(impl, Mapping) and impl:
        wrong = [device for device in impl if device not in DEVICES or not callable(impl[device])]
        if not wrong:
            return MappingProxyType(dict(impl))
        got = f"{wrong[0]!r}: {impl[wrong[0]]!r}"
    raise errors.WrongImplementation(op=op, devices=", ".join(DEVICES), got=got)


def qualified(name: str, overload_name: str) -> str:
    """Returns an op's name as the registry spells it: the default overload has none."""
    return f"{name}.{overload_name}" if overload_name and overload_name != "default" else name


def near(name: str, choices: Collection[str]) -> str | None:
    """Returns a question that names the choices most like `name`, or None."""
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(repr(match) for match in close)}?" if close else None


def overload_of(name: str, overload_name: str) -> Any:
    """Returns an overload that exists; an empty name is the default one's."""
    namespace, local = name.split("::", 1)
    return getattr(getattr(getattr(torch.ops, namespace), local), overload_name or "default")


def find_overload(name: str) -> OpOverload:
    """Returns the op of that name: without an overload the default one, or the only one there is."""
    existing = op_names()
    wanted = name.removesuffix(".default")
    plain, _, overload_name = wanted.partition(".")
    if "::" in wanted and wanted in existing:
        return overload_of(plain, overload_name)
    others = [] if overload_name else sorted(each for each in existing if each.startswith(f"{plain}."))
    if len(others) == 1:
        return overload_of(plain, others[0].partition(".")[2])
    if others:
        raise errors.AmbiguousOverload(op=name, overloads=others)
    raise errors.UnknownOp(op=name, fix=near(wanted, sorted(existing)))
