"""What a change of a tensor subclass, or inside of one, does to the next call."""

from __future__ import annotations

import pytest
import torch
from subclass_changes import CHANGES, another_key, swapped
from subclass_models import Quantised, toy_with
from toy_models import make_ids

import piecewise


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_I4_I10_a_change_of_a_subclass_is_noticed(change):
    model = toy_with("blocks.0.qkv.weight", Quantised.of)
    arguments = make_ids(5), torch.arange(5)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    with torch.no_grad():
        graphed.capture(*arguments)
        before = graphed(*arguments)
        change(model.blocks[0].qkv.weight, model)
        got, want = graphed(*arguments), model(*arguments)
        assert torch.equal(got, want)
        assert change is another_key or not torch.allclose(got, before, atol=1e-4)
        assert [str(reason) for reason in graphed.stats.reasons] == [CHANGES[change]], graphed.stats
        graphed.refresh()
        assert torch.allclose(graphed(*arguments), want, atol=1e-5) and graphed.stats.replays == 2


def test_I4_what_is_written_in_place_is_replayed_with():
    model = toy_with("blocks.0.qkv.weight", Quantised.of)
    arguments = make_ids(8), torch.arange(8)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    with torch.no_grad():
        graphed.capture(*arguments)
        before = graphed(*arguments)
        weight = model.blocks[0].qkv.weight
        weight.copy_(Quantised.of(torch.randn(weight.shape)))
        assert torch.equal(graphed(*arguments), model(*arguments))
        assert graphed.stats.replays == 2 and not torch.allclose(graphed(*arguments), before, atol=1e-3)
        assert graphed.check_addresses().ok


def test_suspended_weights_may_move():
    """`.to()` swaps a subclass's insides; nothing of the old ones is held."""
    model = toy_with("blocks.0.qkv.weight", Quantised.of)
    arguments = make_ids(5), torch.arange(5)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    with torch.no_grad():
        graphed.capture(*arguments)
        want = graphed(*arguments)
        graphed.suspend()
        weight = model.blocks[0].qkv.weight
        kept = torch.UntypedStorage._weak_ref(weight.values.untyped_storage())
        swapped(weight, model)
        assert torch.UntypedStorage._expired(kept)
        torch.UntypedStorage._free_weak_ref(kept)
        graphed.resume()
        got = graphed(*arguments)
        assert torch.allclose(got, model(*arguments), atol=1e-5) and graphed.stats.replays == 2
        assert not torch.allclose(got, want, atol=1e-3)
