"""The fused ops as torch sees them: `piecewise::rms_norm` and so on, with fakes.

Without a GPU they are `reference.py`; on CUDA, where triton is installed, one launch each. Results are always
memory of their own, with the strides that `empty_like` of the first input gives.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from piecewise.passes import reference

_library = torch.library.Library("piecewise", "FRAGMENT")


@functools.cache
def _launches() -> Any:
    """The launches, or None where there is no triton."""
    try:
        from piecewise.passes.kernels import launches
    except ImportError:
        return None
    return launches


def _define(name: str, arguments: str, results: str, cpu: Any, cuda: Any, fake: Any) -> Any:
    # torch's operators inside would record a gradient of their own, behind the op's, which has none.
    on_cpu = torch.no_grad()(cpu)
    _library.define(f"{name}({arguments}) -> {results}")
    _library.impl(name, on_cpu, "CPU")
    _library.impl(name, lambda *args: (cuda if _launches() is not None else on_cpu)(*args), "CUDA")
    torch.library.register_fake(f"piecewise::{name}", fake, lib=_library)
    return getattr(torch.ops.piecewise, name).default


def _norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _add_norm(x, None, *rest)[0]


def _add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launches().norm(x, residual, weight, eps=eps, offset=offset, round_first=first)[:2]


def _quantised(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    first: bool,
    scale: torch.Tensor | None,
    least_peak: float,
    least_step: float,
    round_step: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    quant = 1 if scale is not None else 3 if round_step else 2
    found, total, scales = _launches().norm(
        x, residual, weight, eps=eps, offset=offset, round_first=first, quant=quant,
        scale=scale, least_peak=least_peak, least_step=least_step,
    )  # fmt: skip
    return found, scales if scale is None else x.new_empty(0, dtype=torch.float32), total


def _quant_fake(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = (0,) if scale is not None else (*x.shape[:-1], 1)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(sizes, dtype=torch.float32)


rms_norm = _define(
    "rms_norm", "Tensor x, Tensor weight, float eps, float offset, bool round_first", "Tensor",
    reference.rms_norm, _norm, lambda x, *_: torch.empty_like(x),
)  # fmt: skip
add_rms_norm = _define(
    "add_rms_norm", "Tensor x, Tensor residual, Tensor weight, float eps, float offset, bool round_first",
    "(Tensor, Tensor)", reference.add_rms_norm, _add_norm,
    lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)  # fmt: skip
_QUANT = (
    "Tensor weight, float eps, float offset, bool round_first, "
    "Tensor? scale, float least_peak, float least_step, bool round_step=False"
)
rms_norm_quant = _define(
    "rms_norm_quant", f"Tensor x, {_QUANT}", "(Tensor, Tensor)", reference.rms_norm_quant,
    lambda x, *options: _quantised(x, None, *options)[:2],
    lambda x, weight, eps, offset, first, scale, *_: _quant_fake(x, scale),
)  # fmt: skip
add_rms_norm_quant = _define(
    "add_rms_norm_quant", f"Tensor x, Tensor residual, {_QUANT}", "(Tensor, Tensor, Tensor)",
    reference.add_rms_norm_quant, _quantised,
    lambda x, residual, weight, eps, offset, first, scale, *_: (*_quant_fake(x, scale), torch.empty_like(x)),
)  # fmt: skip
silu_and_mul = _define(
    "silu_and_mul", "Tensor gate, Tensor up", "Tensor", reference.silu_and_mul,
    lambda gate, up: _launches().silu_and_mul(gate, up),
    lambda gate, up: torch.empty_like(gate),
)  # fmt: skip
rotate = _define(
    "rotate", "Tensor[] tensors, Tensor cos, Tensor sin", "Tensor[]", reference.rotate,
    lambda tensors, cos, sin: _launches().rotate(tensors, cos, sin),
    lambda tensors, cos, sin: [torch.empty_like(each) for each in tensors],
)  # fmt: skip
