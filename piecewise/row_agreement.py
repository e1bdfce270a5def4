"""When do the real rows agree? Bit for bit among padded runs, to rounding with the unpadded one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Where all real values are smaller, rounding is measured by this one.
_LEAST_SCALE = 1e-6


def same_bits(results: Iterable[tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> bool:
    """Whether each of these (real, padded) results is the same bit for bit in all runs: then `difference`
    finds none, NaN or not. The device is waited for once."""
    flags: list[torch.Tensor] = []
    for real, padded in results:
        kind = real.dtype, real.shape
        if real.is_complex() or any((other.dtype, other.shape) != kind for other in padded):
            return False
        if real.numel():
            bits = torch.stack([real, *padded]).view(_BITS[real.dtype.itemsize])
            flags.append((bits[1:] == bits[0]).all())
    if len(flags) < 2:
        return not flags or bool(flags[0])
    return bool(torch.stack(flags).all())


def surely_agree(results: Iterable[tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> bool:
    """Whether `difference` finds none in any of these (real, padded) results; the device is waited for once.

    False may also mean that it takes a closer look: NaN and infinity among real rows, or rounding of more
    than half of what is let pass.
    """
    flags: list[torch.Tensor] = []
    for real, padded in results:
        kind = real.dtype, real.shape
        if real.is_complex() or any((other.dtype, other.shape) != kind for other in padded):
            return False
        if real.numel():
            flags += _flags(real, padded)
    return not flags or bool(torch.stack(flags).all())


def _flags(real: torch.Tensor, padded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """0-dim bools on the device, all true where the results surely agree."""
    if not real.dtype.is_floating_point:
        return [(torch.stack(list(padded)) == real).all()]
    bits = torch.stack(list(padded)).view(_BITS[real.dtype.itemsize])
    first, exact = padded[0], real
    if real.dtype.itemsize < 4:
        first, exact = first.float(), real.float()
    largest = torch.linalg.vector_norm(exact, ord=torch.inf)
    allowed = largest.clamp(min=_LEAST_SCALE) * (_tolerance(real.dtype) / 2)
    # Where a real value is no finite number, neither is the distance, which then is not below this.
    allowed = allowed.clamp(max=torch.finfo(exact.dtype).max)
    return [(bits[1:] == bits[0]).all(), ((first - exact).abs() <= allowed).all()]


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
    """Equal values; a NaN is the same as another."""
    if left.shape != right.shape:
        return False
    equal = left == right
    if left.dtype.is_floating_point:
        equal |= (left != left) & (right != right)
    return bool(equal.all())


def _tolerance(dtype: torch.dtype) -> float:
    """What rounding may change, relative to the largest value: 256 ulp for fp32, 8 for 16-bit types."""
    if dtype.itemsize == 1:
        return 8 * 0.125
    return (256 if dtype.itemsize >= 4 else 8) * torch.finfo(dtype).eps


def is_close(real: torch.Tensor, padded: torch.Tensor) -> bool:
    """Equal up to the rounding of another kernel choice; see `_tolerance`."""
    if not (real.dtype.is_floating_point or real.dtype.is_complex):
        return bool(torch.equal(real, padded))
    if real.numel() == 0:
        return True
    tolerance = _tolerance(real.dtype)
    if real.dtype.itemsize == 1:
        real, padded = real.float(), padded.float()
    finite = torch.isfinite(real)
    if not torch.equal(finite, torch.isfinite(padded)):
        return False
    scale = float(real[finite].abs().max()) if bool(finite.any()) else 0.0
    atol = tolerance * max(scale, _LEAST_SCALE)
    return bool(torch.allclose(padded, real, rtol=0.0, atol=atol, equal_nan=True))
