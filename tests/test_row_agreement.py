"""The quick look at the results of a probe never says more than the close one."""

from __future__ import annotations

import pytest
import torch

from piecewise.row_agreement import difference, same_bits, surely_agree

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
OTHERS = (torch.int64, torch.uint8, torch.bool)
NAN, INF = float("nan"), float("inf")


def result(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 3, generator=generator, dtype=torch.float64) * 4
    return values.to(dtype)


def in_both(real, padded):
    """(whether the quick look is content, whether the close one is)."""
    return surely_agree([(real, padded)]), difference(real, padded) is None


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_equal_results_need_no_closer_look(dtype):
    real = result(dtype)
    assert in_both(real, [real.clone() for _ in range(3)]) == (True, True)
    assert in_both(real[:0], [real[:0].clone() for _ in range(3)]) == (True, True)
    turned = real.t()
    assert in_both(turned, [turned.contiguous(), turned.clone(), turned]) == (True, True)


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
@pytest.mark.parametrize("which", range(3))
def test_one_other_value_in_one_padded_run_is_seen(dtype, which):
    real = result(dtype)
    padded = [real.clone() for _ in range(3)]
    padded[which].view(torch.uint8)[-1, -1] ^= 1 if dtype is torch.bool else 64
    assert in_both(real, padded) == (False, False)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_a_real_row_that_is_not_finite_takes_the_closer_look(dtype, value):
    real = result(dtype)
    real[2, 1] = value
    assert in_both(real, [real.clone() for _ in range(3)]) == (False, True)
    for other in (0.0, NAN, INF, -INF, torch.finfo(dtype).max):
        padded = real.clone()
        padded[2, 1] = other
        expected = in_both(real, [padded] * 3)[1]
        assert in_both(real, [padded] * 3) == (False, expected)


@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_a_padded_row_that_is_not_finite_differs(dtype):
    real = result(dtype)
    for value in (NAN, INF, -INF):
        padded = real.clone()
        padded[0, 0] = value
        assert in_both(real, [padded] * 3) == (False, False)


@pytest.mark.parametrize("size", [0.0, 1e-9, 1.0, "max"], ids=str)
@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_the_quick_look_lets_pass_what_the_close_one_does_and_less(dtype, size):
    """From no difference to twice what is let pass: it goes over before the close look does."""
    real = result(dtype)
    real = (real / real.abs().max()) * (torch.finfo(dtype).max / 2 if size == "max" else size)
    scale = max(float(real.abs().max()), 1e-6)
    allowed = (256 if dtype.itemsize >= 4 else 8) * torch.finfo(dtype).eps * scale
    answers = []
    for part in torch.linspace(0, 2, 41, dtype=torch.float64).tolist():
        padded = (real.double() + part * allowed).to(dtype)
        answers.append(in_both(real, [padded] * 3))
    assert all(close for quick, close in answers if quick)
    assert answers[0] == (True, True) and answers[9] == (True, True)
    is_same = torch.equal(padded, real)  # fp16 has no number between 0 and twice what is let pass
    assert is_same == (dtype is torch.float16 and scale == 1e-6)
    assert answers[-1] == (is_same, is_same)


def test_a_difference_in_any_of_several_results_is_seen():
    real = result(torch.float32)
    same, other = [real] * 3, [real, real, real + 1]
    assert surely_agree([(real, same), (real.int(), [real.int()] * 3)])
    assert not surely_agree([(real, same), (real, other)])
    assert not surely_agree([(real, other), (real, same)])
    assert surely_agree([])


def test_another_shape_or_kind_takes_the_closer_look():
    real = result(torch.float32)
    assert not surely_agree([(real, [real[:4]] * 3)])
    assert not surely_agree([(real, [real.double()] * 3)])
    assert not surely_agree([(real.cfloat(), [real.cfloat()] * 3)])


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_the_same_bits_are_no_difference_whatever_they_stand_for(dtype):
    real = result(dtype)
    if dtype.is_floating_point:
        real[2, 1], real[0, 0] = NAN, 0.0
    padded = [real.clone(), real.t().contiguous().t(), real.clone()]
    assert same_bits([(real, padded), (real[:0], [real[:0]] * 3)]) and difference(real, padded) is None
    for which in range(4):
        runs = [real.clone() for _ in range(4)]
        runs[which].view(torch.uint8)[-1, -1] ^= 1
        assert not same_bits([(real, padded), (runs[0], runs[1:])])
        assert not same_bits([(runs[0], runs[1:])])
    if dtype.is_floating_point and dtype.itemsize > 1:
        zero = real.clone()
        zero[0, 0] = -0.0
        assert not same_bits([(real, [zero] * 3)]) and difference(real, [zero] * 3) is None


def test_another_shape_or_kind_is_not_the_same():
    real = result(torch.float32)
    assert same_bits([])
    assert not same_bits([(real, [real[:4]] * 3)])
    assert not same_bits([(real, [real, real, real.view(torch.int32)])])
    assert not same_bits([(real.cfloat(), [real.cfloat()] * 3)])
