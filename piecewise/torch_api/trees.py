"""Exports pytree functions, and strides as functions of sizes."""

# ruff: noqa: F401

from __future__ import annotations

from torch._prims_common import (
    compute_required_storage_length,
    is_non_overlapping_and_dense_or_false,
    make_contiguous_strides_for,
)
from torch.utils._pytree import (
    SUPPORTED_NODES,
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
