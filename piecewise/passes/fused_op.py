"""Defines the ops that fusions make, such as `piecewise::rms_norm`: a reference, a fake and a kernel each.

The reference, in torch operators, is the tests' oracle and runs where there is no GPU or no triton; it rounds
where the unfused model does, so that fusing adds no error. Results own their memory, with the strides that
`empty_like` of the first input gives.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runners.engines import native_engine
from runners.tensors import tensors_in

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_FLOAT8 = 448.0  # the largest float8_e4m3fn
MAX_WIDTH = 16384

_library = torch.library.Library("piecewise", "FRAGMENT")


def fused_op(
    schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any], kernel: str | None = None
) -> Any:
    """Defines and returns the op `piecewise::<schema>`.

    Args:
        schema: as `torch.library` takes it, without a namespace.
        reference: computes the op with torch operators.
        fake: makes results of the right sizes and strides.
        kernel: "package.module:function" with the op's arguments, imported at its first run on a device that
            has Triton; where the import fails, the reference runs.
    """
    name = schema.partition("(")[0]
    # The op has no gradient, so the torch operators inside must record none.
    plain = torch.no_grad()(reference)
    _library.define(schema)
    _library.impl(name, plain, "CPU")
    # On any other device, whose engine knows whether it has Triton.
    _library.impl(name, lambda *args: _on_device(kernel, plain, args)(*args), "CompositeExplicitAutograd")
    torch.library.register_fake(f"piecewise::{name}", fake, lib=_library)
    return getattr(torch.ops.piecewise, name).default


def _on_device(kernel: str | None, plain: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    device = next(tensors_in(arguments)).device
    return (native_engine(device).has_triton and _kernel(kernel)) or plain


@functools.cache
def _kernel(path: str | None) -> Any:
    module, _, name = (path or "").partition(":")
    try:
        return getattr(importlib.import_module(module), name) if path else None
    except ImportError:
        return None
