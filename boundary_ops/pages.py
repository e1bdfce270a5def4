"""Writes a step's K and V to its pages, in torch operators."""

from __future__ import annotations

import torch

from boundary_ops.batch import PrefillBatch

__all__ = ["write_pages"]


def write_pages(
    batch: PrefillBatch, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Writes one layer's new K and V, [num_tokens, kv_heads, head_dim], to the step's slots of its pools."""
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, batch.slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, batch.slot_mapping, v)
