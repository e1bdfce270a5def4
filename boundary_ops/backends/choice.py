"""The names of the back ends, and what each needs of a cache. Only "auto" chooses; a name is kept to."""

from __future__ import annotations

from collections.abc import Callable

from boundary_ops.backends.flashinfer import FlashInferAttention
from boundary_ops.backends.library import LibraryAttention, PoolLook, refuse_backend
from boundary_ops.declare.schema import near
from boundary_ops.errors import BoundaryOpError

__all__ = ["NAMES", "choose"]

LIBRARIES: dict[str, Callable[[PoolLook], LibraryAttention]] = {"flashinfer": FlashInferAttention}
NAMES = ("auto", "triton", "torch", *LIBRARIES)


def choose(name: str, pools: PoolLook) -> LibraryAttention | None:
    """The library that attends for a cache with such pools; None where that is code of this package.

    Raises:
        BoundaryOpError: there is no back end of that name, it is not available here, or it cannot serve such
            pools.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise BoundaryOpError(
            "PagedKVCache, argument 'attention_backend'",
            expected=f"one of {', '.join(map(repr, NAMES))}",
            got=repr(name),
            rule="a back end is chosen by its name, when the cache is made",
            fix=near(str(name), list(NAMES)) or "leave it out: 'auto' takes what is there",
        )
    if name == "triton":
        _check_triton(pools)
    return LIBRARIES[name](pools) if name in LIBRARIES else None


def _check_triton(pools: PoolLook) -> None:
    if pools.device.type != "cuda":
        refuse_backend("triton", "a CUDA device", str(pools.device), "the program is for CUDA alone")
    try:
        from boundary_ops.attention.triton.plans import why_pools_unsupported
    except ImportError as error:
        refuse_backend("triton", "an installed triton", str(error), "a back end is never replaced by another")
    why = why_pools_unsupported(pools.dtype, pools.head_dim, pools.device.index)
    if why is not None:
        refuse_backend("triton", "pools that the program serves", why, "a back end serves all calls, or none")
