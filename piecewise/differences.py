"""How far two tensors are apart, what rounding allows, and where they differ.

The bound for a value of dtype `t` behind `S` graph segments whose longest reduction has `K` terms:

    tolerance = sqrt(S) * (8 * eps(t) + sqrt(K) * eps(sums)) * largest eager value

Each op rounds its result to `t` and sums in float32 (float64 for float64; TF32 where torch allows it), and
another kernel choice orders the sum in another way; independent roundings grow with the square root of their
number. It follows from the model and the call alone. Integers, bools and plain numbers must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

_ROUNDINGS = 8
_MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The bound above for one plan and one token count.

    Attributes:
        reduction_length: the longest reduction: the last dim of a weight, or the tokens of the call.
        num_segments: graph segments that a value may pass through.
        has_tf32: whether float32 products are rounded to TF32.
    """

    reduction_length: int
    num_segments: int
    has_tf32: bool = False

    def relative(self, dtype: torch.dtype) -> float:
        """Share of the largest eager value by which a value of `dtype` may differ."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        eps = torch.finfo(dtype).eps
        sums = 2.0**-10 if self.has_tf32 else torch.finfo(torch.float32).eps
        if dtype in (torch.float64, torch.complex128):
            sums = eps
        depth = math.sqrt(max(self.num_segments, 1))
        return depth * (_ROUNDINGS * eps + math.sqrt(max(self.reduction_length, 1)) * sums)

    def for_one_segment(self) -> Tolerance:
        """The bound for one segment alone, on equal inputs."""
        return Tolerance(self.reduction_length, 1, self.has_tf32)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Two tensors that differ by more than allowed.

    Attributes:
        rows: the first rows that differ, along `dim`; `num_rows` is how many do.
        position: index of the largest difference.
        size, allowed: the largest difference, infinite where only one of the two is finite, and the bound.
        written, left_alone: for a tensor that existed before the call, the first rows that differ where eager
            writes them, and where eager leaves them as they were: in a KV cache, rows that this call puts
            in use, and rows that are another's or nobody's. `num_written`, `num_left_alone` are how many.
        detail: what is wrong where it is no matter of size; empty otherwise.
    """

    dim: int
    rows: tuple[int, ...]
    num_rows: int
    position: tuple[int, ...]
    size: float
    allowed: float
    detail: str = ""
    written: tuple[int, ...] = ()
    num_written: int = 0
    left_alone: tuple[int, ...] = ()
    num_left_alone: int = 0


def compare_tensors(
    expected: torch.Tensor,
    found: torch.Tensor,
    tolerance: Tolerance | None,
    *,
    dim: int = 0,
    before: torch.Tensor | None = None,
) -> TensorDifference | None:
    """Where `found` is not `expected` to rounding; None where it is nowhere.

    Args:
        tolerance: None for equal bits (NaNs of any payload are equal).
        dim: which dim counts rows.
        before: what both were before the call, to tell rows that `expected` writes from those that it leaves.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        got = f"{_kind(found)} where eager has {_kind(expected)}"
        return TensorDifference(dim, (), 0, (), math.inf, 0.0, got)
    found = found.to(expected.device)
    if expected.numel() == 0 or torch.equal(expected, found):
        return None
    left, right = _wide(expected), _wide(found)
    is_float = expected.dtype.is_floating_point or expected.dtype.is_complex
    distance = (left - right).abs()
    if is_float:
        # Equal infinities and NaNs on both sides agree; a value that only one side has as a number does not.
        agree = (left == right) | (left.isnan() & right.isnan())
        distance = torch.where(agree, torch.zeros_like(distance), distance)
        distance = torch.where(distance.isnan(), torch.full_like(distance, math.inf), distance)
    allowed = 0.0
    if tolerance is not None and is_float:
        finite = left[torch.isfinite(left)]
        allowed = tolerance.relative(expected.dtype) * (float(finite.abs().max()) if finite.numel() else 0.0)
    wrong = distance > allowed
    if not bool(wrong.any()):
        return None
    worst = int(distance.reshape(-1).argmax())
    position = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), tuple(distance.shape)))
    if not wrong.dim():
        return TensorDifference(0, (), 0, (), float(distance.max()), allowed)
    dim = dim if dim < wrong.dim() else 0
    rows = _rows_of(wrong, dim)
    size = float(distance.reshape(-1)[worst])
    seen = TensorDifference(dim, tuple(rows[:_MAX_ROWS]), len(rows), position, size, allowed)
    if before is None:
        return seen
    before = before.to(expected.device)
    kept = (before == expected) | ((before != before) & (expected != expected))
    written, left_alone = _rows_of(wrong & ~kept, dim), _rows_of(wrong & kept, dim)
    return replace(
        seen, written=tuple(written[:_MAX_ROWS]), num_written=len(written),
        left_alone=tuple(left_alone[:_MAX_ROWS]), num_left_alone=len(left_alone),
    )  # fmt: skip


def _rows_of(wrong: torch.Tensor, dim: int) -> list[int]:
    """The indices along `dim` at which something is wrong."""
    others = [other for other in range(wrong.dim()) if other != dim]
    return (wrong.any(dim=others) if others else wrong).nonzero().reshape(-1).tolist()


def reduction_length(weights: Sequence[torch.Tensor], num_tokens: int) -> int:
    """The longest sum that a call makes, as far as the shapes of weights tell."""
    return max([num_tokens, *(weight.shape[-1] for weight in weights if weight.dim() >= 2)])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    if tensor.dtype.is_floating_point:
        return tensor.double() if tensor.dtype.itemsize >= 4 else tensor.float()
    return tensor.to(torch.int64) if tensor.dtype is not torch.uint64 else tensor.double()


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
