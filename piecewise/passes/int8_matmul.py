"""Multiplies two int8 matrices into int32, for any number of rows: `piecewise::int8_matmul`.

cuBLAS takes 17 rows or more. Fewer rows are padded with zeros, which are cut off again, so that a bucket of
16 tokens holds the same op as a larger one.
"""

from __future__ import annotations

import torch

import boundary_ops
from piecewise import torch_api

_LEAST_ROWS = 17

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define("int8_matmul(Tensor a, Tensor b) -> Tensor")


def _on_cuda(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[0] >= _LEAST_ROWS:
        return torch_api.int_mm(a, b)
    padded = a.new_zeros((_LEAST_ROWS, a.shape[1]))
    padded[: a.shape[0]] = a
    return torch_api.int_mm(padded, b)[: a.shape[0]].clone()


_library.impl("int8_matmul", torch_api.int_mm, "CompositeExplicitAutograd")
_library.impl("int8_matmul", _on_cuda, "CUDA")
torch.library.register_fake(
    "piecewise::int8_matmul",
    lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.int32),
    lib=_library,
)
int8_matmul = torch.ops.piecewise.int8_matmul.default
boundary_ops.declare_rows("piecewise::int8_matmul", token_args={"a": 0})
