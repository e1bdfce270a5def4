"""boundary="captured" on real graphs: one graph per bucket, equal results, nothing written beyond a step."""

from __future__ import annotations

import pytest
import torch
from paged_models import BUCKETS, VOCAB, kinds, new_cache, new_paged, pools_of, serve_step
from torch import nn

import boundary_ops
import piecewise
from boundary_ops import PagedKVCache, PrefillBatch
from runners.stats import FallbackReason

pytestmark = pytest.mark.gpu

STEPS = (("a", (5,)), ("ab", (1, 7)), ("ba", (4, 4)), ("b", (1,)), ("a", (3,)))


def paged(**parts):
    return new_paged(cache=new_cache(3, device="cuda"), **parts).cuda()


def captured(model, **config):
    settings = dict(buckets=BUCKETS, progress=False, boundary="captured", max_num_seqs=2, max_seq_len=20)
    graphed = piecewise.compile(model, **{**settings, **config})
    with torch.no_grad():
        report = graphed.capture(torch.arange(7, device="cuda"), torch.arange(7, device="cuda"))
    assert report.ok, str(report)
    return graphed


def test_one_graph_per_bucket_and_the_results_of_eager() -> None:
    graphed = captured(paged())
    assert graphed.report().engine == "cuda" and kinds(graphed) == ("g", 3)
    (report,) = graphed.report().captures
    assert [bucket.num_graphs for bucket in report.buckets] == [1] * len(BUCKETS)
    for pool in pools_of(graphed.model.cache):
        assert not pool.any(), "a capture leaves no trace in the cache"
    for names, lens in STEPS:
        assert serve_step(graphed, names, lens, close=1e-4) == "replay"
    assert serve_step(graphed, "cde", (1, 1, 1), close=1e-4) == "step_limit"
    for n in (1, 2, 3, 15, 16):
        assert serve_step(graphed, [f"request {n}"], (n,), close=1e-4) == "replay"
        graphed.model.cache.free(f"request {n}")


@pytest.mark.parametrize("options", [{"window": 3}, {"softcap": 2.0}], ids=str)
def test_I1_nothing_is_written_beyond_the_step(options: dict) -> None:
    graphed = captured(paged(**options))
    cache = graphed.model.cache
    for pool in pools_of(cache):
        pool.fill_(float("nan"))
    for names, lens in STEPS:
        batch = PrefillBatch.build(cache, names, lens)
        former = [pool.clone() for pool in pools_of(cache)]
        with torch.no_grad(), batch:
            found = graphed(torch.randint(0, VOCAB, (sum(lens),), device="cuda"), batch.positions[0])
        assert found.isfinite().all()
        for pool, before in zip(pools_of(cache), former, strict=True):
            rows, kept = pool.flatten(0, 1).clone(), before.flatten(0, 1)
            assert rows[batch.slot_mapping].isfinite().all()
            rows[batch.slot_mapping] = kept[batch.slot_mapping]
            assert torch.equal(rows.nan_to_num(9.0), kept.nan_to_num(9.0))
    assert graphed.stats.replays == len(STEPS)


def test_a_call_is_one_graph_launch() -> None:
    graphed = captured(paged())
    batch = PrefillBatch.build(graphed.model.cache, "ab", (5, 3))
    ids = torch.randint(0, VOCAB, (8,), device="cuda")
    with torch.no_grad(), batch:
        graphed(ids, batch.positions[0])
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            graphed(ids, batch.positions[0])
            torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("cudaGraphLaunch") == 1, counts
    # Two inputs, the metadata and the result.
    assert counts.get("cudaMemcpyAsync", 0) + counts.get("cudaLaunchKernel", 0) <= 6, counts


def test_steps_in_quick_succession_do_not_overwrite_each_others_metadata() -> None:
    """The host runs ahead of the device: staging memory must not be used again before its copy has run."""
    graphed = captured(paged())
    cache = graphed.model.cache
    steps = [PrefillBatch.build(cache, [f"request {i}"], (3 + i,)) for i in range(6)]
    inputs = [torch.randint(0, VOCAB, (batch.num_tokens,), device="cuda") for batch in steps]
    with torch.no_grad():
        expected = []
        for batch, ids in zip(steps, inputs, strict=True):
            with batch:
                expected.append(graphed.model(ids, batch.positions[0]))
        torch.cuda.synchronize()
        found = []
        torch.cuda._sleep(50_000_000)
        for _ in range(20):
            for batch, ids in zip(steps, inputs, strict=True):
                with batch:
                    found.append(graphed(ids, batch.positions[0]))
        torch.cuda.synchronize()
    for index, result in enumerate(found):
        torch.testing.assert_close(result, expected[index % 6], rtol=1e-4, atol=1e-4)
    assert graphed.stats.replays == 120


def test_I4_a_cache_that_was_replaced() -> None:
    graphed = captured(paged())
    assert serve_step(graphed, "a", (5,), close=1e-4) == "replay"
    model = graphed.model
    model.cache = new_cache(3, device="cuda")
    for index, layer in enumerate(model.layers):
        layer.k_cache, layer.v_cache = model.cache.k[index], model.cache.v[index]
    assert serve_step(graphed, "a", (5,), close=1e-4) == "moved_address"
    assert graphed.refresh().ok
    assert serve_step(graphed, "a", (3,), close=1e-4) == "replay"


def test_verify_on_real_graphs() -> None:
    graphed = captured(paged())
    batch = PrefillBatch.build(graphed.model.cache, "ab", (3, 2))
    with torch.no_grad(), batch:
        report = graphed.verify(torch.randint(0, VOCAB, (5,), device="cuda"), batch.positions[0])
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformers_model(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to("cuda", dtype).eval()
    cache = PagedKVCache.for_model(model, num_tokens=1024)
    boundary_ops.huggingface.attach(model, cache)
    graphed = piecewise.compile(
        model, buckets=[16, 64], progress=False, boundary="captured", max_num_seqs=8, max_seq_len=256
    )
    rounding = 2e-4 if dtype is torch.float32 else 0.05
    ids = torch.arange(6, device="cuda")[None]
    with torch.inference_mode():
        assert graphed.capture(input_ids=ids, position_ids=ids.clone(), logits_to_keep=1).ok
        assert kinds(graphed) == ("geg", 3)
        for names, lens in (("a", (16,)), ("ab", (5, 9)), ("cab", (20, 12, 32)), ("b", (3,))):
            batch = PrefillBatch.build(cache, names, lens)
            prompts = [torch.randint(0, 97, (length,)).tolist() for length in lens]
            call = dict(input_ids=batch.pack(prompts), position_ids=batch.positions, logits_to_keep=1)
            former = [pool.clone() for pool in pools_of(cache)]
            with batch, piecewise.eager_only():
                expected = graphed(**call).logits
            wanted = [pool.clone() for pool in pools_of(cache)]
            for pool, content in zip(pools_of(cache), former, strict=True):
                pool.copy_(content)
            with batch:
                found = graphed(**call).logits
            torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)
            for pool, content in zip(pools_of(cache), wanted, strict=True):
                torch.testing.assert_close(pool, content, rtol=rounding, atol=rounding)
    assert graphed.stats.replays == 4
    assert graphed.stats.reasons[FallbackReason.EAGER_ONLY] == 4


def test_what_the_program_cannot_run_is_captured_as_torch_operators() -> None:
    model = new_paged(cache=new_cache(2, device="cuda", dtype=torch.float64)).cuda().double()
    assert isinstance(model, nn.Module)
    graphed = captured(model)
    assert kinds(graphed) == ("g", 2)
    for names, lens in STEPS:
        assert serve_step(graphed, names, lens, close=1e-5) == "replay"
