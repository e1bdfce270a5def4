"""What `verify` compared, and the first difference, as text, JSON and plain values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from piecewise.report.record import Record, plain, table
from piecewise.verify.differences import TensorDifference


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference(TensorDifference):
    """The first thing in which a replay is not the eager call.

    Attributes:
        num_tokens, bucket: the call.
        run: what padded rows held: "padding of zeros", "padding of nan", ...
        what: the result leaf, state tensor or input that differs, as a user writes it.
        segment: the first segment that differs by itself, on equal inputs; empty where none does.
        kind: its kind: "graph", "boundary" or "eager".
        op: the op in it: the boundary op, or the first op of a graph whose real rows change with padding, or
            else the op that made the tensor.
        tensor: what differs first, in that segment; how, say the attributes of `TensorDifference`.
        cause: "plan" where the same padded call without graphs differs, too: the plan, an op that it calls or
            what padded rows do in it is at fault; "graphs" where it does not: lowering, capture or replay is.
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
        lines = [f"{self.num_tokens} tokens in bucket {self.bucket}, {self.run}: {self.what} differs"]
        if self.segment:
            lines.append(f"  first in  {self.segment}, {self.kind}, op {self.op}")
        if self.tensor:
            lines.append(f"  tensor    {self.tensor}")
        if self.num_rows:
            lines.append(f"  rows      {_listed(self.rows, self.num_rows)} along dim {self.dim}")
        if self.num_written:
            lines.append(f"  in use    {_listed(self.written, self.num_written)}: eager writes them, too")
        if self.num_left_alone:
            lines.append(
                f"  not used  {_listed(self.left_alone, self.num_left_alone)}: eager leaves them alone"
            )
        if not math.isnan(self.size):
            where = f" at {list(self.position)}" if self.position else ""
            lines.append(f"  size      {self.size:.3g}{where}, rounding explains {self.allowed:.3g}")
        if self.cause:
            lines.append(f"  cause     {self.cause}: {_CAUSES[self.cause]}")
        if self.detail:
            lines.append(f"  detail    {self.detail}")
        return "\n".join(lines)


_CAUSES = {
    "plan": "the same padded rows without graphs differ from eager, too",
    "graphs": "the same padded rows without graphs are right",
}


def _listed(rows: tuple[int, ...], num_rows: int) -> str:
    return f"{', '.join(map(str, rows))}{', ...' if num_rows > len(rows) else ''} ({num_rows} in all)"


@dataclasses.dataclass(frozen=True, slots=True)
class SizeCheck:
    """One token count, compared.

    Attributes:
        bucket: what served it, or None.
        path: "graph", or the code of the reason why the call runs eagerly: then there is nothing to compare.
        runs: what was compared with eager: the plan on padded rows without graphs, then replays, by what
            padded rows held.
        num_tensors: results, state and inputs that were compared in each.
        identical: whether the call as it is served equals eager bit for bit.
        tolerance: per dtype, the share of the largest value that rounding explains.
        difference: what differs, or None.
    """

    num_tokens: int
    bucket: int | None
    path: str
    runs: tuple[str, ...] = ()
    num_tensors: int = 0
    identical: bool = False
    tolerance: tuple[tuple[str, float], ...] = ()
    difference: Difference | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport(Record):
    """Every size that was looked at."""

    checks: tuple[SizeCheck, ...]

    @property
    def first_difference(self) -> Difference | None:
        """Of the smallest size that has one."""
        return next((check.difference for check in self.checks if check.difference is not None), None)

    @property
    def num_compared(self) -> int:
        """Sizes that were replayed and compared."""
        return sum(check.path == "graph" for check in self.checks)

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differs: a run that replays nothing proves nothing."""
        return self.num_compared > 0 and self.first_difference is None

    def asdict(self) -> dict[str, Any]:
        """Plain values; a number that JSON does not have (an infinite difference) is its name."""
        checks = [dataclasses.asdict(check) for check in self.checks]
        for check in checks:
            check["tolerance"] = dict(check["tolerance"])
        first = self.first_difference
        return {
            "format": "piecewise-verify",
            "version": 1,
            "ok": self.ok,
            "num_compared": self.num_compared,
            "first_difference": None if first is None else plain(first),
            "checks": plain(checks),
        }

    def __str__(self) -> str:
        rows = [("tokens", "bucket", "path", "runs", "tensors", "result", "rounding explains")]
        for check in self.checks:
            bounds = ", ".join(f"{dtype} {share:.1e}" for dtype, share in check.tolerance)
            result = "-"
            if check.path == "graph":
                result = "identical" if check.identical else "to rounding"
            if check.difference is not None:
                result = "DIFFERENT"
            counts = str(len(check.runs)), str(check.num_tensors)
            rows.append(
                (str(check.num_tokens), str(check.bucket or "-"), check.path, *counts, result, bounds)
            )
        if self.first_difference is not None:
            verdict = f"DIFFERENT: {self.first_difference}"
        elif not self.num_compared:
            verdict = "NOTHING COMPARED: no call was replayed; the path names the reason"
        else:
            verdict = f"Graphed equals eager at {self.num_compared} sizes."
        return f"{table(rows)}\n\n{verdict}"
