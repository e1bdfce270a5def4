"""The CUDA half of `piecewise::attn_inplace` on a real device."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import check_close, exact

from boundary_ops import PagedKVCache, PrefillBatch, attn_captured, attn_inplace
from boundary_ops.attention.program import warm_up
from boundary_ops.attention.step_buffers import StepBuffers

pytestmark = pytest.mark.gpu


@pytest.fixture
def prefill():
    return pytest.importorskip("boundary_ops.attention.triton.prefill", reason="triton is not installed")


class Layer:
    """One layer's cache and options, and steps through it that are compared with float64 attention."""

    def __init__(self, heads=32, kv_heads=8, dim=128, page=64, dtype=torch.bfloat16, blocks=None, **options):
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        self.cache = PagedKVCache(
            num_layers=2,
            num_blocks=blocks or -(-4096 // page) + 16,
            block_size=page,
            num_kv_heads=kv_heads,
            head_dim=dim,
            dtype=dtype,
            device="cuda",
        )
        # What nobody wrote must have no effect.
        for pool in (*self.cache.k, *self.cache.v):
            pool.fill_(float("nan"))
        self.options = {"scale": dim**-0.5, **options}
        if options.get("sinks"):
            self.options["sinks"] = torch.randn(heads, device="cuda", dtype=dtype)

    def rows(self, count):
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        return torch.randn(count, sum(sizes), self.dim, device="cuda").to(self.dtype).split(sizes, dim=1)

    def call(self, q, k, v, out, layer=0):
        attn_inplace(q, k, v, out, self.cache.k[layer], self.cache.v[layer], **self.options)

    def step(self, ids, lens):
        batch = PrefillBatch.build(self.cache, ids, lens)
        q, k, v = self.rows(batch.num_tokens)
        expected = exact(batch, q, k, v, self.cache.k[0], self.cache.v[0], **self.options)
        pools = []
        for pool, new in ((self.cache.k[0], k), (self.cache.v[0], v)):
            pools.append(pool.clone())
            pools[-1].view(-1, self.kv_heads, self.dim)[batch.slot_mapping] = new
        memory = torch.full(
            (batch.num_tokens + 70, self.heads, self.dim), 7.0, device="cuda", dtype=self.dtype
        )
        memory[: batch.num_tokens] = float("nan")
        with batch:
            self.call(q, k, v, memory[: batch.num_tokens])
        check_close(memory[: batch.num_tokens], expected)
        for pool, wanted in zip((self.cache.k[0], self.cache.v[0]), pools, strict=True):
            assert torch.equal(pool.nan_to_num(9.0), wanted.nan_to_num(9.0))
        assert (memory[batch.num_tokens :] == 7).all()

    def history(self):
        for lens in ((130, 1, 300, 17), (64, 200, 1, 63), (5, 1, 500, 2)):
            self.step("abcd", lens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims_and_dtypes(prefill, dim, dtype):
    Layer(heads=8, kv_heads=2, dim=dim, dtype=dtype).history()


@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (9, 3), (14, 2), (71, 1), (160, 1)], ids=str)
def test_head_groups(prefill, heads):
    Layer(heads=heads[0], kv_heads=heads[1], dim=64).history()


@pytest.mark.parametrize("page", [4, 16, 24, 32, 128, 256])
def test_page_sizes(prefill, page):
    Layer(heads=8, kv_heads=2, page=page).history()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 100},
        {"window": 5000},
        {"softcap": 5.0},
        {"sinks": True},
        {"window": 70, "softcap": 30.0, "sinks": True},
        {"scale": -0.1},
    ],
    ids=str,
)
def test_options(prefill, options):
    Layer(heads=8, kv_heads=2, **options).history()


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 33, 64, 65, 127, 129, 512, 1000, 2048])
def test_sizes_of_one_sequence_and_its_next_chunk(prefill, size):
    layer = Layer()
    layer.step("a", [size])
    layer.step("a", [min(size, 300)])


def test_a_long_context(prefill):
    layer = Layer(heads=8, kv_heads=2, blocks=600)
    for length in (6000, 5000, 300, 1):
        layer.step("a", [length])


def test_many_sequences(prefill):
    layer = Layer(heads=8, kv_heads=2, page=16, blocks=600)
    for _ in range(2):
        layer.step(range(100), [1 + at * 7 % 40 for at in range(100)])


@pytest.mark.parametrize("config", ["table", "candidates"])
def test_all_block_sizes_are_right(prefill, monkeypatch, config):
    from block_sizes import candidates

    chosen = candidates(128, 2) if config == "candidates" else [None]
    for blocks in chosen:
        with monkeypatch.context() as patch:
            prefill.plans.by_key.clear()
            if blocks is not None:
                patch.setattr(prefill.plans, "config_for", lambda geometry, count, blocks=blocks: blocks)
            Layer().history()
    prefill.plans.by_key.clear()


def test_arguments_that_are_not_aligned(prefill):
    layer = Layer(heads=4, kv_heads=2, dim=64)
    batch = PrefillBatch.build(layer.cache, "ab", (70, 33))
    q, k, v = layer.rows(103)
    expected = exact(batch, q, k, v, layer.cache.k[0], layer.cache.v[0], scale=layer.options["scale"])

    def shifted(tensor):
        memory = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)[1:].view(tensor.shape)
        return memory.copy_(tensor)

    for arguments in ((shifted(q), k, v), (q, shifted(k), v), (q, k, shifted(v)), (q, k, v)):
        out = shifted(torch.full_like(q, float("nan")))
        with batch:
            layer.call(*arguments, out)
        check_close(out, expected)


def test_transposed_views(prefill):
    layer = Layer(heads=8, kv_heads=2)
    batch = PrefillBatch.build(layer.cache, "ab", (70, 33))
    q, k, v = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in layer.rows(103))
    target = torch.full((8, 110, 128), 7.0, device="cuda", dtype=layer.dtype)
    expected = exact(batch, q, k, v, layer.cache.k[0], layer.cache.v[0], **layer.options)
    with batch:
        layer.call(q, k, v, target.transpose(0, 1)[:103])
    check_close(target.transpose(0, 1)[:103], expected)
    assert (target[:, 103:] == 7).all()


def test_the_same_step_twice_gives_the_same_bits(prefill):
    layer = Layer()
    layer.step("ab", (300, 100))
    batch, (q, k, v) = PrefillBatch.build(layer.cache, "ab", (500, 77)), layer.rows(577)
    results = [torch.empty_like(q) for _ in range(5)]
    with batch:
        for out in results:
            layer.call(q, k, v, out)
    assert all(torch.equal(results[0], out) for out in results[1:])


def test_after_warm_up_nothing_compiles_synchronises_or_allocates(prefill, monkeypatch):
    layer = Layer(heads=16, kv_heads=4, dim=96)
    q, k, v = layer.rows(300)
    out = torch.empty_like(q)
    before = [pool.clone() for pool in (*layer.cache.k, *layer.cache.v)]
    state = torch.cuda.get_rng_state()
    warm_up(300, q, k, v, out, layer.cache.k[0], layer.cache.v[0], **layer.options)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for pool, former in zip((*layer.cache.k, *layer.cache.v), before, strict=True):
        assert torch.equal(pool.nan_to_num(9.0), former.nan_to_num(9.0))

    def compiled(*args):
        raise AssertionError("a program was compiled on the serving path")

    monkeypatch.setattr(prefill, "jit_launch", compiled)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids, lens in (("a", (5,)), ("ab", (100, 50)), ("a", (300,)), ("ab", (1, 1))):
            count = sum(lens)
            batch = PrefillBatch.build(layer.cache, ids, lens)
            with batch:
                layer.call(q[:count], k[:count], v[:count], out[:count], 0)
                allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
                layer.call(q[:count], k[:count], v[:count], out[:count], 1)
                assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_call_is_one_launch(prefill):
    layer = Layer()
    q, k, v = layer.rows(300)
    out = torch.empty_like(q)
    with PrefillBatch.build(layer.cache, "a", [300]):
        layer.call(q, k, v, out)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            for at in (0, 1):
                layer.call(q, k, v, out, at)
    runtime = pytest.importorskip("cuda.bindings.runtime")
    _, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    _, nodes, _ = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), count)
    kinds = [runtime.cudaGraphNodeGetType(node)[1] for node in nodes]
    kernel = runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel
    # The tiles of the step are copied once more for the capture's stream.
    assert kinds.count(kernel) == 2 and len(kinds) <= 3


def test_on_another_stream(prefill):
    layer = Layer()
    q, k, v = layer.rows(200)
    batch = PrefillBatch.build(layer.cache, "ab", (150, 50))
    expected = exact(batch, q, k, v, layer.cache.k[0], layer.cache.v[0], **layer.options)
    results = [torch.empty_like(q) for _ in range(2)]
    with batch:
        layer.call(q, k, v, results[0])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer.call(q, k, v, results[1])
        torch.cuda.current_stream().wait_stream(stream)
    check_close(results[0], expected)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 50}, {"softcap": 5.0, "sinks": True, "heads": 9, "kv_heads": 3, "dim": 64}],
    ids=str,
)
@pytest.mark.parametrize("padding", [float("nan"), 1e4])
def test_I1_a_captured_op_equals_the_eager_one_at_each_replay(prefill, options, padding):
    layer = Layer(**options)
    pools = (layer.cache.k[0], layer.cache.v[0])
    step = StepBuffers(pools, max_num_seqs=8, max_num_tokens=512, max_seq_len=2048)
    q, k, v = layer.rows(512)
    out = torch.full_like(q, 7.0)
    former = [pool.clone() for pool in pools]
    graph = torch.cuda.CUDAGraph()

    def captured():
        attn_captured(q, k, v, out, *pools, **step.tensors, **layer.options)

    captured()
    with torch.cuda.graph(graph):
        captured()
    graph.replay()
    # No sequence is loaded yet: nothing is written.
    assert (out == 7).all()
    for pool, before in zip(pools, former, strict=True):
        assert torch.equal(pool.nan_to_num(9.0), before.nan_to_num(9.0))
    for ids, lens in (
        ("a", (512,)),
        ("abc", (100, 1, 300)),
        ("abcdefgh", (1, 2, 3, 4, 50, 60, 70, 80)),
        ("b", (7,)),
    ):
        batch = PrefillBatch.build(layer.cache, ids, lens)
        count = batch.num_tokens
        for tensor in (q, k, v):
            tensor[:count].normal_()
            tensor[count:] = padding
        out.fill_(7.0)
        former = [pool.clone() for pool in pools]
        eager = torch.empty_like(out[:count])
        with batch:
            layer.call(q[:count], k[:count], v[:count], eager)
        written = [pool.clone() for pool in pools]
        for pool, before in zip(pools, former, strict=True):
            pool.copy_(before)
        step.load(batch)
        graph.replay()
        # The two may use other block sizes, so they agree to rounding.
        check_close(out[:count], eager.double())
        assert (out[count:] == 7).all()
        for pool, expected in zip(pools, written, strict=True):
            assert torch.equal(pool.nan_to_num(9.0), expected.nan_to_num(9.0))


def test_tuning_changes_speed_alone(prefill):
    from block_sizes import block_sizes, measure_block_sizes

    from boundary_ops.backends.library import AttentionCall

    layer = Layer()
    q, k, v = layer.rows(400)
    found = torch.empty_like(q)
    batch = PrefillBatch.build(layer.cache, "ab", (300, 100))
    expected = exact(batch, q, k, v, layer.cache.k[0], layer.cache.v[0], **layer.options)
    call = AttentionCall(q, k, v, found, layer.cache.k[0], layer.cache.v[0], **layer.options)
    times = measure_block_sizes(400, call, repeats=2)
    best = min(times, key=times.__getitem__)
    with block_sizes(best), batch:
        layer.call(q, k, v, found)
        (plan,) = prefill.plans.by_key.values()
        assert plan.config == best
    assert not prefill.plans.by_key
    check_close(found, expected)


def test_a_dtype_that_the_program_lacks_is_right_all_the_same(prefill):
    layer = Layer(heads=4, kv_heads=2, dim=64, dtype=torch.float64)
    batch, (q, k, v) = PrefillBatch.build(layer.cache, "ab", (30, 20)), layer.rows(50)
    expected = exact(batch, q, k, v, layer.cache.k[0], layer.cache.v[0], **layer.options)
    out = torch.empty_like(q)
    with batch:
        layer.call(q, k, v, out)
    assert ((out - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("sinks", [False, True])
def test_a_bound_call_gives_the_bits_of_a_plain_call(prefill, sinks):
    layer = Layer(**({"sinks": True} if sinks else {}))
    layer.step("abcd", (130, 1, 300, 17))
    options = (layer.options["scale"], 0, 0.0, *([layer.options["sinks"]] if sinks else []))
    pools = layer.cache.k[0], layer.cache.v[0]
    for lens in ((64, 200, 1, 63), (100, 100, 100, 28)):
        batch = PrefillBatch.build(layer.cache, "abcd", lens)
        q, k, v = layer.rows(328)
        plain, bound = (torch.zeros(328, 32, 128, device="cuda", dtype=layer.dtype) for _ in range(2))
        with batch:
            attn_inplace(q, k, v, plain, *pools, *options)
            repeated = attn_inplace.bind(q, k, v, plain, *pools, *options)
            repeated.function(q, k, v, bound, *pools, *options)
        assert torch.equal(plain, bound) and repeated.function.__name__ == "attend_again"
