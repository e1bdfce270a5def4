"""What the attention of another library offers to `piecewise::attn_inplace`, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch

from boundary_ops.errors import refuse

if TYPE_CHECKING:
    from boundary_ops.attention.checks import AttentionCall
    from boundary_ops.step.batch import PrefillBatch

__all__ = ["LibraryAttention", "PoolLook", "refuse_backend", "refuse_call"]


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

    def check_call(self, call: AttentionCall) -> None:
        """Raises where the library lacks what a layer asks for. Depends on the look of the call alone."""
        ...

    def attend(self, batch: PrefillBatch, call: AttentionCall) -> None:
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
