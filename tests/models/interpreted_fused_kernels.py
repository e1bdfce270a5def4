"""The fused programs under triton's interpreter, on the CPU, against the reference in torch operators.

Not collected by name: `test_fused_ops.py` runs this file in a process of its own, because the interpreter is
chosen by TRITON_INTERPRET=1 as triton is imported, for the whole process.
"""

from __future__ import annotations

# First, as it is about how triton is imported.
import interpreter_fixes  # noqa: F401, I001
import pytest
import torch

from piecewise.passes.fusions import add_rms_norm, add_rms_norm_quant, rms_norm, rotary, silu_and_mul
from piecewise.passes.kernels import copies, gated
from piecewise.passes.kernels import norm as norms
from piecewise.passes.kernels import rotary as rotations
from runners.bound_steps import CopyIn, CopyInputs
from runners.rows import narrow_to, row_copies

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One unit in the last place of a result near 1: where a sum is made in another order, rounding may turn over.
ULP = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def layouts(rows, width, dtype):
    """Tensors of one shape in memory of different kinds; what is between the rows is NaN."""
    packed = torch.full((rows, 3 * width), float("nan")).to(dtype)
    packed[:, width : 2 * width] = torch.randn(rows, width).to(dtype)
    heads = torch.randn(1, rows, 3, width).to(dtype).transpose(1, 2)
    return {
        "dense": torch.randn(rows, width).to(dtype),
        "slice": packed[:, width : 2 * width],
        "heads": heads,
        "heads of a slice": torch.randn(1, rows, 5, width).to(dtype)[:, :, 1:4].transpose(1, 2),
        "columns": torch.randn(width, rows).to(dtype).t(),
        "no two steps": torch.randn(2, 3, 2, 5, width).to(dtype)[:, :2, :, ::2],
    }


def assert_close(found, expected, dtype, scale=1):
    assert found.dtype is expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=scale * ULP[dtype], atol=scale * ULP[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 96, 257, 4096])
@pytest.mark.parametrize(("offset", "round_first"), [(0.0, True), (0.0, False), (1.0, False)])
def test_norms(dtype, width, offset, round_first):
    weight = torch.randn(width).to(dtype)
    options = dict(eps=1e-6, offset=offset, round_first=round_first)
    for name, x in layouts(3, width, dtype).items():
        found = norms.norm(x, None, weight, **options)[0]
        expected = rms_norm.reference(x, weight, 1e-6, offset, round_first)
        assert_close(found, expected, dtype, 4)
        assert found.stride() == torch.empty_like(x).stride(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_rounded_before_they_are_normed_and_returned(dtype):
    weight = torch.randn(96).to(dtype)
    kinds = layouts(3, 96, dtype)
    pairs = (("dense", "slice"), ("slice", "dense"), ("columns", "dense"), ("heads", "heads of a slice"))
    for x, residual in [(kinds[one], kinds[other]) for one, other in pairs]:
        normed, total, _ = norms.norm(x, residual, weight, eps=1e-5, offset=0.0, round_first=True)
        expected, added = add_rms_norm.reference(x, residual, weight, 1e-5, 0.0, True)
        assert torch.equal(total, added)
        assert_close(normed, expected, dtype, 4)


def test_the_widest_and_the_narrowest_rows():
    for width in (2, 16384):
        x, weight = torch.randn(2, width), torch.randn(width)
        found = norms.norm(x, None, weight, eps=1e-6, offset=0.0, round_first=False)[0]
        assert_close(found, rms_norm.reference(x, weight, 1e-6, 0.0, False), torch.float32, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 96, 1025])
def test_gated_units(dtype, width):
    kinds = layouts(3, width, dtype)
    for one, other in (
        ("dense", "dense"),
        ("slice", "slice"),
        ("columns", "slice"),
        ("heads", "heads of a slice"),
    ):
        found = gated.silu_and_mul(kinds[one], kinds[other])
        expected = silu_and_mul.reference(kinds[one], kinds[other])
        assert_close(found, expected, dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 64, 80])
@pytest.mark.parametrize("kind", ["heads", "heads of a slice"])
def test_rotations(dtype, width, kind):
    rows = 5
    q, other = layouts(rows, width, dtype)[kind], layouts(rows, width, dtype)["heads"]
    k = other[:, :1]
    angles = torch.randn(1, 1, rows, width)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for tensors in ([q, k], [k, q], [q]):
        found = rotations.rotate(tensors, cos, sin)
        expected = rotary.reference(tensors, cos, sin)
        assert len(found) == len(expected)
        for ours, theirs, given in zip(found, expected, tensors, strict=True):
            assert_close(ours, theirs, dtype)
            assert ours.stride() == torch.empty_like(given).stride()


def test_rotations_of_rows_that_come_first_and_of_cosines_in_columns():
    x, cos = torch.randn(5, 3, 16), torch.randn(16, 5).t()[:, None]
    assert_close(rotations.rotate([x], cos, cos)[0], rotary.reference([x], cos, cos)[0], torch.float32)


def test_no_rows_are_no_launch():
    empty, weight = torch.empty(0, 16), torch.ones(16)
    assert norms.norm(empty, None, weight, eps=1e-6, offset=0.0, round_first=False)[0].shape == (
        0,
        16,
    )
    assert gated.silu_and_mul(empty, empty).shape == (0, 16)
    assert rotations.rotate([empty, empty], torch.ones(16), torch.ones(16))[0].shape == (0, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["dense", "slice", "heads"])
def test_norms_in_float8(dtype, kind):
    x = layouts(3, 96, dtype)[kind]
    weight = torch.randn(96).to(dtype)
    cases = ((torch.tensor([0.01]), None, 1), (None, None, 2), (None, x * 0.5, 2), (None, x * 0.5, 3))
    for scale, residual, quant in cases:
        options = dict(quant=quant, scale=scale, least_peak=1e-10)
        found, total, scales = norms.norm(
            x, residual, weight, eps=1e-6, offset=0.0, round_first=True, **options
        )
        summed = x if residual is None else x + residual
        expected, wanted = add_rms_norm_quant.reference(
            summed, weight, 1e-6, 0.0, True, scale, 1e-10, 0.0, quant == 3
        )
        assert found.dtype is torch.float8_e4m3fn and found.stride() == torch.empty_like(x).stride()
        if residual is not None:
            assert torch.equal(total, summed)
        # One step of float8 where a 16 bit value turned over.
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.126, atol=0.002)
        assert (found.float() != expected.float()).float().mean() < 0.02
        if scale is None:
            torch.testing.assert_close(scales, wanted, rtol=1e-2, atol=0)


def copy_in(shape, dim, padded, unit, dtype):
    """A buffer whose dim has room for `padded`, and the copy of a tensor of this shape into it."""
    sizes = list(shape)
    sizes[dim] = padded
    buffer = torch.full(sizes, 7).to(dtype)
    rows = narrow_to(buffer, shape)
    units = tuple(unit if at == dim else 1 for at in range(len(shape)))
    return CopyIn(0, buffer, rows, row_copies(buffer, shape, units), units)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float32], ids=str
)
@pytest.mark.parametrize(
    "shape, dim, padded, unit",
    [
        ((1, 5), 1, 8, 1),
        ((3, 5), 1, 9, 1),
        ((5, 40), 0, 70, 1),
        ((2, 6, 7), 1, 14, 2),
        ((4,), 0, 4, 1),
        ((1, 1), 1, 3000, 1),
    ],
)
def test_copies_are_those_of_torch(dtype, shape, dim, padded, unit):
    alike = [copy_in(shape, dim, padded, unit, dtype), copy_in((1, 3), 1, 5, 1, torch.int64)]
    for count in (1, 2):
        given = [
            torch.randint(0, 2 if copy.buffer.dtype is torch.bool else 99, tuple(copy.rows.shape))
            for copy in alike
        ]
        given = [tensor.to(copy.buffer.dtype) for tensor, copy in zip(given, alike, strict=True)]
        for position, copy in enumerate(alike):
            copy.slot = position
        CopyInputs(alike[:count]).replay(given)
        wanted = [copy.buffer.clone() for copy in alike[:count]]
        for copy in alike:
            copy.buffer.fill_(0)
        assert copies.copier(alike[:count])(given[:count])
        for copy, want in zip(alike[:count], wanted, strict=True):
            assert torch.equal(copy.buffer, want)


def test_copies_that_are_not_dense_are_left_to_torch():
    copy = copy_in((4, 3), 0, 8, 1, torch.float32)
    launch = copies.copier([copy])
    assert not launch([torch.randn(3, 4).T]) and not launch([torch.randn(4, 3).double()])
    assert launch([torch.randn(4, 3)])
    assert copies.copier([copy] * 5) is None
    two = copy_in((4, 3), 0, 8, 1, torch.float32)
    two.rows = narrow_to(two.buffer, (4, 2))
    assert copies.copier([two]) is None
