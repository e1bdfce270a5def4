"""How a boundary op whose metadata is Python state can be captured: in a form that takes it as tensors.

Who captures writes the form in the op's place, with the tensors of one `StepMetadata` for all layers, and
loads the running step into them before each replay. An op whose metadata are tensors among its arguments
needs no such form: `capture_safe=True` says it all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from boundary_ops.declare.registry import BoundaryOp

__all__ = ["CaptureLimits", "CapturedForm", "Misfit", "StepMetadata"]


class Misfit(Enum):
    """Why the running step cannot be loaded; the op itself serves the call then, or says what is wrong."""

    TOO_LARGE = "more sequences or tokens, or a longer sequence, than there is room for"
    OTHER_STEP = "no running step, or one of another token count or cache"


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """The bounds of a captured step, inclusive.

    Attributes:
        max_num_seqs: sequences of one step.
        max_num_tokens: new tokens of one step.
        max_seq_len: context plus new tokens of one sequence.
    """

    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int


class StepMetadata(Protocol):
    """A step's metadata at fixed addresses; holds a step of zero sequences at first."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Argument name of the captured form's op → the tensor that it is given; none of them ever moves."""
        ...

    def misfit(self, num_tokens: int) -> Misfit | None:
        """Why a call of so many tokens cannot be served from the running step, or None. Changes nothing."""
        ...

    def load(self) -> None:
        """Copies the running step into the tensors, on the current stream, without waiting for it."""
        ...

    def clear(self) -> None:
        """Goes back to a step of zero sequences, for which the captured op writes nothing."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CapturedForm:
    """What is captured in place of an op.

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
