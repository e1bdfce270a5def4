"""Describes a call of `piecewise::attn_inplace` to back ends, and what the attention of a library offers."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

NAME = "piecewise::attn_inplace"


class AttentionCall(NamedTuple):
    """Holds the arguments of `piecewise::attn_inplace`, in the order of its schema.

    Attributes:
        q: [num_tokens, heads, head_dim], any strides; query head `h` uses K/V head `h // (heads //
            kv_heads)`.
        k, v: [num_tokens, kv_heads, head_dim], any strides.
        out: like q, any strides; all its rows are written.
        k_cache, v_cache: one layer's pools, [num_blocks, block_size, kv_heads, head_dim]; rows at
            `slot_mapping` are written.
        scale: factor on q @ k.
        window: a token sees the last `window` tokens, itself included; 0 for all.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0 for none.
        sinks: [heads], a score per head that takes part in the softmax and has no value; None for none.
        implied_positions: the caller numbered the tokens 0, 1, 2, ... itself, so only a step of one
            sequence without context is right.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    implied_positions: bool = False


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Describes a cache's pools, as far as a back end depends on them."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class HostMetadata:
    """Holds a step's metadata on the host, with the shapes and dtypes of `PrefillBatch`'s tensors."""

    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray


class StepView(Protocol):
    """Shows back ends what they read of a `PrefillBatch`; see there."""

    @property
    def host(self) -> HostMetadata: ...
    @property
    def max_seqlen_k(self) -> int: ...
    @property
    def derived(self) -> dict[Any, Any]: ...


class AttentionLibrary(Protocol):
    """Attends for one cache, with arguments checked by the caller; making it raises where it does not fit."""

    def check_call(self, call: AttentionCall) -> None:
        """Raises where the library lacks what a layer asks for. Depends on the call's geometry alone."""

    def attend(self, step: StepView, call: AttentionCall) -> None:
        """Attends straight into `out`; the step has tokens, and their K and V are in the pages already."""
