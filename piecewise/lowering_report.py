"""How the graph segments of a plan were lowered, for reports."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class KeptEager:
    """A segment that keeps eager kernels, and why."""

    segment: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class LoweringReport:
    """How the graph segments of one plan were lowered.

    Attributes:
        lowering: the setting.
        num_segments, num_distinct: graph segments, without those that make views only; and how many different
            ones there are among them.
        num_compiled: functions compiled for it now, of which `num_from_disk` were found in Inductor's cache.
        num_reused: functions that an earlier lowering of the same model left.
        seconds: in all.
        kept_eager: segments that keep eager kernels although they were to be compiled.
        is_done: false where nothing was compiled yet, and this is what can be foreseen.
    """

    lowering: str
    num_segments: int
    num_distinct: int
    num_compiled: int = 0
    num_from_disk: int = 0
    num_reused: int = 0
    seconds: float = 0.0
    kept_eager: tuple[KeptEager, ...] = ()
    is_done: bool = True

    def __str__(self) -> str:
        segments = f"{self.num_segments} graph segments, {self.num_distinct} distinct"
        if self.lowering == "eager":
            return f"{segments}, eager kernels"
        text = f"{segments}, to be lowered by {self.lowering}"
        if self.is_done:
            text = (
                f"{segments}, lowered by {self.lowering} in {self.seconds:.1f} s: {self.num_compiled} "
                f"compiled, {self.num_from_disk} of them found on disk, {self.num_reused} kept from before"
            )
        return "\n".join([text, *(f"  eager kernels in {k.segment}: {k.reason}" for k in self.kept_eager)])
