"""Defines in-place ops that a model is cut at, and what they work on: a paged KV cache, a step's metadata.

The package knows nothing of graphs. `import boundary_ops` defines the op `piecewise::attn_inplace`; it
imports neither transformers nor triton nor another attention library, and `huggingface` when it is used.
In: a schema, or the name of an op that exists. Out: a `BoundaryOp`. Read first: `declare/boundary_op.py`,
`declare/registry.py`, then `step/batch.py` and `attention/attention.py`.
"""

import importlib
import logging
from typing import Any

from boundary_ops.attention.attention import attn_inplace
from boundary_ops.attention.captured import attn_captured
from boundary_ops.declare.boundary_op import (
    BoundaryOp,
    CapturedForm,
    CaptureLimits,
    StepMetadata,
    StepMismatch,
)
from boundary_ops.declare.registry import define, lookup, register, registered, unregister
from boundary_ops.declare.rows import check_rows, declare_rows
from boundary_ops.errors import BoundaryOpError
from boundary_ops.errors.step import CacheExhaustedError
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "BoundaryOp",
    "BoundaryOpError",
    "CacheExhaustedError",
    "CaptureLimits",
    "CapturedForm",
    "PagedKVCache",
    "PrefillBatch",
    "StepMetadata",
    "StepMismatch",
    "attn_captured",
    "attn_inplace",
    "check_rows",
    "declare_rows",
    "define",
    "huggingface",
    "lookup",
    "register",
    "registered",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name == "huggingface":
        return importlib.import_module("boundary_ops.huggingface")
    raise AttributeError(f"module 'boundary_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
