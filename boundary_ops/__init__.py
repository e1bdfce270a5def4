"""In-place ops that a model is cut at, and what they work on: a paged KV cache and a step's metadata.

The package knows nothing of graphs. `import boundary_ops` defines the op `piecewise::attn_inplace`; it
imports neither transformers nor triton nor another attention library.
"""

from boundary_ops import huggingface
from boundary_ops.attention.attention import attn_inplace
from boundary_ops.attention.captured import attn_captured
from boundary_ops.declare.captured_form import CapturedForm, CaptureLimits, Misfit, StepMetadata
from boundary_ops.declare.registry import BoundaryOp, define, lookup, register, registered, unregister
from boundary_ops.declare.rows import check_rows, declare_rows
from boundary_ops.errors import BoundaryOpError, CacheExhaustedError
from boundary_ops.step.batch import PrefillBatch
from boundary_ops.step.kv_cache import PagedKVCache

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
