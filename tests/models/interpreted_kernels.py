"""The attention program under triton's interpreter, on the CPU, against the naive oracle.

Not collected by name: `test_prefill.py` runs this file in a process of its own, because the interpreter is
chosen by TRITON_INTERPRET=1 as triton is imported, for the whole process.
"""

from __future__ import annotations

# First, as it is about how triton is imported.
import interpreter_fixes  # noqa: F401, I001
import pytest
import torch
from attention_oracle import naive_attn_inplace

from boundary_ops import BoundaryOpError, PagedKVCache, PrefillBatch
from boundary_ops.attention import attention, captured
from boundary_ops.attention.checks import CapturedCall
from boundary_ops.attention.program import warn_slow
from boundary_ops.attention.step_buffers import StepBuffers
from boundary_ops.attention.triton import prefill
from boundary_ops.attention.triton.configs import BlockConfig
from boundary_ops.attention.triton.launcher import is_interpreted
from boundary_ops.attention.triton.programs import prefill_program
from boundary_ops.backends.library import NAME, AttentionCall

SMALL = BlockConfig(16, 16, 4, 2)
LENGTHS = ((13, 1, 22), (5, 18, 1))


def attend(*args, **options):
    """The op as it serves a call on a CUDA device."""
    attention.attend_by_program(PrefillBatch.current(NAME), AttentionCall(*args, **options), prefill)


def attend_captured(*args, **options):
    captured.attend_by_program(CapturedCall(*args, **options), prefill)


def bind(*args):
    call = AttentionCall(*args)
    return prefill.bind(call, PagedKVCache.owner_of(call.k_cache).attention_backend, attend)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so small that a few tokens already fill several."""
    assert is_interpreted(prefill_program)
    torch.manual_seed(0)
    prefill.plans.by_key.clear()
    use_blocks(monkeypatch, SMALL)
    yield
    prefill.plans.by_key.clear()


def use_blocks(monkeypatch, config):
    prefill.plans.by_key.clear()
    monkeypatch.setattr(prefill.plans, "config_for", lambda geometry, num_tokens: config)


class Layer:
    """One layer's cache and options, and steps through it that are checked against the oracle."""

    def __init__(self, heads=4, kv_heads=2, dim=16, page=16, dtype=torch.float32, poison=True, **options):
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        self.cache = PagedKVCache(
            num_layers=1, num_blocks=24, block_size=page, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype
        )
        # What nobody wrote must have no effect.
        for pool in (self.cache.k[0], self.cache.v[0]):
            pool.fill_(float("nan") if poison else 7.0)
        self.options = {"scale": dim**-0.5, **options}
        if options.get("sinks"):
            self.options["sinks"] = torch.randn(heads)

    def rows(self, count):
        # Views of one projection, as models hand them over: strided, not copied.
        fused = torch.randn(count, (self.heads + 2 * self.kv_heads) * self.dim).to(self.dtype)
        parts = fused.split((self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim), 1)
        return [part.unflatten(1, (-1, self.dim)) for part in parts]

    def step(self, ids, lens):
        batch = PrefillBatch.build(self.cache, ids, lens)
        q, k, v = self.rows(batch.num_tokens)
        k_pool, v_pool = self.cache.k[0], self.cache.v[0]
        expected, keys, values = naive_attn_inplace(batch, q, k, v, k_pool, v_pool, **self.options)
        # Rows beyond the step belong to somebody else.
        memory = torch.full((batch.num_tokens + 3, self.heads, self.dim), 7.0, dtype=self.dtype)
        with batch:
            attend(q, k, v, memory[: batch.num_tokens], k_pool, v_pool, **self.options)
        found = memory[: batch.num_tokens]
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[self.dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(k_pool.nan_to_num(9.0), keys.nan_to_num(9.0))
        assert torch.equal(v_pool.nan_to_num(9.0), values.nan_to_num(9.0))
        assert (memory[batch.num_tokens :] == 7).all()
        return found

    def history(self):
        for lens in LENGTHS:
            self.step("abc", lens)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2), (4, 1), (18, 1)], ids=str)
def test_head_groups(heads):
    Layer(heads=heads[0], kv_heads=heads[1]).history()


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256, 8])
def test_head_dims(dim):
    Layer(dim=dim, heads=2, kv_heads=1).history()


@pytest.mark.parametrize("page", [16, 32, 256, 4, 24])
def test_page_sizes(page):
    Layer(page=page).history()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_half_precision(dtype, softcap):
    Layer(dtype=dtype, softcap=softcap).history()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 5},
        {"window": 16},
        {"window": 40},
        {"window": 1000},
        {"softcap": 0.5},
        {"softcap": 50.0},
        {"sinks": True},
        {"window": 5, "softcap": 0.5, "sinks": True},
        {"scale": -0.3},
        {"scale": 0.0},
        {"scale": 1e-30, "window": 5},
        {"scale": 3.0},
    ],
    ids=str,
)
def test_options(options):
    Layer(**options).history()


@pytest.mark.parametrize(
    "config",
    [
        BlockConfig(16, 32, 4, 2),
        BlockConfig(32, 16, 4, 2),
        BlockConfig(64, 16, 4, 2),
        BlockConfig(16, 16, 4, 2, False),
        BlockConfig(32, 64, 4, 2, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [0, 7])
def test_block_sizes(monkeypatch, config, window):
    use_blocks(monkeypatch, config)
    Layer(window=window).history()


@pytest.mark.parametrize("count", [1, 15, 16, 17, 32, 33])
def test_lengths_around_a_block(count):
    layer = Layer(heads=2, kv_heads=2)
    layer.step("a", [count])
    layer.step("a", [count])
    layer.step("ab", [1, count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", ["q", "k", "v", "qkv"])
def test_parts_of_a_packed_projection_give_the_bits_of_dense_rows(dtype, strided):
    layer = Layer(dtype=dtype)
    for lens in LENGTHS:
        count = sum(lens)
        parts = dict(zip("qkv", layer.rows(count), strict=True))
        dense = {name: part.contiguous() for name, part in parts.items()}
        assert all(part.stride(0) == 8 * layer.dim for part in parts.values())
        mixed = {name: parts[name] if name in strided else dense[name] for name in "qkv"}
        results = []
        batch = PrefillBatch.build(layer.cache, "abc", lens)
        for given in (dense, mixed):
            out = torch.empty_like(dense["q"])
            with batch:
                attend(*given.values(), out, layer.cache.k[0], layer.cache.v[0], 0.3)
            results += [out, layer.cache.k[0].clone(), layer.cache.v[0].clone()]
        for left, right in zip(results[:3], results[3:], strict=True):
            assert torch.equal(left.nan_to_num(9.0), right.nan_to_num(9.0))
    assert [plan.unsupported for plan in prefill.plans.by_key.values()] == [None] * len(prefill.plans.by_key)


def test_a_transposed_view_and_a_strided_result():
    layer = Layer()
    q, k, v = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in layer.rows(9))
    target = torch.full((layer.heads, 12, layer.dim), 7.0)
    results = []
    for out in (target.transpose(0, 1)[:9], torch.empty_like(q)):
        with PrefillBatch.build(layer.cache, "a", [9]):
            attend(q, k, v, out, layer.cache.k[0], layer.cache.v[0], 0.3)
        results.append(out)
        layer.cache.free("a")
    assert torch.equal(*results) and (target[:, 9:] == 7).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_I6_what_the_program_cannot_run_is_right_all_the_same(name):
    layer = Layer()
    q, k, v = layer.rows(9)
    arguments = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
    batch = PrefillBatch.build(layer.cache, "a", [9])
    pools = layer.cache.k[0], layer.cache.v[0]
    expected, _, _ = naive_attn_inplace(batch, q, k, v, *pools, scale=0.3)
    # Every second element: no launch reads that.
    arguments[name] = arguments[name].repeat_interleave(2, dim=2)[..., ::2]
    with batch:
        attend(**arguments, k_cache=pools[0], v_cache=pools[1], scale=0.3)
    assert [plan.unsupported for plan in prefill.plans.by_key.values()] != [None]
    torch.testing.assert_close(arguments["out"].double(), expected, rtol=1e-5, atol=1e-5)


def test_layers_of_a_step_share_its_tiles():
    layer = Layer()
    batch = PrefillBatch.build(layer.cache, "ab", (9, 20))
    arguments = layer.rows(29)
    with batch:
        for window in (0, 0, 5, 5):
            out = torch.empty_like(arguments[0])
            attend(*arguments, out, layer.cache.k[0], layer.cache.v[0], 0.3, window)
    assert len(batch.derived) == 2 and len(prefill.plans.by_key) == 2


def test_wrong_arguments_are_refused_and_nothing_is_written():
    layer = Layer(poison=False)
    q, k, v = layer.rows(9)
    pools = layer.cache.k[0], layer.cache.v[0]
    out = torch.full_like(q, 7.0)
    good = {"q": q, "k": k, "v": v, "out": out, "k_cache": pools[0], "v_cache": pools[1], "scale": 0.3}
    cases = [
        ({"k": k[:, :1]}, "'v'"),
        ({"v": v.double()}, "'v'.*float64"),
        ({"k_cache": pools[0].clone()}, "'k_cache'.*cache that the current"),
        ({"window": -1}, "'window'"),
        ({"softcap": float("nan")}, "'softcap'"),
        ({"sinks": torch.zeros(3)}, "'sinks'"),
        ({"q": q[:4], "k": k[:4], "v": v[:4], "out": out[:4]}, "'q'.*9 tokens.*4"),
        ({"implied_positions": True}, "position_ids"),
    ]
    for change, text in cases:
        # Twice: what was refused once is refused again, whatever was remembered.
        for _ in range(2):
            with pytest.raises(BoundaryOpError, match=text), PrefillBatch.build(layer.cache, "ab", (4, 5)):
                attend(**{**good, **change})
    with pytest.raises(BoundaryOpError, match="with batch"):
        attend(**good)
    assert (out == 7).all() and all((pool == 7).all() for pool in pools)


def test_an_empty_step_runs():
    layer = Layer()
    with PrefillBatch.build(layer.cache, [], []):
        q, k, v = layer.rows(0)
        attend(q, k, v, torch.empty_like(q), layer.cache.k[0], layer.cache.v[0], 0.3)


def run_captured(layer, step, arguments, padding, padded_rows):
    """The op on padded rows, lengths on the device; returns all rows of `out`, which began as 7."""
    padded = [
        torch.cat((tensor, torch.full((padded_rows - len(tensor), *tensor.shape[1:]), padding).to(tensor)))
        for tensor in arguments
    ]
    out = torch.full_like(padded[0], 7.0)
    pools = layer.cache.k[0], layer.cache.v[0]
    attend_captured(*padded, out, *pools, **step.tensors, **layer.options)
    return out


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"sinks": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("padding", [float("nan"), 1e4])
def test_I1_captured_equals_eager_and_writes_no_padded_row(options, padding):
    layer = Layer(**options)
    step = StepBuffers((*layer.cache.k, *layer.cache.v), max_num_seqs=5, max_num_tokens=64, max_seq_len=64)
    addresses = [tensor.data_ptr() for tensor in (step.cu_seqlens_q, step.slot_mapping, step.block_tables)]
    for ids, lens in (("abc", (13, 1, 22)), ("abc", (5, 18, 1)), ("d", (40,)), ("abcde", (1, 1, 1, 1, 1))):
        batch = PrefillBatch.build(layer.cache, ids, lens)
        arguments = layer.rows(batch.num_tokens)
        before = [pool.clone() for pool in (layer.cache.k[0], layer.cache.v[0])]
        eager = torch.empty_like(arguments[0])
        with batch:
            attend(*arguments, eager, layer.cache.k[0], layer.cache.v[0], **layer.options)
        after = [pool.clone() for pool in (layer.cache.k[0], layer.cache.v[0])]
        for pool, former in zip((layer.cache.k[0], layer.cache.v[0]), before, strict=True):
            pool.copy_(former)
        step.load(batch)
        out = run_captured(layer, step, arguments, padding, 64)
        assert torch.equal(out[: batch.num_tokens], eager)
        assert (out[batch.num_tokens :] == 7).all()
        for pool, expected in zip((layer.cache.k[0], layer.cache.v[0]), after, strict=True):
            assert torch.equal(pool.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert addresses == [t.data_ptr() for t in (step.cu_seqlens_q, step.slot_mapping, step.block_tables)]


def test_I8_captured_with_no_sequences_nothing_is_written():
    layer = Layer(poison=False)
    step = StepBuffers((*layer.cache.k, *layer.cache.v), max_num_seqs=3, max_num_tokens=64, max_seq_len=64)
    for loaded in (False, True):
        if loaded:
            step.load(PrefillBatch.build(layer.cache, "ab", (9, 20)))
            step.clear()
        out = run_captured(layer, step, layer.rows(48), 0.0, 48)
        assert (out == 7).all()
        assert (layer.cache.k[0] == 7).all() and (layer.cache.v[0] == 7).all()


def test_captured_rows_bound_what_is_written():
    layer = Layer(poison=False)
    step = StepBuffers((*layer.cache.k, *layer.cache.v), max_num_seqs=3, max_num_tokens=64, max_seq_len=64)
    batch = PrefillBatch.build(layer.cache, "ab", (9, 20))
    step.load(batch)
    # A step larger than the captured rows: the caller's mistake, which must not reach memory beyond them.
    memory = torch.full((40, layer.heads, layer.dim), 7.0)
    q, k, v = layer.rows(16)
    pools = layer.cache.k[0], layer.cache.v[0]
    attend_captured(q, k, v, memory[:16], *pools, **step.tensors, scale=0.3)
    assert (memory[16:] == 7).all()
    others = torch.ones(24 * 16, dtype=torch.bool)
    others[batch.slot_mapping[:16]] = False
    assert (layer.cache.k[0].flatten(0, 1)[others] == 7).all()


def test_captured_calls_that_do_not_fit_are_refused():
    layer = Layer()
    pools = layer.cache.k[0], layer.cache.v[0]
    step = StepBuffers(pools, max_num_seqs=2, max_num_tokens=16, max_seq_len=32)
    q, k, v = layer.rows(17)
    with pytest.raises(BoundaryOpError, match="17 or more.*16"):
        attend_captured(q, k, v, torch.empty_like(q), *pools, **step.tensors, scale=0.3)
    for name, wrong in (
        ("seq_lens", step.seq_lens[:1]),
        ("cu_seqlens_q", step.cu_seqlens_q.long()),
        ("block_tables", step.block_tables[:, ::2]),
    ):
        tensors = {**step.tensors, name: wrong}
        with pytest.raises(BoundaryOpError, match="argument '(cu_seqlens_q|seq_lens|block_tables)'"):
            rows = [tensor[:16] for tensor in (q, k, v, torch.empty_like(q))]
            attend_captured(*rows, *pools, **tensors, scale=0.3)


def test_what_the_program_cannot_run_is_captured_as_torch_operators():
    layer = Layer()
    pools = layer.cache.k[0], layer.cache.v[0]
    step = StepBuffers(pools, max_num_seqs=4, max_num_tokens=16, max_seq_len=32)
    batch = PrefillBatch.build(layer.cache, "ab", (9, 4))
    q, k, v = (torch.cat((rows, torch.full_like(rows[:3], float("nan")))) for rows in layer.rows(13))
    odd = q.repeat_interleave(2, dim=2)[..., ::2]
    expected, keys, values = naive_attn_inplace(batch, q[:13], k[:13], v[:13], *pools, scale=0.3)
    out = torch.full_like(q, 7.0)
    step.load(batch)
    attend_captured(odd, k, v, out, *pools, **step.tensors, scale=0.3)
    torch.testing.assert_close(out[:13].double(), expected, rtol=1e-5, atol=1e-5)
    assert (out[13:] == 7).all()
    assert torch.equal(pools[0].nan_to_num(9.0), keys.nan_to_num(9.0))
    assert torch.equal(pools[1].nan_to_num(9.0), values.nan_to_num(9.0))


def test_I8_warm_up_leaves_no_trace(monkeypatch):
    monkeypatch.undo()
    layer = Layer(
        window=5, softcap=2.0, sinks=True, poison=False, dtype=torch.float16, dim=64, heads=2, kv_heads=1
    )
    q, k, v = layer.rows(9)
    arguments = (q, k, v, torch.full_like(q, 7.0), layer.cache.k[0], layer.cache.v[0])
    prefill.plans.by_key.clear()
    prefill.plans.geometries.clear()
    state = torch.get_rng_state()
    prefill.compile_ahead(33, AttentionCall(*arguments, **layer.options))
    geometries = list(prefill.plans.geometries)
    assert [(g.heads, g.head_dim, g.window, g.softcap, g.sinks) for g in geometries] == [
        (2, 64, True, True, torch.float32)
    ]
    prefill.compile_ahead(5)  # without arguments: whatever was seen before
    assert list(prefill.plans.geometries) == geometries
    assert torch.equal(torch.get_rng_state(), state)
    assert all((tensor == 7).all() for tensor in arguments[3:])
    assert layer.cache.request_ids == ()


def test_a_bound_call_launches_what_a_plain_call_launches(monkeypatch):
    """The interpreter has no launcher, so one that notes its arguments takes its place."""
    layer = Layer(window=40, sinks=True)
    layer.step("abc", (13, 1, 22))
    batch = PrefillBatch.build(layer.cache, "abc", (5, 18, 1))
    q, k, v = layer.rows(24)
    pools = layer.cache.k[0], layer.cache.v[0]
    options = (layer.options["scale"], 40, 0.0, layer.options["sinks"])
    noted = []
    with batch:
        arguments = (q, k, v, torch.empty(24, 4, 16), *pools, *options)
        attend(*arguments)
        call = bind(*arguments)
        monkeypatch.setattr(prefill, "current_device", lambda: -1)
        plan = list(prefill.plans.by_key.values())[-1]
        plan.launches[True, 0] = (lambda *launch: noted.append(launch), ("constants",))
        attend(*arguments)
        call(*arguments)
        # Not what the program was compiled for: off the 16 bytes that all addresses are divisible by.
        moved = torch.empty(24 * 64 + 1)[1:].view(24, 4, 16)
        call(*arguments[:3], moved, *arguments[4:])
    assert len(noted) == 2 and noted[0] == noted[1]
    expected = torch.empty(24, 4, 16)
    with batch:
        plan.launches.clear()
        attend(*arguments[:3], expected, *arguments[4:])
    assert torch.equal(moved, expected)


def test_a_bound_call_refuses_what_a_plain_call_refuses():
    layer = Layer()
    batch = PrefillBatch.build(layer.cache, "a", (13,))
    q, k, v = layer.rows(13)
    pools = layer.cache.k[0], layer.cache.v[0]
    arguments = (q, k, v, torch.empty(13, 4, 16), *pools, 0.25)
    call = bind(*arguments)
    with pytest.raises(BoundaryOpError, match="running `with batch:` block"):
        call(*arguments)
    with batch, pytest.raises(BoundaryOpError, match="pool of the cache"):
        call(*arguments[:4], pools[0].clone(), pools[1], 0.25)
    with PrefillBatch.build(layer.cache, "ab", (5, 2)), pytest.raises(BoundaryOpError, match="7 tokens"):
        call(*arguments)
    assert bind(*arguments, 0, 0.0, None, True) is None
    assert bind(*(rows[:0] for rows in arguments[:4]), *arguments[4:]) is None


def test_a_bound_call_goes_to_the_back_end_of_the_running_steps_cache(monkeypatch):
    layer = Layer(poison=False)
    q, k, v = layer.rows(5)
    arguments = (q, k, v, torch.empty_like(q), layer.cache.k[0], layer.cache.v[0], 0.3)
    served, backend = [], layer.cache.attention_backend
    call = prefill.bind(AttentionCall(*arguments), backend, lambda *args: served.append("op"))
    monkeypatch.setattr(prefill, "current_device", lambda: -1)
    (plan,) = prefill.plans.by_key.values()
    for has_context in (False, True):
        plan.launches[has_context, 0] = (lambda *launch: served.append("program"), ())
    for backend, wanted in (("auto", "program"), ("torch", "op"), ("auto", "program")):
        layer.cache.attention_backend = backend
        with PrefillBatch.build(layer.cache, "a", [5]):
            call(*arguments)
        assert served.pop() == wanted and not served


def test_triton_by_name_is_not_replaced_and_auto_says_once_that_it_is(recwarn):
    layer = Layer(poison=False)
    q, k, v = layer.rows(5)
    out = torch.full((5, layer.heads, 2 * layer.dim), 7.0)[:, :, ::2]
    arguments = (q, k, v, out, layer.cache.k[0], layer.cache.v[0], 0.3)
    warn_slow.cache_clear()
    layer.cache.attention_backend = "triton"
    with (
        pytest.raises(BoundaryOpError, match="attention_backend='triton'.*\n.*no other one steps in"),
        PrefillBatch.build(layer.cache, "a", [5]),
    ):
        attend(*arguments)
    assert not recwarn and (out == 7).all() and not (layer.cache.k[0] != 7).any()
    layer.cache.attention_backend = "auto"
    for _ in range(2):
        with PrefillBatch.build(layer.cache, "a", [5]):
            attend(*arguments)
    (warned,) = recwarn
    assert "side by side" in str(warned.message) and not (out == 7).any()
