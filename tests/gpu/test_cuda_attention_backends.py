"""Named back ends of the attention on a real device, against float64 attention.

FlashInfer's tests skip where it is not installed.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from attention_oracle import check_close, exact

from boundary_ops import BoundaryOpError, PagedKVCache, PrefillBatch, attn_inplace
from boundary_ops.attention import attention
from boundary_ops.attention.program import warm_up
from boundary_ops.attention.step_buffers import StepBuffers

pytestmark = pytest.mark.gpu
HISTORY = (("abcd", (130, 1, 300, 17)), ("abcd", (64, 200, 1, 63)), ("ac", (5, 500)), ("b", (1,)))


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


def new_cache(backend, *, dim=128, page=256, dtype=torch.bfloat16, kv_heads=8):
    return PagedKVCache(
        num_layers=2, num_blocks=4096 // page + 8, block_size=page, num_kv_heads=kv_heads, head_dim=dim,
        dtype=dtype, device="cuda", attention_backend=backend,
    )  # fmt: skip


def new_rows(count, cache, heads):
    sizes = (heads, cache.num_kv_heads, cache.num_kv_heads)
    q, k, v = (
        torch.randn(count, sum(sizes), cache.head_dim, device="cuda").to(cache.dtype).split(sizes, dim=1)
    )
    return q, k, v, torch.full((count, heads, cache.head_dim), float("nan"), device="cuda", dtype=cache.dtype)


def check_step(cache, ids, lens, *, heads=32, call=attn_inplace, **options):
    options = {"scale": cache.head_dim**-0.5, "window": 0, "softcap": 0.0, **options}
    batch = PrefillBatch.build(cache, ids, lens)
    q, k, v, out = new_rows(batch.num_tokens, cache, heads)
    expected = exact(batch, q, k, v, cache.k[0], cache.v[0], **options)
    with batch, torch.no_grad():
        call(q, k, v, out, cache.k[0], cache.v[0], *options.values())
    check_close(out, expected)
    for pool, new in ((cache.k[0], k), (cache.v[0], v)):
        assert torch.equal(pool.flatten(0, 1)[batch.slot_mapping], new)


def test_torch_runs_torch_operators_on_cuda(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("another back end ran")

    monkeypatch.setattr(attention, "find_program", forbidden)
    cache = new_cache("torch", page=16)
    for ids, lens in HISTORY:
        check_step(cache, ids, lens)
    q, k, v, out = new_rows(5, cache, 32)
    assert attention.bind(q, k, v, out, cache.k[0], cache.v[0], 0.1) is None
    warm_up(64, q, k, v, out, cache.k[0], cache.v[0], 0.1)


@needs_triton
def test_triton_by_name_is_the_program_or_an_error():
    cache = new_cache("triton", page=16)
    for ids, lens in HISTORY:
        check_step(cache, ids, lens)
    with pytest.raises(BoundaryOpError, match="attention_backend='triton'.*float64"):
        new_cache("triton", dtype=torch.float64)
    q, k, v, out = new_rows(5, cache, 32)
    gaps = torch.empty(5, 32, 256, device="cuda", dtype=cache.dtype)[:, :, ::2]
    with (
        pytest.raises(BoundaryOpError, match="attention_backend='triton'"),
        PrefillBatch.build(cache, "e", [5]),
    ):
        attn_inplace(q, k, v, gaps, cache.k[0], cache.v[0], 0.1)


@needs_triton
def test_a_call_bound_to_triton_goes_by_the_running_steps_cache():
    cache, other = new_cache("auto", page=16), new_cache("torch", page=16)
    check_step(cache, "a", (5,))
    q, k, v, out = new_rows(5, cache, 32)
    bound = attn_inplace.bind(q, k, v, out, cache.k[0], cache.v[0], 128**-0.5)
    check_step(cache, "b", (5,), call=bound.function)
    served = []
    original = attention.attend_by_torch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend_by_torch", lambda *a: (served.append(1), original(*a)))
        check_step(other, "a", (5,), call=bound.function)
    assert served == [1]


@needs_triton
def test_torch_by_name_is_refused_where_the_captured_op_is_triton():
    cache = new_cache("torch", page=16)
    with pytest.raises(BoundaryOpError, match="attention_backend='torch'"):
        StepBuffers(cache.k, max_num_seqs=2, max_num_tokens=8, max_seq_len=64)
    cache = new_cache("triton", page=16)
    assert StepBuffers(cache.k, max_num_seqs=2, max_num_tokens=8, max_seq_len=64).max_num_seqs == 2


@needs_flashinfer
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 100}, {"softcap": 2.0},
                                     {"window": 100, "softcap": 2.0}], ids=str)  # fmt: skip
@pytest.mark.parametrize(("dim", "page"), [(64, 16), (128, 16), (128, 256), (256, 1)])
def test_flashinfer(dim, page, options):
    cache = new_cache("flashinfer", dim=dim, page=page)
    q, k, v, out = new_rows(5, cache, 32)
    arguments = {"scale": dim**-0.5, "window": 0, "softcap": 0.0, **options}
    warm_up(64, q, k, v, out, cache.k[0], cache.v[0], *arguments.values())
    for ids, lens in HISTORY:
        check_step(cache, ids, lens, **options)


@needs_flashinfer
def test_the_same_step_twice_gives_the_same_bits_and_a_bound_call_too():
    cache = new_cache("flashinfer")
    check_step(cache, "ab", (300, 40))
    batch = PrefillBatch.build(cache, "ab", (70, 9))
    q, k, v, out = new_rows(79, cache, 32)
    arguments = (q, k, v, out, cache.k[0], cache.v[0], 128**-0.5)
    results = []
    with torch.no_grad():
        for function in (attn_inplace, attn_inplace, attn_inplace.bind(*arguments).function):
            out.fill_(float("nan"))
            with batch:
                function(*arguments)
            results.append(out.clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
