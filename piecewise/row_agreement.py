"""When do the real rows agree? Bit for bit among padded runs, to rounding with the unpadded one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def difference(real: torch.Tensor, padded: Sequence[torch.Tensor]) -> str | None:
    """What differs between the result on real rows alone and the real rows of the padded runs, or None."""
    first = padded[0]
    if first.shape != real.shape:
        return f"has {tuple(first.shape)} real elements where eager has {tuple(real.shape)}"
    for other in padded[1:]:
        if not identical(first, other):
            return "real rows change with what padded rows hold"
    if not is_close(real, first):
        return "real rows differ from the result without padding"
    return None


def identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, but for the payload of NaNs."""
    if torch.equal(left, right):
        return True
    if not left.dtype.is_floating_point:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())


def is_close(real: torch.Tensor, padded: torch.Tensor) -> bool:
    """Equal up to the rounding of another kernel choice: 256 ulp of the largest value for fp32, 8 for
    16-bit types."""
    if not (real.dtype.is_floating_point or real.dtype.is_complex):
        return bool(torch.equal(real, padded))
    if real.numel() == 0:
        return True
    if real.dtype.itemsize == 1:
        real, padded, ulps, eps = real.float(), padded.float(), 8, 0.125
    else:
        eps = torch.finfo(real.dtype).eps
        ulps = 256 if real.dtype.itemsize >= 4 else 8
    finite = torch.isfinite(real)
    if not torch.equal(finite, torch.isfinite(padded)):
        return False
    scale = float(real[finite].abs().max()) if bool(finite.any()) else 0.0
    return bool(torch.allclose(padded, real, rtol=0.0, atol=ulps * eps * max(scale, 1e-6), equal_nan=True))
