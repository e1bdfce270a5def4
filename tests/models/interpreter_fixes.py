"""What triton 3.6's interpreter lacks; imported for its effect where TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_create_dot = interpreter.InterpreterBuilder.create_dot
_cast, _convert = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_fp_to_fp
_ROUNDED = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}


def _patch_tensor_for_numpy(tensor, scope):
    """numpy 2.4 converts only 0-dimensional arrays to int; the interpreter's scalars have one dimension."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


def _dot_of_bfloat16(self, a, b, *rest):
    """The interpreter keeps bfloat16 as uint16, and would multiply those."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, *rest)


def _rounding(otherwise):
    """The interpreter cuts float32 off where a GPU rounds to the nearest even value."""

    def cast(self, source, target, *rest):
        narrow = _ROUNDED.get(target.scalar)
        if source.dtype.scalar != tl.float32 or narrow is None:
            return otherwise(self, source, target, *rest)
        bits = torch.uint16 if narrow is torch.bfloat16 else torch.uint8
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(narrow).view(bits)
        return interpreter.TensorHandle(rounded.numpy(), target.scalar)

    return cast


interpreter._patch_lang_tensor = _patch_tensor_for_numpy
interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16
interpreter.InterpreterBuilder.cast_impl = _rounding(_cast)
interpreter.InterpreterBuilder.create_fp_to_fp = _rounding(_convert)
