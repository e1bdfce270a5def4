"""How far two tensors are apart, or what two runs of a call left behind, and what rounding allows.

The bound for a value of dtype `t` behind `S` graph segments whose longest reduction has `K` terms:

    tolerance = sqrt(S) * (8 * eps(t) + sqrt(K) * eps(sums)) * largest eager value

Each op rounds its result to `t` and sums in float32 (float64 for float64; TF32 where torch allows it), and
another kernel choice orders the sum in another way; independent roundings grow with the square root of their
number. It follows from the model and the call alone. Integers, bools and plain numbers must be equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecewise import torch_api
from piecewise.calls.structure import Structure, flatten_structure
from piecewise.trace.subclasses.kinds import plain_tensors

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Two tensors that differ by more than allowed.

    Attributes:
        dim, rows, num_rows: the first rows that differ, along a dim, and how many do.
        position: index of the largest difference.
        size, allowed: the largest difference, infinite where only one of the two is finite, and the bound.
        written, num_written, left_alone, num_left_alone: for a tensor that existed before the call, the rows
            that differ and that eager writes in this call (in a KV cache: rows put in use), and those that it
            leaves alone (rows of others, or in nobody's use).
        detail: what is wrong in words, where no number says it (an error, another shape); empty otherwise.
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
        return TensorDifference(dim=dim, size=math.inf, allowed=0.0, detail=got)
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
    size = float(distance.reshape(-1)[worst])
    if not wrong.dim():
        return TensorDifference(size=size, allowed=allowed)
    position = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), tuple(distance.shape)))
    dim = dim if dim < wrong.dim() else 0
    rows, num_rows = _first_rows(wrong, dim)
    seen = TensorDifference(
        dim=dim, rows=rows, num_rows=num_rows, position=position, size=size, allowed=allowed
    )
    if before is None:
        return seen
    before = before.to(expected.device)
    kept = (before == expected) | ((before != before) & (expected != expected))
    written, num_written = _first_rows(wrong & ~kept, dim)
    left_alone, num_left_alone = _first_rows(wrong & kept, dim)
    return replace(
        seen, written=written, num_written=num_written, left_alone=left_alone, num_left_alone=num_left_alone
    )


def _first_rows(wrong: torch.Tensor, dim: int) -> tuple[tuple[int, ...], int]:
    """The first indices along `dim` at which something is wrong, and how many there are."""
    others = [other for other in range(wrong.dim()) if other != dim]
    found = (wrong.any(dim=others) if others else wrong).nonzero().reshape(-1).tolist()
    return tuple(found[:_MAX_ROWS]), len(found)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    if tensor.dtype.is_floating_point:
        return tensor.double() if tensor.dtype.itemsize >= 4 else tensor.float()
    return tensor.to(torch.int64) if tensor.dtype is not torch.uint64 else tensor.double()


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result's structure and leaves, and the watched tensors by name: copies of all.

    A tensor subclass in the result is its class, in the structure, and the tensors inside of it, as leaves.
    """

    structure: tuple[Structure, tuple[tuple[type, int], ...]]
    leaves: list[Any]
    watched: dict[str, torch.Tensor]

    @classmethod
    def of(cls, call: Callable[[], Any], watched: Mapping[str, torch.Tensor]) -> Outcome:
        """Of `call()`. Copies, since the next run may overwrite what a result is a view of."""
        structure, leaves = flatten_structure(call())
        # Comparisons of a subclass are its own class's: of what is inside, all of it.
        opened = [list(plain_tensors(leaf)) if torch_api.is_wrapper(leaf) else [leaf] for leaf in leaves]
        kinds = tuple(
            (type(leaf), len(parts))
            for leaf, parts in zip(leaves, opened, strict=True)
            if torch_api.is_wrapper(leaf)
        )
        parts = itertools.chain.from_iterable(opened)
        leaves = [stored(part.detach()) if isinstance(part, torch.Tensor) else part for part in parts]
        return cls((structure, kinds), leaves, {name: stored(tensor) for name, tensor in watched.items()})

    def differing(
        self, found: Outcome, tolerance: Tolerance | None, *, before: Mapping[str, torch.Tensor] | None = None
    ) -> list[tuple[str, TensorDifference]]:
        """What `found`, of equal structure, differs in, by name, results first.

        Args:
            tolerance: None for equal bits.
            before: the watched tensors before the call.
        """
        wrong = []
        for index, (left, right) in enumerate(zip(self.leaves, found.leaves, strict=True)):
            if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
                difference = compare_tensors(left, right, tolerance)
            elif left == right or (left != left and right != right):
                difference = None
            else:
                detail = f"{right!r} where eager has {left!r}"
                difference = TensorDifference(size=float("inf"), allowed=0.0, detail=detail)
            if difference is not None:
                wrong.append((f"result leaf {index}", difference))
        for name, tensor in self.watched.items():
            kept = before[name] if before is not None else None
            difference = compare_tensors(tensor, found.watched[name], tolerance, before=kept)
            if difference is not None:
                wrong.append((name, difference))
        return wrong


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; on the host where the device has too little room left for four of it."""
    if tensor.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(tensor.device)
        if 4 * tensor.numel() * tensor.element_size() > free:
            return tensor.cpu()
    return tensor.clone()


def has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same; a NaN is never."""
    right = right.to(left.device)
    if not torch.equal(left, right):
        return False
    return not left.dtype.is_floating_point or torch.equal(left.signbit(), right.signbit())
