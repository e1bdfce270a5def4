"""In-place ops that a model is cut at, and what they work on: a paged KV cache and a step's metadata.

The package knows nothing of graphs. `import boundary_ops` defines the op `piecewise::attn_inplace`; it
imports neither transformers nor triton nor another attention library.
"""

from boundary_ops import huggingface
from boundary_ops.attention import attn_inplace
from boundary_ops.batch import PrefillBatch
from boundary_ops.capture import CapturedForm, CaptureLimits, Misfit, StepMetadata
from boundary_ops.captured_attention import attn_captured
from boundary_ops.errors import BoundaryOpError, CacheExhaustedError
from boundary_ops.kv_cache import PagedKVCache
from boundary_ops.registry import BoundaryOp, define, lookup, register, registered, unregister
from boundary_ops.rows import check_rows, declare_rows

__all__ = [
    "BoundaryOp",
    "BoundaryOpError",
    "CacheExhaustedError",
    "CaptureLimits",
    "CapturedForm",
    "Misfit",
    "PagedKVCache",
    "PrefillBatch",
    "StepMetadata",
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
