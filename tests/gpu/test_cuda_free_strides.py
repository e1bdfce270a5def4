"""On a GPU: attention reads the values of a packed projection where they lie, with the bits of dense ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inspection import inspect

import boundary_ops
import piecewise
from boundary_ops import PagedKVCache, PrefillBatch
from piecewise.cut import split

pytestmark = pytest.mark.gpu

LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 3, 8, 2, 64, 100
SIZES = dict(num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16, device="cuda")


def llama(lowering: str) -> tuple[Any, Any, PagedKVCache]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HEADS * DIM, intermediate_size=1024, num_hidden_layers=LAYERS, vocab_size=VOCAB,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda().to(torch.bfloat16).eval()
    cache = PagedKVCache(num_layers=LAYERS, num_blocks=32, block_size=16, **SIZES)
    boundary_ops.huggingface.attach(model, cache)
    made = piecewise.compile(model, buckets=(16, 64), lowering=lowering, fusions=("auto",), progress=False)
    ids, positions = torch.arange(7, device="cuda")[None], torch.arange(7, device="cuda")[None]
    with torch.no_grad():
        report = made.capture(input_ids=ids, position_ids=positions, use_cache=False)
    assert report.ok, report
    return model, made, cache


def num_nodes(made: Any) -> int:
    runners = inspect(made).runners
    return sum(runner.graph_for(64).num_ops for runner in runners)


def logits(made: Any, cache: PagedKVCache, lens: tuple[int, ...]) -> torch.Tensor:
    batch = PrefillBatch.build(cache, range(len(lens)), lens)
    ids = torch.arange(batch.num_tokens, device="cuda")[None] % VOCAB
    with torch.no_grad(), batch:
        found = made(input_ids=ids, position_ids=batch.positions, use_cache=False).logits
    for request in range(len(lens)):
        cache.free(request)
    return found


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_llama_copies_no_values(monkeypatch: pytest.MonkeyPatch, lowering: str) -> None:
    _, made, cache = llama(lowering)
    with monkeypatch.context() as patch:
        patch.setattr(split, "with_free_strides", lambda values, segments, results: tuple(values))
        _, copying, other = llama(lowering)
    fewer = num_nodes(copying) - num_nodes(made)
    print(f"{lowering}: {num_nodes(copying)} nodes with copies, {num_nodes(made)} without")
    # A compiler may make the copy in a kernel that it has anyway.
    assert fewer == LAYERS if lowering == "eager" else fewer >= 0
    for lens in ((7,), (5, 9), (30, 1, 20)):
        found, wanted = logits(made, cache, lens), logits(copying, other, lens)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        if lowering == "eager":
            assert torch.equal(found, wanted)
    assert made.stats.replays == 3
    batch = PrefillBatch.build(cache, ["v"], [11])
    with torch.no_grad(), batch:
        ids = torch.arange(11, device="cuda")[None]
        verified = made.verify(input_ids=ids, position_ids=batch.positions, use_cache=False)
    assert verified.ok, verified


@pytest.mark.parametrize("attention_backend", ["triton", "torch"])
@pytest.mark.parametrize("strided", ["v", "qkv"])
def test_rows_that_lie_apart_give_the_bits_of_dense_rows(attention_backend: str, strided: str) -> None:
    packed = torch.randn(130, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    parts = dict(zip("qkv", packed.split((HEADS, KV_HEADS, KV_HEADS), 1), strict=True))
    dense = {name: part.contiguous() for name, part in parts.items()}
    mixed = {name: parts[name] if name in strided else dense[name] for name in "qkv"}
    results = []
    for given in (dense, mixed):
        cache = PagedKVCache(
            num_layers=1, num_blocks=32, block_size=16, attention_backend=attention_backend, **SIZES
        )
        out = torch.empty_like(dense["q"])
        with PrefillBatch.build(cache, "ab", [100, 30]):
            boundary_ops.attn_inplace(*given.values(), out, cache.k[0], cache.v[0], DIM**-0.5)
        results.append((out, cache.k[0], cache.v[0]))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
