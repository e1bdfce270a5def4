"""Chooses a cache's back end by its name. Only "auto" chooses among several; any other name is kept to."""

import importlib
from collections.abc import Callable

import torch

from boundary_ops.backends.flashinfer import FlashInferAttention
from boundary_ops.backends.library import AttentionLibrary, PoolSpec
from boundary_ops.declare.schema import near
from boundary_ops.errors.backends import BackendUnavailable, UnknownBackend

LIBRARIES: dict[str, Callable[[PoolSpec], AttentionLibrary]] = {"flashinfer": FlashInferAttention}
NAMES = ("auto", "triton", "torch", *LIBRARIES)
# What the Triton program of `attention/triton` is written for.
TRITON_DEVICES = ("cuda",)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_MAX_HEAD_DIM = 256


def choose(name: str, pools: PoolSpec) -> AttentionLibrary | None:
    """Returns the library that attends for a cache with such pools; None where code of this package does.

    Raises:
        BoundaryOpError: the back end is unknown, not available here, or cannot serve such pools.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise UnknownBackend(names=", ".join(map(repr, NAMES)), got=repr(name), fix=near(str(name), NAMES))
    if name != "triton":
        return LIBRARIES[name](pools) if name in LIBRARIES else None
    if pools.device.type not in TRITON_DEVICES:
        raise BackendUnavailable(name="triton", expected="a CUDA device", got=str(pools.device))
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise BackendUnavailable(name="triton", expected="an installed triton", got=str(error)) from error
    why = why_triton_unsupported(pools.dtype, pools.head_dim, pools.device.index)
    if why is not None:
        raise BackendUnavailable(name="triton", expected="pools that the program serves", got=why)
    return None


def why_triton_unsupported(dtype: torch.dtype, head_dim: int, device_index: int) -> str | None:
    """Says why no call on such pools can run as the Triton program, or None; -1 is the CPU, interpreted."""
    if dtype not in TRITON_DTYPES:
        return f"the program has no {dtype}"
    if head_dim > TRITON_MAX_HEAD_DIM:
        return f"head_dim {head_dim} is above {TRITON_MAX_HEAD_DIM}"
    if device_index >= 0 and torch.cuda.get_device_capability(device_index) < (8, 0):
        return "the device's compute capability is below 8.0"
    return None
