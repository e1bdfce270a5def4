"""transformers models with all fusions: how often each pass matches, and that results stay eager's."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from small_transformers import LAYERS, build, make_cache  # noqa: E402

import piecewise  # noqa: E402
from boundary_ops import PrefillBatch  # noqa: E402
from boundary_ops.huggingface import attach  # noqa: E402

# Per layer: norms, and those of a sum; the last norm of the model is one more of each where sums are plain.
NORMS = {"Llama": (2, 2), "Qwen3": (4, 2), "Gemma3": (6, 2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_each_pass_finds_what_the_model_has(name, dtype):
    model = build(name).to(dtype)
    cache = make_cache(model)
    attach(model, cache)
    made = piecewise.compile(model, buckets=(8, 16), progress=False, fusions=("auto",))
    example = torch.arange(5)[None]
    report = made.capture(input_ids=example + 3, position_ids=example)
    matches = dict(report.fusions.matches)
    norms, of_sums = NORMS[name]
    assert report.ok and not report.fusions.notes
    assert matches["pack_linears"] == 2 * LAYERS
    assert matches["rms_norm"] == norms * LAYERS + 1
    # The first norm of the first layer reads the embedding; the model's last one reads a sum.
    assert matches["add_rms_norm"] == of_sums * LAYERS
    assert matches["silu_and_mul"] == (0 if name == "Gemma3" else LAYERS)
    assert matches["rotary"] == 2 * LAYERS
    batch = PrefillBatch.build(cache, "ab", (5, 2))
    prompts = [torch.randint(3, 90, (length,)) for length in (5, 2)]
    with torch.no_grad(), batch:
        found = made.verify(input_ids=batch.pack(prompts), position_ids=batch.positions)
    assert found.ok, str(found)


def test_bfloat16_errors_do_not_grow():
    """Root mean square errors of the logits against float32, with and without fusions, over many tokens."""
    # oneDNN's product of bfloat16 lets NaN of padded rows reach real ones where the inner size is no multiple
    # of 32, on processors with AMX: then the op runs eagerly, and a warning says so.
    exact = build("Llama", intermediate_size=64)
    models = {"exact": exact, "unfused": copy.deepcopy(exact).bfloat16(), "fused": exact.bfloat16()}
    exact = models["exact"] = copy.deepcopy(models["fused"]).float()
    prompts = [torch.randint(3, 90, (16,)) for _ in range(8)]
    logits = {}
    for kind, model in models.items():
        cache = make_cache(model)
        attach(model, cache)
        fusions = ("auto",) if kind == "fused" else ()
        made = piecewise.compile(model, buckets=(128,), progress=False, fusions=fusions)
        example = torch.arange(5)[None]
        assert made.capture(input_ids=example + 3, position_ids=example).ok
        batch = PrefillBatch.build(cache, "abcdefgh", [16] * 8)
        with torch.no_grad(), batch:
            result = made(input_ids=batch.pack(prompts), position_ids=batch.positions).logits
        assert made.stats.replays == 1
        logits[kind] = result.double()
    errors = {kind: (logits[kind] - logits["exact"]).pow(2).mean().sqrt() for kind in ("fused", "unfused")}
    assert 0 < errors["fused"] <= 1.05 * errors["unfused"]
