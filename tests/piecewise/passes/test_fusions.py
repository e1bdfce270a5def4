"""Graphed models with rewritten segments: results, counts, and weights that can be changed and moved."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from plain_decoder import Plain, matches, packs
from torch import nn
from toy_models import HIDDEN, Block, Toy, check_sizes, kinds, make_ids, state_of

import piecewise
from piecewise.settings.fusions import PASS_NAMES
from piecewise.torch_backend import piecewise_backend
from runners.errors import ConfigError
from runners.stats import FallbackReason

CLOSE = dict(rtol=2e-5, atol=2e-5)


def graphed(model, *fusions, **settings):
    made = piecewise.compile(model, buckets=(8, 16), progress=False, fusions=fusions, **settings)
    return made, made.capture(make_ids(5))


def replayed(graphed, ids):
    before = graphed.stats.replays
    with torch.no_grad():
        result = graphed(ids)
    assert graphed.stats.replays == before + 1, graphed.stats.reasons
    return result


def eagerly(model, ids):
    with torch.no_grad():
        return model(ids)


# --- settings and reports


def test_fusions_are_off_unless_asked_for():
    model = Plain()
    addresses = [p.data_ptr() for p in model.parameters()]
    made, report = graphed(model)
    assert report.fusions is None and "fusions" not in str(made.report())
    assert addresses == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize(
    ("fusions", "shown"),
    [
        (("pack_linear",), "did you mean 'pack_linears'?"),
        (("auto", "pack_linears"), "'auto' alone"),
        (("pack_linears", "pack_linears"), "again"),
        ((3,), "3"),
    ],
    ids=str,
)
def test_wrong_names_are_refused(fusions, shown):
    with pytest.raises(ConfigError, match="fusions") as caught:
        piecewise.PiecewiseConfig(fusions=fusions)
    assert shown in str(caught.value)


def test_reports_count_matches_and_explain_moves_nothing():
    model = Plain(num_layers=3)
    addresses = [p.data_ptr() for p in model.parameters()]
    made = piecewise.compile(model, buckets=(8,), progress=False, fusions=("pack_linears",))
    plan = made.explain(make_ids(5))
    assert matches(plan)["pack_linears"] == 6
    assert "pack_linears 6" in str(plan) and "pack_linears 6" in plan.to_markdown()
    assert addresses == [p.data_ptr() for p in model.parameters()] and not any(packs(model))
    report = made.capture(make_ids(5))
    assert matches(report)["pack_linears"] == 6 and "pack_linears 6" in str(report)
    assert report.asdict()["fusions"]["matches"]


def test_a_pass_that_finds_nothing_says_so_once_and_why():
    model = Plain()
    views = [layer.q.weight[:1] for layer in model.layers] + [layer.up.weight[:1] for layer in model.layers]
    made, report = graphed(model, "pack_linears")
    assert views and matches(report)["pack_linears"] == 0
    text = str(report)
    assert text.count("pack_linears matched nothing, although there are linears of one input") == 1
    assert "layers.0.q.weight shares its memory" in text


# --- results


@pytest.mark.parametrize("bias", [False, True])
def test_plain_models_give_the_results_of_eager(bias):
    model = Plain(bias=bias)
    made, _ = graphed(model, "auto")
    assert packs(model) == [True] * 4
    for n in (1, 2, 7, 8, 9, 16):
        torch.testing.assert_close(replayed(made, make_ids(n)), eagerly(model, make_ids(n)), **CLOSE)
    with torch.no_grad():
        assert made.verify(make_ids(7)).ok


FOUND_IN_PLAIN = ("clean_up", "pack_linears", "rms_norm", "add_rms_norm", "silu_and_mul")


@pytest.mark.parametrize("name", PASS_NAMES)
def test_each_fusion_alone_passes_verify(name):
    model = Plain()
    made, report = graphed(model, name)
    assert report.ok and (matches(report)[name] > 0 or name not in FOUND_IN_PLAIN)
    with torch.no_grad():
        found = made.verify(make_ids(7))
    assert found.ok, str(found)


def test_I1_I2_I3_hold_for_rewritten_segments():
    made = check_sizes(Toy(num_blocks=2), fusions=("auto",))
    assert kinds(made) == "gbgbg"


def test_what_a_segment_writes_stays_written():
    class Counting(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(1))

        def forward(self, ids):
            self.total.add_(1)
            return super().forward(ids)

    model = Counting()
    made, _ = graphed(model, "auto")
    for calls in (1, 2, 3):
        replayed(made, make_ids(7))
        assert model.total.item() == calls


def test_a_bucket_that_the_rewritten_graph_excludes_keeps_the_segments_own_ops():
    model = Plain()
    made = piecewise.compile(model, buckets=(1, 8), progress=False, fusions=("auto",))
    assert made.capture(make_ids(5)).ok
    for n in (1, 8):
        torch.testing.assert_close(replayed(made, make_ids(n)), eagerly(model, make_ids(n)), **CLOSE)


# --- I4: weights after packing


def test_I4_weights_may_be_written_in_place_loaded_and_trained():
    model = Plain()
    made, _ = graphed(model, "pack_linears")
    ids = make_ids(7)
    first = replayed(made, ids)

    def moved_on(before):
        now = replayed(made, ids)
        assert not torch.equal(now, before)
        torch.testing.assert_close(now, eagerly(model, ids), **CLOSE)
        return now

    with torch.no_grad():
        model.layers[0].v.weight.mul_(-1)
    second = moved_on(first)
    other = Plain()
    model.load_state_dict(other.state_dict())
    third = moved_on(second)
    torch.testing.assert_close(third, eagerly(other, ids), **CLOSE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(ids).sum().backward()
    optimizer.step()
    moved_on(third)
    assert all(packs(model))


@pytest.mark.parametrize("name", ["q", "k", "up"])
@pytest.mark.parametrize("how", ["rebound", "data", "assigned"])
def test_I4_a_moved_member_is_noticed_and_refresh_packs_again(name, how):
    model = Plain()
    made, _ = graphed(model, "pack_linears")
    ids, linear = make_ids(7), getattr(model.layers[1], name)
    replayed(made, ids)
    fresh = torch.randn_like(linear.weight)
    if how == "rebound":
        linear.weight = nn.Parameter(fresh)
    elif how == "data":
        linear.weight.data = fresh
    else:
        linear.load_state_dict({"weight": fresh}, assign=True)
    del fresh
    with torch.no_grad():
        result = made(ids)
    assert made.stats.reasons[FallbackReason.MOVED_ADDRESS] == 1
    assert torch.equal(result, eagerly(model, ids))
    assert matches(made.refresh())["pack_linears"] == 4 and all(packs(model))
    torch.testing.assert_close(replayed(made, ids), eagerly(model, ids), **CLOSE)


def test_I4_a_capture_that_replaces_an_outdated_trace_packs_again():
    model = Plain()
    made, _ = graphed(model, "pack_linears")
    model.layers[0].q.weight = nn.Parameter(torch.randn_like(model.layers[0].q.weight))
    assert matches(made.capture(make_ids(5)))["pack_linears"] == 4 and all(packs(model))
    torch.testing.assert_close(replayed(made, make_ids(7)), eagerly(model, make_ids(7)), **CLOSE)


def test_I4_a_second_signature_and_a_second_module_leave_packed_weights_where_they_are():
    model = Plain()
    made, _ = graphed(model, "pack_linears")
    addresses = [p.data_ptr() for p in model.parameters()]
    made.capture(make_ids(5).to(torch.int32))
    other, report = graphed(model, "pack_linears")
    assert matches(report)["pack_linears"] == 4
    assert addresses == [p.data_ptr() for p in model.parameters()]
    replayed(made, make_ids(7))
    replayed(other, make_ids(7))


def test_I4_weights_that_other_graphs_read_are_not_moved():
    model = Plain()
    unpacked, _ = graphed(model)
    packed, report = graphed(model, "pack_linears")
    assert matches(report)["pack_linears"] == 0 and "in use by other graphs" in str(report)
    replayed(unpacked, make_ids(7))
    replayed(packed, make_ids(7))
    unpacked.release()
    assert matches(packed.refresh())["pack_linears"] == 4


def test_no_memory_is_added_and_copies_of_the_model_are_its_own():
    model = Plain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    made, _ = graphed(model, "pack_linears")
    after = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(after.values()) == sum(sizes.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    twin, ids = copy.deepcopy(model), make_ids(7)
    with torch.no_grad():
        twin.layers[0].q.weight.zero_()
    assert all(packs(model)) and not torch.equal(eagerly(twin, ids), eagerly(model, ids))
    torch.testing.assert_close(replayed(made, ids), eagerly(model, ids), **CLOSE)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    loaded = Plain()
    loaded.load_state_dict(torch.load(stored))
    assert torch.equal(eagerly(loaded, ids), eagerly(model, ids))


def test_released_and_disabled_models_run_on_with_packed_weights():
    model = Plain()
    want = eagerly(model, make_ids(7))
    made, _ = graphed(model, "pack_linears")
    made.release()
    assert torch.equal(eagerly(model, make_ids(7)), want)
    assert matches(made.capture(make_ids(5)))["pack_linears"] == 4
    replayed(made, make_ids(7))
    made.release()
    enabled = piecewise.enable(
        model, piecewise.PiecewiseConfig(buckets=(8,), fusions=("auto",), progress=False)
    )
    enabled.capture(make_ids(5))
    piecewise.disable(model)
    assert torch.equal(eagerly(model, make_ids(7)), want)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(make_ids(7)).sum().backward()
    optimizer.step()


def test_tied_weights_stay_tied():
    model = Plain()
    model.layers[1].q, model.layers[1].k = model.layers[0].q, model.layers[0].k
    made, report = graphed(model, "pack_linears")
    # The tied q and k are in one group with the v of layer 0 and in another with that of layer 1.
    assert matches(report)["pack_linears"] == 3
    assert model.layers[1].q is model.layers[0].q
    with torch.no_grad():
        model.layers[1].q.weight.mul_(2)
    torch.testing.assert_close(replayed(made, make_ids(7)), eagerly(model, make_ids(7)), **CLOSE)


def test_state_that_a_segment_writes_is_not_packed():
    class Adapting(Block):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False) for _ in range(2))

        def forward(self, x):
            self.a.weight.mul_(0.5)
            return super().forward(self.a(x) + self.b(x))

    model = Toy(num_blocks=0)
    model.blocks = nn.ModuleList([Adapting()])
    state = state_of(model)
    made, report = graphed(model, "pack_linears")
    assert matches(report)["pack_linears"] == 0
    assert all(torch.equal(tensor, before) for tensor, before in state.values())
    before = model.blocks[0].a.weight.clone()
    replayed(made, make_ids(7))
    assert torch.equal(model.blocks[0].a.weight, before * 0.5)


def test_the_backend_of_torch_compile_packs_too():
    model = Plain()
    ids = [make_ids(n) for n in (5, 7, 8)]
    want = [eagerly(model, each) for each in ids]
    compiled = torch.compile(
        model, backend=piecewise_backend, dynamic=True,
        options={"buckets": [8], "fusions": ["pack_linears"], "progress": False},
    )  # fmt: skip
    with torch.no_grad(), piecewise.capture_window():
        compiled(ids[0])
    found = [eagerly(compiled, each) for each in ids]
    torch.testing.assert_close(found, want, **CLOSE)
    report = piecewise.handle(compiled).report()
    assert dict(report.plans[0].fusions.matches)["pack_linears"] == 4 and all(packs(model))
    assert piecewise.handle(compiled).stats.replays >= 3


@pytest.mark.parametrize("fusions", [("auto",), PASS_NAMES], ids=["auto", "all"])
def test_inductor_compiles_the_rewritten_segments(fusions):
    model = Plain()
    made, report = graphed(model, *fusions, lowering="inductor")
    assert matches(report)["pack_linears"] == 4
    assert not report.lowerings[0].kept_eager, str(report)
    ids = make_ids(7)
    with torch.no_grad():
        assert made.verify(ids).ok
        model.layers[0].v.weight.mul_(-1)
    torch.testing.assert_close(replayed(made, ids), eagerly(model, ids), **CLOSE)


def test_one_token_is_compared_after_its_weights_were_packed():
    model = Plain()
    made, report = graphed(model, "pack_linears")
    assert matches(report)["pack_linears"] == 4 and not made.report().captures[0].serves_one_token
    torch.testing.assert_close(replayed(made, make_ids(1)), eagerly(model, make_ids(1)), **CLOSE)
    assert made.report().captures[0].serves_one_token
