"""The passes over aten graphs, each alone: what it removes or joins, and what it must leave as it is."""

from __future__ import annotations

import pytest
import torch
from aten_segments import ROWS, Rewritten, segment_of
from torch.nn import functional as F

from piecewise.ir.aten import NotTraceable, trace_aten
from piecewise.passes.fuse import passes_for, passes_named
from piecewise.passes.fusion_pass import FUSIONS
from piecewise.passes.pack_linears import are_packed, pack_, why_not_packable
from piecewise.settings.fusions import PASS_NAMES
from runners.state.state_check import StateRef

WIDTH = 16


def rows(*sizes, dtype=torch.float32):
    return torch.randn(ROWS, *sizes).to(dtype)


def assert_equal(rewritten, tensors):
    own, found = rewritten.outputs(tensors)
    for ours, theirs in zip(found, own, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_passes_run_in_their_order_whatever_order_they_are_named_in():
    norms = ["rms_norm", "add_rms_norm", "add_rms_norm_quant"]
    in_order = [each.name for each in passes_named(PASS_NAMES)]
    assert in_order[:2] == ["clean_up", "pack_linears"] and sorted(in_order) == sorted(PASS_NAMES)
    assert [name for name in in_order if name in norms] == norms
    assert [each.name for each in passes_named(PASS_NAMES[::-1])] == in_order
    assert [each.name for each in passes_named(norms[2:])] == ["clean_up", *norms]
    assert [each.name for each in passes_named(("pack_linears",))] == ["clean_up", "pack_linears"]


def test_auto_has_the_passes_that_say_so_for_the_lowering():
    for lowering in ("eager", "inductor"):
        names = [name for name, each in FUSIONS.items() if lowering in each.auto]
        assert sorted(passes_for(("auto",), lowering)) == sorted(["clean_up", "pack_linears", *names])
    assert "rotary" in passes_for(("auto",), "inductor") and "rms_norm" in passes_for(("auto",), "eager")
    assert "rms_norm" not in passes_for(("auto",), "inductor")


# --- tracing


def test_a_graph_holds_for_any_row_count_of_two_or_more_and_says_for_which():
    def halves(x):
        return x.view(-1, 2, WIDTH) * 2 if x.shape[0] % 2 == 0 else x * 2

    tensors = [rows(WIDTH)]
    rewritten = Rewritten(halves, tensors)
    assert [n for n in range(8) if rewritten.is_valid(n)] == [3, 5, 7]
    assert Rewritten(lambda x: x * 2, tensors).is_valid(2)
    assert not Rewritten(lambda x: x * 2, tensors).is_valid(1)


def test_what_cannot_be_traced_says_why():
    segment, values = segment_of(lambda x: 1 / 0, [rows(WIDTH)])
    with pytest.raises(NotTraceable, match="ZeroDivisionError"):
        trace_aten(segment, values, num_rows=ROWS)
    segment, values = segment_of(lambda x: x.unsqueeze_(0), [rows(WIDTH)])
    with pytest.raises(NotTraceable, match="in place"):
        trace_aten(segment, values, num_rows=ROWS)


# --- clean_up


def test_casts_copies_and_views_without_effect_go():
    def function(x, like):
        y = x.to(torch.float32).to(torch.bfloat16)
        y = y.view(ROWS if isinstance(y.shape[0], int) else y.shape[0], WIDTH).clone().detach()
        return (y * 2).type_as(like) + y[:, :].expand(y.shape[0], WIDTH)

    tensors = [rows(WIDTH, dtype=torch.bfloat16), rows(WIDTH, dtype=torch.bfloat16)]
    rewritten = Rewritten(function, tensors)
    assert rewritten.targets == ["aten::mul", "aten::add"]
    assert_equal(rewritten, tensors)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.bfloat16).to(torch.float32),
        lambda x: x.to(torch.float64).to(torch.bfloat16).to(torch.float64).to(torch.float32),
        lambda x: x.t().contiguous() + 1,
        lambda x: x.clone(),
        lambda x: (x.clone(), x * 2),
    ],
)
def test_casts_and_copies_with_an_effect_stay(function):
    tensors = [rows(WIDTH)]
    rewritten = Rewritten(function, tensors)
    assert {"aten::_to_copy", "aten::clone"} & set(rewritten.targets)
    assert_equal(rewritten, tensors)
    results = rewritten.function(ROWS, *tensors)
    assert all(result.untyped_storage()._cdata != tensors[0].untyped_storage()._cdata for result in results)


def test_a_copy_taken_before_a_write_stays():
    def function(x):
        before = x.clone()
        x.add_(1)
        return before * 2, x + 0

    tensors = [rows(WIDTH)]
    rewritten = Rewritten(function, tensors)
    assert "aten::clone" in rewritten.targets and "aten::add_" in rewritten.targets
    assert_equal(rewritten, tensors)


def test_equal_ops_on_equal_tensors_run_once():
    tensors = [rows(WIDTH)]
    rewritten = Rewritten(lambda x: ((x + 1.5).exp() * 2, (x + 1.5).exp() - 2), tensors)
    assert rewritten.targets == ["aten::add", "aten::exp", "aten::mul", "aten::sub"]
    assert_equal(rewritten, tensors)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x / 0.0 > 0, x / -0.0 > 0),
        lambda x: ((x > 0) * True + (x > 0), (x > 0) * 1 + (x > 0), (x > 0) * 1.0 + (x > 0)),
        lambda x: (x * 2, x * 2),
        lambda x: (x.exp().add_(1), x.exp()),
        lambda x: ((x + 1).sum(), x.add_(1), (x + 1).sum()),
    ],
    ids=["signed zeros", "kinds of one", "results", "written", "a write between"],
)
def test_ops_that_differ_in_a_sign_a_type_or_in_who_owns_the_memory_stay_apart(function):
    tensors = [rows(WIDTH)]
    rewritten = Rewritten(function, tensors)
    own, found = rewritten.outputs(tensors)
    assert [(each.dtype, each.tolist()) for each in found] == [(each.dtype, each.tolist()) for each in own]
    memories = [each.untyped_storage().data_ptr() for each in found]
    assert len(set(memories)) == len({each.untyped_storage().data_ptr() for each in own})


def test_dead_code_goes_but_not_what_writes():
    def function(x, counter):
        x.sin().cos()
        counter.add_(1)
        return x * 2

    tensors = [rows(WIDTH), torch.zeros(3)]
    rewritten = Rewritten(function, tensors)
    assert rewritten.targets == ["aten::add_", "aten::mul"]
    assert_equal(rewritten, tensors)


def test_temporaries_written_once_become_plain_results():
    def function(x, weight):
        return F.rms_norm(x, (WIDTH,), weight, 1e-5), x.exp().add_(x).mul_(2)

    tensors = [rows(WIDTH), torch.randn(WIDTH)]
    rewritten = Rewritten(function, tensors)
    assert not [name for name in rewritten.targets if name.endswith("_")]
    assert_equal(rewritten, tensors)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.add_(y),
        lambda x, y: (lambda t: (t.view(-1), t.add_(1)))(x * 2),
        lambda x, y: (lambda t: (t.view(-1).add_(1), t))(x * 2)[1],
        lambda x, y: x.to(torch.bfloat16).add_(y),
    ],
    ids=["an input", "a result that is seen twice", "through a view", "another dtype in place"],
)
def test_writes_that_somebody_sees_stay(function):
    tensors = [rows(WIDTH), rows(WIDTH)]
    rewritten = Rewritten(function, tensors)
    assert "aten::add_" in rewritten.targets
    assert_equal(rewritten, tensors)


# --- pack_linears


def weights(*sizes, width=WIDTH, dtype=torch.float32):
    """Weights as views of one storage, as `pack_` leaves them."""
    found = [torch.randn(size, width).to(dtype) for size in sizes]
    pack_([StateRef({"w": w}, "w", "w") for w in found])
    assert are_packed(found)
    return found


def vectors(*sizes):
    found = [torch.randn(size) for size in sizes]
    pack_([StateRef({"w": w}, "w", "w") for w in found])
    return found


def count(rewritten, *names):
    return sum(rewritten.targets.count(f"aten::{name}") for name in names)


def test_linears_of_one_input_become_one():
    def function(x, q, k, v):
        return F.linear(x, q).relu(), F.linear(x, k) * 2, F.linear(x, v)

    tensors = [rows(WIDTH), *weights(16, 8, 8)]
    rewritten = Rewritten(function, tensors, "pack_linears")
    assert rewritten.matches["pack_linears"] == 1
    assert count(rewritten, "mm") == 1
    own, found = rewritten.outputs(tensors)
    torch.testing.assert_close(found, own)
    assert all(ours.stride() == theirs.stride() for ours, theirs in zip(found, own, strict=True))


def test_biases_are_packed_with_their_weights_and_kinds_are_kept_apart():
    def function(x, a, b, c, d, bias_a, bias_b):
        y = x.unsqueeze(0)
        return F.linear(y, a, bias_a), F.linear(y, b, bias_b), F.linear(y, c), F.linear(y, d)

    tensors = [rows(WIDTH), *weights(16, 8), *weights(8, 24), *vectors(16, 8)]
    rewritten = Rewritten(function, tensors, "pack_linears")
    assert rewritten.matches["pack_linears"] == 2
    assert (count(rewritten, "addmm"), count(rewritten, "mm")) == (1, 1)
    own, found = rewritten.outputs(tensors)
    torch.testing.assert_close(found, own)


def written_in_between(view, x, a, b):
    first = F.linear(view, a)
    x.add_(1)
    return first, F.linear(view, b)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, y, a, b: (F.linear(x, a), F.linear(y, b)), "other inputs"),
        (lambda x, y, a, b: (F.linear(x, a), F.linear(x, a)), "one weight twice"),
        (lambda x, y, a, b: (F.linear(x, a), F.linear(x, b * 2)), "a weight that is computed"),
        (lambda x, y, a, b: written_in_between(x.view(-1, WIDTH), x, a, b), "an input written in between"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_linears_that_are_not_of_one_input_stay(function, why):
    tensors = [rows(WIDTH), rows(WIDTH), *weights(16, 8)]
    rewritten = Rewritten(function, tensors, "pack_linears")
    assert rewritten.matches["pack_linears"] == 0, why
    assert count(rewritten, "mm") == 2
    assert_equal(rewritten, tensors)


def test_views_that_slices_of_the_packed_result_do_not_allow_become_copies():
    def function(x, q, k):
        return F.linear(x, q).view(-1, 2, 8).sum(1), F.linear(x, k).view(x.shape[0] * 8)

    tensors = [rows(WIDTH), *weights(16, 8)]
    rewritten = Rewritten(function, tensors, "pack_linears")
    assert rewritten.matches["pack_linears"] == 1
    own, found = rewritten.outputs(tensors)
    torch.testing.assert_close(found, own)


# --- the memory of packed weights


def places(*tensors):
    return [StateRef({"w": tensor}, "w", f"w{index}") for index, tensor in enumerate(tensors)]


def test_packing_moves_tensors_into_one_storage_and_keeps_them_and_their_values():
    parameters = [torch.nn.Parameter(torch.randn(size, 8)) for size in (4, 2, 6)]
    before = [p.detach().clone() for p in parameters]
    held = places(*parameters)
    assert why_not_packable(held) is None
    pack_(held)
    assert [place.get() is p for place, p in zip(held, parameters, strict=True)] == [True] * 3
    assert are_packed(parameters) and parameters[0].untyped_storage().nbytes() == 12 * 8 * 4
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert all(p.requires_grad and p.is_leaf and p.is_contiguous() for p in parameters)
    addresses = [p.data_ptr() for p in parameters]
    assert why_not_packable(held) is None
    pack_(held)
    assert addresses == [p.data_ptr() for p in parameters]


def refused(*tensors):
    return why_not_packable(places(*tensors))


def test_weights_that_others_look_at_are_not_moved():
    one, other = torch.randn(4, 8), torch.randn(4, 8)
    view = one[1:]
    assert "shares its memory" in refused(one, other)
    del view
    assert refused(one, other) is None
    whole = torch.randn(8, 8)
    assert "shares its memory" in refused(whole[:4], torch.randn(4, 8))


def test_weights_of_other_kinds_are_not_packed():
    class Quantized(torch.Tensor):
        pass

    plain = torch.randn(4, 8)
    assert "Quantized" in refused(plain, torch.randn(4, 8).as_subclass(Quantized))
    assert "differ" in refused(plain, torch.randn(4, 8).double())
    assert "differ" in refused(plain, torch.randn(4, 7))
    assert "contiguous" in refused(plain, torch.randn(8, 4).t())
    assert "twice" in refused(plain, plain)
    assert "aligned" in refused(torch.randn(3), torch.randn(4))
    with torch.inference_mode():
        frozen = torch.randn(4, 8)
    assert "plain" in refused(plain, frozen)


def test_an_old_pack_is_packed_anew_in_another_order_only_as_a_whole():
    one, two, three = (torch.randn(4, 8) for _ in range(3))
    pack_(places(one, two, three))
    assert "shares its memory" in refused(one, two.clone())
    assert refused(two, one, three) is None
    values = [t.clone() for t in (one, two, three)]
    pack_(places(two, one, three))
    assert are_packed([two, one, three])
    assert all(torch.equal(t, v) for t, v in zip((one, two, three), values, strict=True))
