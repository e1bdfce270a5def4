"""Adapters of PEFT on an attached Llama: each state that was captured replays when it is back.

What holds of any adapters is tested without PEFT, in `test_variants_of_state.py`.
"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

import boundary_ops  # noqa: E402
import piecewise  # noqa: E402
from boundary_ops import PagedKVCache, PrefillBatch  # noqa: E402
from piecewise.trace.state.state import adapters_in_use  # noqa: E402

VOCAB = 97
CONFIG = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def lora(rank, *targets, **options):
    return peft.LoraConfig(r=rank, target_modules=list(targets), init_lora_weights=False, **options)


def new_llama():
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()


def attach(model):
    cache = PagedKVCache.for_model(model, num_tokens=64, block_size=4)
    boundary_ops.huggingface.attach(model, cache)
    return cache


def new_adapted():
    model = peft.get_peft_model(new_llama(), lora(4, "q_proj", "v_proj", "down_proj"), adapter_name="a")
    model.add_adapter("b", lora(8, "q_proj", "k_proj"))
    return model.eval()


def capture(graphed):
    ids = torch.arange(7)[None]
    with torch.no_grad():
        report = graphed.capture(input_ids=ids, position_ids=ids.clone())
    assert report.ok, str(report)
    return report


def serve(graphed, cache, num_tokens=5):
    """One step, without graphs and as it is served; "replay", or the code of the reason that was counted."""
    found, before = [], graphed.stats.snapshot()
    for call in (graphed._forward, graphed):
        batch = PrefillBatch.build(cache, ["a", "b"], [num_tokens - 2, 2])
        ids = torch.arange(3, num_tokens + 3)[None]
        with torch.no_grad(), batch:
            found.append(call(input_ids=ids, position_ids=batch.positions).logits)
        for name in ("a", "b"):
            cache.free(name)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    reasons = [reason.value for reason in (graphed.stats.reasons - before.reasons).elements()]
    assert graphed.stats.replays - before.replays + len(reasons) == 1
    return reasons[0] if reasons else "replay"


def disable(model):
    model.set_adapter("b")  # which one is selected meanwhile is read by PEFT's own forward
    disabled.enter_context(model.disable_adapter())


disabled = contextlib.ExitStack()
STATES = {
    "adapter a": lambda model: model.set_adapter("a"),
    "adapter b": lambda model: model.set_adapter("b"),
    "no adapter": disable,
    "adapter a (merged)": lambda model: (model.set_adapter("a"), model.merge_adapter()),
}


def come_to(state, model):
    disabled.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was merged
        model.unmerge_adapter()
    STATES[state](model)
    assert adapters_in_use(model) == state


def test_I10_switching_between_captured_adapters_replays_the_graphs_of_each():
    model = new_adapted()
    cache = attach(model)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    for number, state in enumerate(STATES):
        come_to(state, model)
        assert serve(graphed, cache) == ("module_state_changed" if number else "not_captured")
        capture(graphed)
        assert serve(graphed, cache) == "replay"
    for state in [*STATES, *reversed(STATES)]:
        come_to(state, model)
        assert serve(graphed, cache) == "replay", state
    come_to("adapter b", model)
    with model.disable_adapter():
        assert serve(graphed, cache) == "replay"
    assert serve(graphed, cache) == "replay"
    assert [each.adapters for each in graphed.report().captures] == list(STATES)
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["b"].weight.mul_(2)
    assert serve(graphed, cache) == "replay", "values of an adapter are read where they are"
    come_to("adapter b", model)
    model.merge_adapter()
    assert serve(graphed, cache) == "module_state_changed", "this one was not captured"


def test_I10_an_adapter_added_or_deleted_asks_for_a_capture_of_each_again():
    model = new_adapted()
    cache = attach(model)
    graphed = piecewise.compile(model, buckets=(8,), progress=False, max_signatures=2)
    for state in ("adapter a", "adapter b"):
        come_to(state, model)
        capture(graphed)
    model.add_adapter("c", lora(4, "q_proj"))
    model.eval()
    assert serve(graphed, cache) == "module_state_changed"
    for state in ("adapter a", "adapter b"):
        come_to(state, model)
        capture(graphed)
    for state in ("adapter a", "adapter b"):
        come_to(state, model)
        assert serve(graphed, cache) == "replay"
    model.delete_adapter("c")
    assert serve(graphed, cache) in ("module_state_changed", "replay")
    capture(graphed)
    assert serve(graphed, cache) == "replay"
    assert len(graphed.report().captures) <= 2


def test_I4_a_safe_merge_moves_the_weights():
    model = new_adapted()
    cache = attach(model)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    capture(graphed)
    model.merge_adapter(safe_merge=True)
    assert serve(graphed, cache) == "moved_address"
    capture(graphed)
    assert serve(graphed, cache) == "replay"
    assert len(graphed.report().captures) == 1


def test_I10_adapters_that_transformers_adds_itself_are_states_too():
    model = new_llama()
    try:
        model.add_adapter(lora(4, "q_proj", "v_proj"), adapter_name="a")
    except ValueError as error:  # PEFT is older than this transformers wants
        pytest.skip(str(error))
    model.add_adapter(lora(4, "q_proj", "v_proj"), adapter_name="b")
    cache = attach(model.eval())
    graphed = piecewise.compile(model, buckets=(8,), progress=False, fusions=("auto",))
    states = {
        "adapter a": lambda: (model.enable_adapters(), model.set_adapter("a")),
        "adapter b": lambda: (model.enable_adapters(), model.set_adapter("b")),
        "no adapter": model.disable_adapters,
    }
    for come in states.values():
        come()
        capture(graphed)
    for come in [*states.values(), *states.values()]:
        come()
        assert serve(graphed, cache) == "replay"
    assert [each.adapters for each in graphed.report().captures] == list(states)
