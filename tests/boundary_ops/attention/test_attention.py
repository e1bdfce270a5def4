"""`piecewise::attn_inplace` against a naive oracle that shares no code with it."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import naive_attention, naive_attn_inplace
from hypothesis import given, settings
from hypothesis import strategies as st

from boundary_ops import PagedKVCache, PrefillBatch, attn_inplace
from boundary_ops.attention.attention import attend_inplace
from boundary_ops.errors.attention import PositionsMissing, WrongArgument
from boundary_ops.errors.step import NoRunningBatch, OtherCache, WrongNumTokens

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4


def make_cache(dtype=torch.float32, kv_heads=KV_HEADS, num_blocks=32):
    return PagedKVCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        dtype=dtype,
    )


def rows(count, dtype=torch.float32, heads=HEADS, kv_heads=KV_HEADS):
    q = torch.randn(count, heads, DIM).to(dtype)
    k, v = (torch.randn(count, kv_heads, DIM).to(dtype) for _ in range(2))
    return q, k, v


def check_step(cache, batch, q, k, v, **options):
    """Runs the step, compares output and both pools with the oracle, and returns the output."""
    expected, keys, values = naive_attn_inplace(batch, q, k, v, cache.k[0], cache.v[0], **options)
    out = torch.full_like(q, float("nan"))
    with batch:
        attn_inplace(q, k, v, out, cache.k[0], cache.v[0], **options)
    tight = q.dtype == torch.float32
    torch.testing.assert_close(
        out.double(), expected, rtol=1e-5 if tight else 2e-2, atol=1e-5 if tight else 2e-2
    )
    assert torch.equal(cache.k[0], keys) and torch.equal(cache.v[0], values)
    return out


OPTIONS = [
    {},
    {"window": 1},
    {"window": 3},
    {"window": 100},
    {"softcap": 0.5},
    {"sinks": True},
    {"window": 3, "softcap": 0.5, "sinks": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_packed_and_continued_steps_match_the_oracle(options, heads):
    cache = make_cache(kv_heads=heads[1])
    options = {"scale": 0.3, **options}
    if "sinks" in options:
        options["sinks"] = torch.randn(heads[0])
    for ids, lens in (("abc", (5, 1, 9)), ("ca", (2, 6)), ("bdc", (1, 3, 1))):
        batch = PrefillBatch.build(cache, ids, lens)
        check_step(cache, batch, *rows(sum(lens), heads=heads[0], kv_heads=heads[1]), **options)
    assert cache.context_len("c") == 12 and cache.context_len("a") == 11


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 6),
    st.sampled_from([0.0, 1.5]),
    st.integers(0, 2**31),
)
def test_any_history_of_steps_matches_the_oracle(steps, window, softcap, seed):
    torch.manual_seed(seed)
    cache = make_cache(num_blocks=64)
    for lens in steps:
        batch = PrefillBatch.build(cache, range(len(lens)), lens)
        check_step(cache, batch, *rows(sum(lens)), scale=DIM**-0.5, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_half_precision_accumulates_in_float32(dtype, softcap):
    cache = make_cache(dtype)
    for lens in ((9, 3), (5, 1)):
        batch = PrefillBatch.build(cache, "ab", lens)
        q, k, v = rows(sum(lens), dtype)
        out = check_step(cache, batch, q, k, v, scale=0.3, softcap=softcap)
    # Within one rounding of the exact result: no intermediate was rounded to half precision.
    exact, _, _ = naive_attn_inplace(batch, q, k, v, cache.k[0], cache.v[0], scale=0.3, softcap=softcap)
    assert ((out.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 1e-6).all()


def test_the_oracle_itself_is_plain_softmax_attention():
    q, k, v = rows(4)
    found = naive_attention(q, k, v, scale=0.3)
    repeated = [tensor.repeat_interleave(2, dim=1).transpose(0, 1).double() for tensor in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).double(), *repeated, is_causal=True, scale=0.3
    )
    torch.testing.assert_close(found, expected.transpose(0, 1))


def test_a_window_counts_the_token_itself():
    cache, (q, k, v) = make_cache(), rows(5)
    out = torch.empty_like(q)
    with PrefillBatch.build(cache, "a", [5]):
        attn_inplace(q, k, v, out, cache.k[0], cache.v[0], 0.3, window=1)
    torch.testing.assert_close(out, v.repeat_interleave(2, dim=1))


def test_a_chunked_prefill_equals_the_whole_one():
    q, k, v = rows(11)
    whole, parts = make_cache(), make_cache()
    expected = check_step(whole, PrefillBatch.build(whole, "a", [11]), q, k, v, scale=0.3)
    found, start = [], 0
    for length in (1, 4, 6):
        part = slice(start, start + length)
        batch = PrefillBatch.build(parts, "a", [length])
        found.append(check_step(parts, batch, q[part], k[part], v[part], scale=0.3))
        start += length
    torch.testing.assert_close(torch.cat(found), expected)
    assert torch.equal(parts.gather(0, "a")[0], k) and torch.equal(parts.gather(0, "a")[1], v)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_same_step_twice_gives_the_same_bits(softcap):
    cache = make_cache()
    check_step(cache, PrefillBatch.build(cache, "ab", (5, 3)), *rows(8), scale=0.3)
    batch, (q, k, v) = PrefillBatch.build(cache, "ab", (9, 2)), rows(11)
    first, second = (check_step(cache, batch, q, k, v, scale=0.3, softcap=softcap) for _ in range(2))
    assert torch.equal(first, second)


def test_strided_arguments_give_the_same_bits_and_their_gaps_stay_untouched():
    cache = make_cache()
    batch, (q, k, v) = PrefillBatch.build(cache, "ab", (5, 3)), rows(8)
    expected = check_step(cache, batch, q, k, v, scale=0.3)
    # As a fused projection hands them over: heads of q, k and v side by side in one row.
    fused = torch.cat((q, k, v), dim=1)
    # As a transposed view of [heads, tokens, dim], the way transformers computes it.
    target = torch.full((HEADS, 12, 2 * DIM), 7.0)
    out = target.transpose(0, 1)[:8, :, :DIM]
    with batch:
        attn_inplace(
            fused[:, :HEADS],
            fused[:, HEADS : HEADS + KV_HEADS],
            fused[:, HEADS + KV_HEADS :],
            out,
            cache.k[0],
            cache.v[0],
            0.3,
        )
    assert torch.equal(out, expected)
    assert (target[:, 8:] == 7).all() and (target[:, :, DIM:] == 7).all()


def test_I2_slots_that_nobody_wrote_have_no_effect():
    clean, dirty = make_cache(), make_cache()
    for pool in (dirty.k[0], dirty.v[0]):
        pool.fill_(float("nan"))
    for lens in ((5, 3), (2, 6)):
        q, k, v = rows(8)
        results = []
        for cache in (clean, dirty):
            out = torch.empty_like(q)
            with PrefillBatch.build(cache, "ab", lens):
                attn_inplace(q, k, v, out, cache.k[0], cache.v[0], 0.3)
            results.append(out)
        assert torch.equal(*results)


def test_only_the_slots_of_the_step_are_written():
    cache = make_cache()
    cache.k[0].fill_(7)
    batch, (q, k, v) = PrefillBatch.build(cache, "ab", (5, 3)), rows(8)
    with batch:
        attn_inplace(q, k, v, torch.empty_like(q), cache.k[0], cache.v[0], 0.3)
    flat = cache.k[0].flatten(0, 1)
    others = torch.ones(len(flat), dtype=torch.bool)
    others[batch.slot_mapping] = False
    assert (flat[others] == 7).all() and torch.equal(flat[batch.slot_mapping], k)


def test_an_empty_step_runs():
    cache, (q, k, v) = make_cache(), rows(0)
    with PrefillBatch.build(cache, [], []):
        attn_inplace(q, k, v, torch.empty_like(q), cache.k[0], cache.v[0], 0.3)


def test_it_runs_in_inference_mode_and_with_grad_mode_on():
    cache, (q, k, v) = make_cache(), rows(5)
    batch, out = PrefillBatch.build(cache, "a", [5]), torch.empty_like(q)
    with batch:
        attn_inplace(q.requires_grad_(), k.requires_grad_(), v, out, cache.k[0], cache.v[0], 0.3)
        with torch.inference_mode():
            inside = torch.empty_like(q)
            attn_inplace(q, k, v, inside, cache.k[0], cache.v[0], 0.3)
    assert torch.equal(out, inside) and not cache.k[0].requires_grad and not out.requires_grad


def test_without_a_batch_it_says_what_to_do():
    cache, (q, k, v) = make_cache(), rows(5)
    with pytest.raises(NoRunningBatch, match="piecewise::attn_inplace.*with batch"):
        attn_inplace(q, k, v, torch.empty_like(q), cache.k[0], cache.v[0], 0.3)


def wrong(**changes):
    return changes


CASES = [
    (wrong(q=lambda t: t[0]), "'q'.*num_tokens, heads"),
    (wrong(k=lambda t: t[0]), "'k'"),
    (wrong(k=lambda t: t[:, :, :4]), "'k'"),
    (wrong(k=lambda t: t[:4]), "'k'"),
    (wrong(v=lambda t: t[:, :1]), "'v'"),
    (wrong(v=lambda t: t.double()), "'v'.*float64"),
    (wrong(out=lambda t: t[:4]), "'out'"),
    (wrong(out=lambda t: t.half()), "'out'.*float16"),
    (wrong(out=lambda t: t.flatten(1)), "'out'"),
    (wrong(q=lambda t: t[:, :3], out=lambda t: t[:, :3]), "'q'.*multiple of the 2"),
    (wrong(k_cache=lambda t: t.flatten(0, 1)), "'k_cache'.*block_size"),
    (wrong(v_cache=lambda t: t[..., :4]), "'v_cache'"),
    (wrong(k_cache=lambda t: t.clone()), "'k_cache'.*cache that the current PrefillBatch"),
    (wrong(v_cache=lambda t: t.clone()), "'v_cache'.*cache that the current PrefillBatch"),
    (wrong(window=-1), "'window'"),
    (wrong(softcap=-1.0), "'softcap'"),
    (wrong(softcap=float("nan")), "'softcap'"),
    (wrong(scale=float("inf")), "'scale'"),
    (wrong(sinks=torch.zeros(3)), "'sinks'.*\\[4\\]"),
    (wrong(implied_positions=True), "position_ids.*2 sequences"),
]


@pytest.mark.parametrize(("changes", "text"), CASES, ids=[text for _, text in CASES])
def test_wrong_arguments_are_named_and_nothing_is_written(changes, text):
    cache, (q, k, v) = make_cache(), rows(5)
    pools = {"k_cache": cache.k[0], "v_cache": cache.v[0]}
    arguments = {"q": q, "k": k, "v": v, "out": torch.full_like(q, 7.0), **pools, "scale": 0.3}
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    refusal = (
        OtherCache if "PrefillBatch" in text else PositionsMissing if "position" in text else WrongArgument
    )
    with pytest.raises(refusal, match=text), PrefillBatch.build(cache, "ab", (3, 2)):
        attn_inplace(**arguments)
    assert not cache.k[0].any() and not cache.v[0].any()
    assert cache.context_len("a") == 0
    if "out" not in changes:
        assert (arguments["out"] == 7).all()


def test_a_tensor_on_another_device_is_named():
    # The implementation itself: the dispatcher sends a call with a meta tensor to the fake kernel.
    cache, (q, k, v) = make_cache(), rows(5)
    with pytest.raises(WrongArgument, match="'v'.*meta"), PrefillBatch.build(cache, "a", [5]):
        attend_inplace(q, k, v.to("meta"), torch.empty_like(q), cache.k[0], cache.v[0], 0.3)


@pytest.mark.parametrize("count", [4, 6, 8])
def test_I1_rows_beyond_the_step_are_refused(count):
    cache, (q, k, v) = make_cache(), rows(count)
    with pytest.raises(WrongNumTokens, match=f"'q'.*5 tokens.*{count}"), PrefillBatch.build(cache, "a", [5]):
        attn_inplace(q, k, v, torch.empty_like(q), cache.k[0], cache.v[0], 0.3)


def test_implied_positions_are_right_for_one_new_sequence_only():
    cache, (q, k, v) = make_cache(), rows(5)
    pools = (cache.k[0], cache.v[0])
    with PrefillBatch.build(cache, "a", [5]):
        attn_inplace(q, k, v, torch.empty_like(q), *pools, 0.3, implied_positions=True)
    with (
        pytest.raises(PositionsMissing, match="context lengths \\(5,\\)"),
        PrefillBatch.build(cache, "a", [5]),
    ):
        attn_inplace(q, k, v, torch.empty_like(q), *pools, 0.3, implied_positions=True)


def test_it_is_declared_with_its_token_dims_and_its_writes():
    assert dict(attn_inplace.token_args) == {"q": 0, "k": 0, "v": 0, "out": 0}
    assert attn_inplace.mutated == ("out", "k_cache", "v_cache")
