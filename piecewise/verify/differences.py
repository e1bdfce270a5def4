"""Compares two values: how far they are apart, and how much of that rounding explains.

The bound for a value of dtype `t` behind `S` graph segments whose longest reduction has `K` terms:

    tolerance = sqrt(S) * (8 * eps(t) + sqrt(K) * eps(sums)) * largest eager value

Each op rounds its result to `t` and sums in float32 (float64 for float64; TF32 where torch allows it),
another kernel sums in another order, and independent roundings grow with the square root of their number. The
bound follows from the model and the call alone. Integers, bools and plain numbers must be equal.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

_ROUNDINGS = 8
_MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Computes the bound above for one plan and one token count.

    Attributes:
        reduction_length: the longest reduction: the last dim of a weight, or the tokens of the call.
        num_segments: graph segments that a value may pass through.
        has_tf32: whether float32 products are rounded to TF32.
    """

    reduction_length: int
    num_segments: int
    has_tf32: bool = False

    def relative(self, dtype: torch.dtype) -> float:
        """Returns the bound for `dtype` as a share of the largest eager value."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        eps = torch.finfo(dtype).eps
        sums = 2.0**-10 if self.has_tf32 else torch.finfo(torch.float32).eps
        if dtype in (torch.float64, torch.complex128):
            sums = eps
        depth = math.sqrt(max(self.num_segments, 1))
        return depth * (_ROUNDINGS * eps + math.sqrt(max(self.reduction_length, 1)) * sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Describes how two values differ by more than the tolerance.

    Attributes:
        dim, rows, num_rows: the first rows that differ, along a dim, and how many do.
        position: index of the largest difference.
        size, allowed: the largest difference, infinite where only one of the two is finite, and the bound.
        written, num_written: as rows, those that eager writes in this call (in a KV cache: rows put in use).
        left_alone, num_left_alone: as rows, those that eager leaves alone (rows of others, or not in use).
        detail: the difference in words where no number says it (an error, another shape); else empty.
    """

    dim: int = 0
    rows: tuple[int, ...] = ()
    num_rows: int = 0
    position: tuple[int, ...] = ()
    size: float = math.nan
    allowed: float = math.nan
    written: tuple[int, ...] = ()
    num_written: int = 0
    left_alone: tuple[int, ...] = ()
    num_left_alone: int = 0
    detail: str = ""


def compare_values(
    expected: Any, found: Any, tolerance: Tolerance | None,
    *, dim: int = 0, before: torch.Tensor | None = None,
) -> TensorDifference | None:  # fmt: skip
    """Finds where a value differs from the expected one by more than rounding; None where it does not.

    Args:
        tolerance: None for equal bits (NaNs of any payload are equal).
        dim: the dim that counts rows.
        before: both values before the call, to tell rows that `expected` writes from those that it leaves.
    """
    if not (isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor)):
        if expected == found or (expected != expected and found != found):
            return None
        detail = f"{found!r} where eager has {expected!r}"
        return TensorDifference(size=math.inf, allowed=0.0, detail=detail)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        detail = f"{_kind(found)} where eager has {_kind(expected)}"
        return TensorDifference(dim=dim, size=math.inf, allowed=0.0, detail=detail)
    found = found.to(expected.device)
    if expected.numel() == 0 or torch.equal(expected, found):
        return None
    left, right = _wide(expected), _wide(found)
    is_float = expected.dtype.is_floating_point or expected.dtype.is_complex
    distance, allowed = (left - right).abs(), 0.0
    if is_float:
        # Equal infinities agree, and NaNs on both sides; a number against NaN or infinity does not.
        agree = (left == right) | (left.isnan() & right.isnan())
        distance = distance.masked_fill(agree, 0.0).nan_to_num_(math.inf, math.inf)
        if tolerance is not None:
            largest = left.masked_fill(~left.isfinite(), 0.0).abs().max()
            allowed = tolerance.relative(expected.dtype) * float(largest)
    wrong = distance > allowed
    if not bool(wrong.any()):
        return None
    worst = distance.argmax()
    size = float(distance.reshape(-1)[worst])
    if not wrong.dim():
        return TensorDifference(size=size, allowed=allowed)
    position = tuple(map(int, torch.unravel_index(worst, distance.shape)))
    dim = dim if dim < wrong.dim() else 0
    rows, num_rows = _first_rows(wrong, dim)
    kept = None
    if before is not None:
        before = before.to(expected.device)
        kept = (before == expected) | ((before != before) & (expected != expected))
    written, num_written = _first_rows(wrong & ~kept, dim) if kept is not None else ((), 0)
    left_alone, num_left_alone = _first_rows(wrong & kept, dim) if kept is not None else ((), 0)
    return TensorDifference(
        dim=dim, rows=rows, num_rows=num_rows, position=position, size=size, allowed=allowed, written=written,
        num_written=num_written, left_alone=left_alone, num_left_alone=num_left_alone,
    )  # fmt: skip


def _first_rows(wrong: torch.Tensor, dim: int) -> tuple[tuple[int, ...], int]:
    found = wrong.movedim(dim, 0).flatten(1).any(1) if wrong.dim() > 1 else wrong
    rows = found.nonzero().reshape(-1).tolist()
    return tuple(rows[:_MAX_ROWS]), len(rows)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    if tensor.dtype.is_floating_point:
        return tensor.double() if tensor.dtype.itemsize >= 4 else tensor.float()
    return tensor.to(torch.int64) if tensor.dtype is not torch.uint64 else tensor.double()


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
