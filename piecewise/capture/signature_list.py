"""The signatures of one graphed model: kinds of calls, each in the states of the model that were captured.

A call does not say in which state the model is: which adapter is active, whether one is merged, a flag. So
several signatures may match it, *variants* of one kind of call, each with the check of what its own trace
read. The one that served last is tried first, so that a call costs no more than with one of them; where its
check fails, the others are asked, and one whose check holds serves:

    call ─match─▶ variant "a" ─check fails─▶ variant "b" ─check holds─▶ replay; from now on "b" is tried first
                                                   └─ none holds ─▶ the model itself
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from piecewise.calls.binder import bound_call

if TYPE_CHECKING:
    from piecewise.capture.captured_call import CapturedSignature


class SignatureList(list["CapturedSignature"]):
    """In the order in which they are tried."""

    def matching(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, current: bool = False
    ) -> tuple[CapturedSignature, tuple[int, list[Any]]] | tuple[None, Any]:
        """The signature of a call, rather one of the present global state whose trace may hold for it, with
        the call's token count and leaves; gradients must be disabled.

        Args:
            current: only one of the present global state, that was traced of the model as it is.
        """
        found: Any = None, ()
        binder = bound = None
        for signature in self:
            if signature.binder is not binder:
                binder = signature.binder
                bound = bound_call(binder, args, kwargs)
            matched = signature.match(bound) if bound is not None else None
            if matched is not None:
                if signature.may_serve(*matched) and (not current or signature.is_current()):
                    return signature, matched
                found = found if found[0] is not None or current else (signature, matched)
        return found

    def prefer(self, signature: CapturedSignature) -> None:
        """Tries it first from now on."""
        if self[0] is not signature:
            self[:] = [signature, *(each for each in self if each is not signature)]

    def captured_order(self) -> list[CapturedSignature]:
        """For readers: the oldest first."""
        return sorted(self, key=lambda each: each.number)

    def has_current_variant(self, signature: CapturedSignature) -> bool:
        """Whether another signature serves the same calls, of the model as it is."""
        example = signature.traced.trace.example
        with torch.no_grad():
            found, _ = self.matching(example.args, example.kwargs, current=True)
        return found is not None and found is not signature

    def other_state(self, signature: CapturedSignature) -> str:
        """What tells a signature's state of the model from that of now, where a variant of it serves; else
        empty."""
        change = signature.find_change() if signature.check is not None else None
        return change.detail if change is not None and self.has_current_variant(signature) else ""

    def to_replace(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, max_kept: int
    ) -> list[CapturedSignature]:
        """The variants of a call that give way to a new one: those that cannot serve again, for they hold
        what is the model's no more, and beyond `max_kept` signatures the one that was used longest ago."""
        variants = []
        for signature in self:
            bound = bound_call(signature.binder, args, kwargs)
            matched = signature.match(bound) if bound is not None else None
            if matched is not None and signature.may_serve(*matched) and not signature.is_current():
                variants.append(signature)
        if not variants:
            return []
        owned = set(map(id, _owned_by(model)))
        gone = [each for each in variants if not _may_be_current_again(each, owned)]
        return gone or (variants[-1:] if len(self) >= max_kept else [])


def _may_be_current_again(signature: CapturedSignature, owned: Set[int]) -> bool:
    """Whether the model may come back into the state of the trace: it has all that the trace found.

    Args:
        owned: ids of the tensors and modules of the model.
    """
    if signature.suspended is not None:  # it holds nothing
        return signature.suspended.seen is not None
    change, check = signature.find_change(), signature.check
    is_state = change is not None and change.kind == "module_state_changed"
    return is_state and check is not None and check.holds_only(owned)


def _owned_by(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield module
        for table in (module._parameters, module._buffers, vars(module)):
            yield from (value for value in table.values() if isinstance(value, torch.Tensor))
