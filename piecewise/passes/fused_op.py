"""Defines the ops that fusions make, such as `piecewise::rms_norm`, with a reference, a fake and a kernel.

The reference, in torch operators, is what runs without a GPU or without triton, and the tests' oracle; it
rounds where the unfused model does, so that fusing adds no error. Results are always memory of their own,
with the strides that `empty_like` of the first input gives.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_FLOAT8 = 448.0  # the largest float8_e4m3fn
MAX_WIDTH = 16384

_library = torch.library.Library("piecewise", "FRAGMENT")


def fused_op(
    schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any], kernel: str | None = None
) -> Any:
    """Defines `piecewise::<schema>`, and returns the op.

    Args:
        schema: as `torch.library` takes it, without a namespace.
        reference: computes it with torch operators.
        fake: makes results of the right sizes and strides.
        kernel: "package.module:function", with the op's arguments: what runs on CUDA, imported when it first
            does; where that fails, as without triton, the reference runs.
    """
    name = schema.partition("(")[0]
    # torch's operators inside would record a gradient of their own, behind the op's, which has none.
    plain = torch.no_grad()(reference)
    _library.define(schema)
    _library.impl(name, plain, "CPU")
    _library.impl(name, lambda *args: (_kernel(kernel) or plain)(*args), "CUDA")
    torch.library.register_fake(f"piecewise::{name}", fake, lib=_library)
    return getattr(torch.ops.piecewise, name).default


@functools.cache
def _kernel(path: str | None) -> Any:
    module, _, name = (path or "").partition(":")
    try:
        return getattr(importlib.import_module(module), name) if path else None
    except ImportError:
        return None
