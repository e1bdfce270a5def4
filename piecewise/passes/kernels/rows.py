"""Finds where a tensor's rows begin, for programs that read and write whole rows.

A row is the last dim, which is dense. Row `i` begins at ``(i // inner) * outer_step + (i % inner) *
inner_step``, which covers slices of packed projections and permuted heads. Tensors with other strides are
copied. Results have the strides of `empty_like` of the first input.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it)

# Elements per program where rows are short.
TILE = 2048


@triton.jit
def row_begin(row, inner, outer_step, inner_step):
    return (row // inner) * outer_step + (row % inner) * inner_step


def row_steps(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Returns (inner, outer step, inner step) of a tensor's rows; None where these cannot address them."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        return None
    dims: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 2:
        return None
    if len(dims) == 2:
        return dims[1][0], dims[0][1], dims[1][1]
    size, stride = dims[0] if dims else (1, 0)
    return max(size, 1), 0, stride


def addressable(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    steps = row_steps(tensor)
    if steps is None:
        tensor = tensor.contiguous()
        steps = row_steps(tensor)
    assert steps is not None
    return tensor, steps


def output_like(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocates a result with the strides of `like`, or a dense one where these do not address rows."""
    made = torch.empty_like(like, dtype=dtype)
    return made if row_steps(made) is not None else made.new_empty(like.shape)


def as_made(written: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the result of an `output_like`, copied to the strides of `empty_like` where they differ."""
    if row_steps(like) is not None:
        return written
    made = torch.empty_like(like, dtype=written.dtype)
    return written if row_steps(made) is not None else made.copy_(written)
