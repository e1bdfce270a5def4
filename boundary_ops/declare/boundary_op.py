"""Holds what is declared of a boundary op, and the form in which an op with Python metadata is captured.

A captured form takes the metadata as tensors. Who captures writes the form in the op's place, with the
tensors of one `StepMetadata` for all layers, and loads the running step into them before each replay. An op
whose metadata are tensors among its arguments needs no such form: `capture_safe=True` says it all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol
from weakref import WeakSet

import torch

from boundary_ops._torch import OpOverload, check
from boundary_ops.declare.schema import Implementation
from boundary_ops.errors.declare import MissingTokenDim, NoImplementation

# Arguments of a call → what serves calls of equal geometry, or None where that is the implementation itself.
Binder = Callable[..., Callable[..., object] | None]


class StepMismatch(Enum):
    """Says why the running step cannot be loaded; the op itself then serves the call or refuses it."""

    TOO_LARGE = "more sequences or tokens, or a longer sequence, than there is room for"
    OTHER_STEP = "no running step, or one of another token count or cache"


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """Bounds a captured step, inclusive; `max_seq_len` is context plus new tokens of one sequence."""

    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int


class StepMetadata(Protocol):
    """Holds a step's metadata at fixed addresses; at first those of a step of zero sequences."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Maps argument names of the captured form's op to its tensors, none of which ever moves."""

    def mismatch(self, num_tokens: int) -> StepMismatch | None:
        """Says why the running step cannot serve a call of so many tokens, or None. Changes nothing."""

    def load(self) -> None:
        """Copies the running step into the tensors, on the current stream, without waiting for it."""

    def clear(self) -> None:
        """Goes back to a step of zero sequences, for which the captured op writes nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedForm:
    """Describes what is captured in place of an op.

    Attributes:
        op: a boundary op with the arguments of the first, as far as it has them, and the names of
            `StepMetadata.tensors`. With metadata of zero sequences it writes nothing; else, in tensors of
            the model, only what belongs to the step, so that running the step again overwrites it.
        metadata: `metadata(limits, calls)` makes what the calls of one model share. A call is a mapping from
            argument name to value: the model's own tensors and constants, not what forward computes.
        refusal: why one such call cannot be captured, in words, or None. It stays eager then.
    """

    op: BoundaryOp
    metadata: Callable[[CaptureLimits, Sequence[Mapping[str, Any]]], StepMetadata]
    refusal: Callable[[Mapping[str, Any]], str | None] = lambda call: None


class BoundOp:
    """Serves repeated calls of one op with equal shapes, strides, dtypes, devices and non-tensors.

    A call through the dispatcher boxes every argument, enters Python again, finds the device and looks up the
    call: more host time than the launch itself takes.

    Attributes:
        function: takes the arguments that `BoundaryOp.bind` was given, in the same places. Read it anew for
            each call: defining the op again replaces it. Grad mode must be off.
    """

    __slots__ = ("__weakref__", "function")

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryOp:
    """Holds one declaration. Calling it calls the op; Dynamo sees one node, as with `torch.ops.ns.op(...)`.

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
        mutated: names of the arguments that the schema marks as written, in schema order.
        captured_form: what is captured in its place, where its metadata is Python state; None where the op
            itself can be captured, or nothing can.
        repeatable: what the op leaves behind belongs to the running step: nobody else reads it before the
            step is over, and the step, repeated from its first op, writes it anew. So a call may run ahead of
            the check that its graphs are still right, and run eagerly after all.
        any_strides: names of arguments, read alone, whose rows may lie apart or in another order than in
            eager's tensor: it takes any strides of them, of which the last one is 1. So a compiler's result
            or a part of a packed projection is not copied for it.
        definition: what its kernel reads, where `define` made the op.
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
    definition: Definition | None = field(default=None, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.overload(*args, **kwargs)

    def bind(self, *args: Any) -> BoundOp:
        """Returns the op made ready for repeats of a call just served; `args` are all its arguments."""
        if self.definition is None:
            return BoundOp(self.overload)
        bound = BoundOp(self.definition.bound_function(args))
        self.definition.bound.add(bound)
        return bound


@dataclass(slots=True, eq=False)
class Definition:
    """Keeps an op that `define` made alive, and holds what its one kernel and its fake read at each call.

    `names` are the schema's arguments in order, `bound` the ops bound to the present implementation.
    """

    op: str
    schema: str
    names: tuple[str, ...]
    library: torch.library.Library
    implementations: Mapping[str, Implementation] | Implementation
    token_args: Mapping[str, int] | None
    bind: Mapping[str, Binder]
    bound: WeakSet[BoundOp] = field(default_factory=WeakSet)

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Is the op's one kernel: chooses the implementation by the device of the first tensor."""
        implementation = self._implementation_for(_device_of((*args, *kwargs.values()) if kwargs else args))
        if torch.is_grad_enabled():
            # Otherwise autograd would record the writes, and a cache would keep every call's graph alive.
            with torch.no_grad():
                implementation(*args, **kwargs)
        else:
            implementation(*args, **kwargs)

    def fake(self, *args: Any, **kwargs: Any) -> None:
        """Writes nothing; states that all declared token dims are equal, so that their symbols become one."""
        values = {**dict(zip(self.names, args, strict=False)), **kwargs}
        first: tuple[str, Any] | None = None
        for argument, dim in (self.token_args or {}).items():
            tensor = values.get(argument)
            if tensor is None:
                continue
            if dim >= tensor.dim():
                got = str(list(tensor.shape))
                raise MissingTokenDim(op=self.op, argument=argument, dim=dim, num_dims=dim + 1, got=got)
            size = tensor.shape[dim]
            if first is None:
                first = (argument, size)
            text = f"op '{self.op}': '{argument}' and '{first[0]}' carry different numbers of tokens"
            check(size == first[1], lambda text=text: text)  # type: ignore[misc]

    def bound_function(self, args: tuple[Any, ...]) -> Callable[..., object]:
        """Returns what serves calls that repeat with arguments of the geometry of these."""
        device = _device_of(args)
        binder = self.bind.get(device)
        served = binder(*args) if binder is not None else None
        return served or self._implementation_for(device)

    def _implementation_for(self, device: str) -> Implementation:
        implementations = self.implementations
        if not isinstance(implementations, Mapping):
            return implementations
        found = implementations.get(device)
        if found is None:
            raise NoImplementation(op=self.op, device=device, devices=sorted(implementations))
        return found


def _device_of(values: tuple[Any, ...]) -> str:
    # A plain loop: a generator costs three times as much, on each call of each layer.
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"
