"""Compares a model with its captured graphs; where calls find no change, a new trace is compared as well.

A trace made now reads all that forward reads. If it differs from the recorded program, something changed that
no call compares, such as state read by a function that Dynamo was told to treat as constant.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from piecewise.analysis.same_program import Program
from piecewise.capture.analyse import TracedModel
from piecewise.capture.captured_call import CapturedSignature, SignatureList
from piecewise.errors.capture import ModelDiffers
from piecewise.report.record import Record
from piecewise.trace.trace import ExampleCall
from runners.errors import PiecewiseError

Retrace = Callable[[ExampleCall], TracedModel]


@dataclasses.dataclass(frozen=True, slots=True)
class AddressReport(Record):
    """Describes what differs between a model and the graphs captured from it.

    Attributes:
        num_places: places that each call compares, over all signatures.
        seen_by_calls: changes that the next call finds: it runs eagerly, with a reason.
        unseen_by_calls: changes that no call finds: graphs replay the model as it was.
    """

    derived: ClassVar[tuple[str, ...]] = ("ok",)

    num_places: int
    seen_by_calls: tuple[str, ...]
    unseen_by_calls: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the graphs match the model as it is now."""
        return not (self.seen_by_calls or self.unseen_by_calls)

    def require(self) -> None:
        """Raises StateError if anything differs."""
        if not self.ok:
            num_changes = len(self.seen_by_calls) + len(self.unseen_by_calls)
            raise ModelDiffers(report=self, num_changes=num_changes)

    def __str__(self) -> str:
        found = "nothing" if self.ok else "this"
        lines = [f"{self.num_places} places compared on each call; {found} differs"]
        lines += [f"  found by calls, which run eagerly: {change}" for change in self.seen_by_calls]
        lines += [f"  found by no call: {change}" for change in self.unseen_by_calls]
        return "\n".join(lines)


def check_signatures(signatures: SignatureList, retrace: Retrace) -> AddressReport:
    """Compares each signature with the model and, where no call finds a change, its trace with a new one."""
    seen: dict[str, None] = {}
    unseen: dict[str, None] = {}
    num_places = 0
    for signature in signatures:
        num_places += signature.check.num_entries if signature.check is not None else 0
        change = signature.find_change()
        if change is not None and signatures.has_current_variant(signature):
            continue  # kept for when its model state returns; another variant serves present calls
        if change is not None:
            seen[change.detail] = None
        elif (difference := _difference(signature, retrace)) is not None:
            unseen[difference] = None
    return AddressReport(num_places, tuple(seen), tuple(unseen))


def _difference(signature: CapturedSignature, retrace: Retrace) -> str | None:
    earlier = signature.traced
    try:
        now = retrace(earlier.trace.example)
    except PiecewiseError as error:
        return f"it cannot be traced any more: {error.what}"
    count = max(earlier.token.example_num_tokens, 2)
    old, new = (Program(x.trace, x.facts, symbol=x.token.symbol, num_tokens=count) for x in (earlier, now))
    return old.difference(new)
