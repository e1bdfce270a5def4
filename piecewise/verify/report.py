"""Reports what `verify` compared, and the first difference, as text and JSON."""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from piecewise.report.record import Record, table
from piecewise.verify.differences import TensorDifference

_CAUSES = {
    "": "",
    "plan": "plan: the same padded rows without graphs differ from eager, too",
    "graphs": "graphs: the same padded rows without graphs are right",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference(TensorDifference):
    """Names the first difference between a replay and the eager call.

    Attributes:
        run: what padded rows held: "padding of zeros", "padding of nan", ...
        what: the result leaf, state tensor or input that differs, as a user writes it.
        segment: the first segment that differs on equal inputs; empty without one.
        kind: the segment's: "graph", "boundary" or "eager".
        op: the boundary op, the first op of a graph whose rows change with padding, or the tensor's maker.
        tensor: the first tensor of the segment that differs, as the attributes of `TensorDifference` say.
        cause: "plan" where the same padded call without graphs differs, too: the plan, one of its ops or the
            padding is at fault; "graphs" where it does not: lowering, capture or replay is.
    """

    num_tokens: int
    bucket: int
    run: str
    what: str
    segment: str = ""
    kind: str = ""
    op: str = ""
    tensor: str = ""
    cause: str = ""

    def __str__(self) -> str:
        rows, written = _listed(self.rows, self.num_rows), _listed(self.written, self.num_written)
        left_alone = _listed(self.left_alone, self.num_left_alone)
        where = f" at {list(self.position)}" if self.position else ""
        size = f"{self.size:.3g}{where}, rounding explains {self.allowed:.3g}"
        lines = {
            "first in": f"{self.segment}, {self.kind}, op {self.op}" if self.segment else "",
            "tensor": self.tensor,
            "rows": f"{rows} along dim {self.dim}" if rows else "",
            "in use": f"{written}: eager writes them, too" if written else "",
            "not used": f"{left_alone}: eager leaves them alone" if left_alone else "",
            "size": "" if math.isnan(self.size) else size,
            "cause": _CAUSES[self.cause],
            "detail": self.detail,
        }
        head = f"{self.num_tokens} tokens in bucket {self.bucket}, {self.run}: {self.what} differs"
        return "\n".join([head, *(f"  {name:<9} {text}" for name, text in lines.items() if text)])


def _listed(rows: tuple[int, ...], num_rows: int) -> str:
    more = ", ..." if num_rows > len(rows) else ""
    return f"{', '.join(map(str, rows))}{more} ({num_rows} in all)" if num_rows else ""


@dataclasses.dataclass(frozen=True, slots=True)
class SizeCheck:
    """Describes how the runs of one token count compare.

    Attributes:
        bucket: the bucket that served it, or None.
        path: "graph", or the code of the reason why the call runs eagerly and nothing is compared.
        runs: the runs compared with eager, by their padding: the plan without graphs, then replays.
        num_tensors: results, state and inputs compared in each run.
        identical: whether the served call equals eager bit for bit.
        tolerance: dtype → the share of the largest value that rounding explains.
    """

    num_tokens: int
    bucket: int | None
    path: str
    runs: tuple[str, ...] = ()
    num_tensors: int = 0
    identical: bool = False
    tolerance: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    difference: Difference | None = None

    def cells(self) -> tuple[str, ...]:
        result = "-" if self.path != "graph" else "identical" if self.identical else "to rounding"
        return (
            str(self.num_tokens), str(self.bucket or "-"), self.path, str(len(self.runs)),
            str(self.num_tensors), result if self.difference is None else "DIFFERENT",
            ", ".join(f"{dtype} {share:.1e}" for dtype, share in self.tolerance.items()),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport(Record):
    """Holds a check for every size that was compared or served eagerly."""

    checks: tuple[SizeCheck, ...]

    derived: ClassVar = ("format", "version", "ok", "num_compared", "first_difference")
    format: ClassVar = "piecewise-verify"
    version: ClassVar = 1

    @property
    def first_difference(self) -> Difference | None:
        """The difference at the smallest size that has one."""
        return next((check.difference for check in self.checks if check.difference is not None), None)

    @property
    def num_compared(self) -> int:
        return sum(check.path == "graph" for check in self.checks)

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differs; a run that replays nothing proves nothing."""
        return self.num_compared > 0 and self.first_difference is None

    def __str__(self) -> str:
        heading = "tokens", "bucket", "path", "runs", "tensors", "result", "rounding explains"
        if self.first_difference is not None:
            verdict = f"DIFFERENT: {self.first_difference}"
        elif not self.num_compared:
            verdict = "NOTHING COMPARED: no call was replayed; the path names the reason"
        else:
            verdict = f"Graphed equals eager at {self.num_compared} sizes."
        return f"{table([heading, *(check.cells() for check in self.checks)])}\n\n{verdict}"
