"""What the attention of another library offers to `piecewise::attn_inplace`, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch

from boundary_ops.errors import refuse

if TYPE_CHECKING:
    from boundary_ops.batch import PrefillBatch

__all__ = ["LibraryAttention", "PoolLook", "check_gpu_pools", "check_rows", "refuse_backend", "refuse_call"]

# Where the libraries have kernels.
DEVICE_TYPES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PoolLook:
    """What a cache's pools look like, as far as a back end depends on it."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    head_dim: int


class LibraryAttention(Protocol):
    """The attention of a library for one cache. Making it raises where the library or the pools do not fit.

    All calls get arguments that fit each other and the batch, as `attention_checks` says.
    """

    def check_call(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """Raises where the library lacks what a layer asks for. Depends on the look of the call alone."""
        ...

    def attend(
        self,
        batch: PrefillBatch,
        q: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> None:
        """Attends straight into `out`; the step has tokens, and their K and V are in the pages already."""
        ...


def refuse_backend(name: str, expected: str, got: str, rule: str, fix: str | None = None) -> NoReturn:
    """Raises: the back end cannot serve a cache."""
    refuse(
        f"PagedKVCache, attention_backend='{name}'",
        expected,
        got,
        rule,
        fix or "change that, or leave attention_backend out: 'auto' takes what is there",
    )


def refuse_call(name: str, argument: str, expected: str, got: str) -> NoReturn:
    """Raises: the back end cannot serve a call."""
    refuse(
        f"op 'piecewise::attn_inplace', argument '{argument}', attention_backend='{name}'",
        expected,
        got,
        "a back end that was chosen by name serves a call, or refuses it; no other one steps in",
        "make this model's cache with another attention_backend, for example 'auto'",
    )


def check_gpu_pools(name: str, pools: PoolLook) -> None:
    """Raises unless device and dtype are those that the libraries have kernels for."""
    if pools.device.type not in DEVICE_TYPES:
        refuse_backend(name, "a CUDA device", str(pools.device), "the library has kernels for CUDA alone")
    if pools.device.type == "cuda" and torch.cuda.get_device_capability(pools.device) < (8, 0):
        found = ".".join(map(str, torch.cuda.get_device_capability(pools.device)))
        refuse_backend(name, "compute capability 8.0 or above", found, "the library has no kernels below it")
    if pools.dtype not in DTYPES:
        refuse_backend(name, "bfloat16 or float16", str(pools.dtype), "the library has no other dtypes")


def check_rows(
    name: str, q: torch.Tensor, out: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> None:
    """Raises on what no library serves: sinks, a scale that is not positive, heads that are not dense."""
    if sinks is not None:
        refuse_call(name, "sinks", "none", f"a tensor of {list(sinks.shape)}")
    if scale <= 0.0:
        # Their softmax takes the largest score before it is scaled.
        refuse_call(name, "scale", "a positive number", str(scale))
    for argument, tensor in (("q", q), ("out", out)):
        if tensor.stride(-1) != 1:
            refuse_call(name, argument, "the elements of a head side by side", f"strides {tensor.stride()}")
