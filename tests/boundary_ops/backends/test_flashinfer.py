"""The attention's back end: chosen by name per cache, kept to, refused by name, and never replaced."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import fake_flashinfer
import paged_models
import pytest
import torch
from attention_oracle import naive_attn_inplace
from fake_flashinfer import FakeWrapper

from boundary_ops import BoundaryOpError, PagedKVCache, PrefillBatch, attn_inplace
from boundary_ops.attention import attention, program
from boundary_ops.attention.step_buffers import StepBuffers
from boundary_ops.backends import flashinfer
from boundary_ops.errors.attention import BackendNotCaptured
from boundary_ops.errors.backends import BackendUnavailable, CallNotServed, UnknownBackend

HEADS, KV_HEADS, DIM = 4, 2, 64
LIBRARIES = ("flashinfer",)
CLOSE = 2e-2


@pytest.fixture
def libraries(monkeypatch):
    return fake_flashinfer.install(monkeypatch)


def new_cache(backend="auto", **changes):
    sizes = dict(num_layers=2, num_blocks=8, block_size=4, num_kv_heads=KV_HEADS)
    if backend == "flashinfer":
        sizes["num_blocks"] = 32
    sizes |= dict(head_dim=DIM, dtype=torch.bfloat16, attention_backend=backend, **changes)
    return PagedKVCache(**sizes)


def new_rows(count, heads=HEADS, dtype=torch.bfloat16):
    """q, k, v as views of one projection, and an `out`."""
    fused = torch.randn(count, heads + 2 * KV_HEADS, DIM).to(dtype)
    return *fused.split((heads, KV_HEADS, KV_HEADS), dim=1), torch.full((count, heads, DIM), 7.0, dtype=dtype)


def check_step(cache, ids, lens, *, layer=0, batch=None, call=attn_inplace, **options):
    batch = PrefillBatch.build(cache, ids, lens) if batch is None else batch
    options = {"scale": 0.3, **options}
    q, k, v, out = new_rows(batch.num_tokens)
    pools = (cache.k[layer], cache.v[layer])
    expected, keys, values = naive_attn_inplace(batch, q, k, v, *pools, **options)
    with batch:
        call(q, k, v, out, *pools, *options.values())
    torch.testing.assert_close(out.double(), expected, rtol=CLOSE, atol=CLOSE)
    assert torch.equal(pools[0], keys) and torch.equal(pools[1], values)


HISTORY = (("abc", (5, 1, 9)), ("ca", (2, 6)), ("bdc", (1, 3, 1)))

# --- results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 3}, {"window": 2**40}, {"softcap": 0.5},
                                     {"window": 4, "softcap": 0.5}], ids=str)  # fmt: skip
def test_flashinfer_computes_what_the_op_says_from_what_it_is_given(libraries, options):
    cache = new_cache("flashinfer")
    for ids, lens in HISTORY:
        check_step(cache, ids, lens, **{"window": 0, "softcap": 0.0, **options})
    (wrapper,) = FakeWrapper.made
    assert len(wrapper.plans) == wrapper.runs == 3


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_step_without_tokens_calls_nothing(libraries, backend):
    cache = new_cache(backend)
    q, k, v, out = new_rows(0)
    with PrefillBatch.build(cache, [], []):
        attn_inplace(q, k, v, out, cache.k[0], cache.v[0], 0.3)
    assert not FakeWrapper.made


@pytest.mark.parametrize("backend", LIBRARIES)
def test_it_runs_in_and_out_of_inference_mode(libraries, backend):
    with torch.inference_mode():
        cache = new_cache(backend)
        batch = PrefillBatch.build(cache, "ab", (3, 2))
        check_step(cache, "ab", (3, 2), batch=batch)
    check_step(cache, "ab", (3, 2), batch=batch)
    for wrapper in FakeWrapper.made:
        assert not wrapper.workspace.is_inference()


# --- FlashInfer's plans -----------------------------------------------------------------------------------


def test_one_plan_serves_a_steps_layers_of_one_kind(libraries):
    cache = new_cache("flashinfer")
    for _ in range(2):
        batch = PrefillBatch.build(cache, "ab", (3, 2))
        for layer in (0, 1):
            check_step(cache, "ab", (3, 2), layer=layer, batch=batch)
        check_step(cache, "ab", (3, 2), layer=1, batch=batch, window=2)
    assert [(len(made.plans), made.runs) for made in FakeWrapper.made] == [(2, 4), (2, 2)]
    assert FakeWrapper.made[0].workspace is FakeWrapper.made[1].workspace


def test_steps_that_take_turns_are_planned_anew_and_right(libraries):
    cache = new_cache("flashinfer")
    first, second = PrefillBatch.build(cache, "ab", (3, 2)), PrefillBatch.build(cache, "c", (7,))
    for batch in (first, second, first, second, second):
        check_step(cache, None, None, batch=batch)
    assert len(FakeWrapper.made[0].plans) == 4


def test_a_plan_that_failed_is_no_steps_plan(libraries, monkeypatch):
    cache = new_cache("flashinfer")
    batch = PrefillBatch.build(cache, "ab", (3, 2))
    check_step(cache, None, None, batch=batch)
    other = PrefillBatch.build(cache, "c", (7,))
    plan = FakeWrapper.plan

    def failing(self, *args, **kwargs):
        plan(self, *args, **kwargs)
        raise RuntimeError("no more memory")

    monkeypatch.setattr(FakeWrapper, "plan", failing)
    with pytest.raises(RuntimeError, match="no more memory"):
        check_step(cache, None, None, batch=other)
    monkeypatch.setattr(FakeWrapper, "plan", plan)
    check_step(cache, None, None, batch=batch)


# --- what cannot be chosen --------------------------------------------------------------------------------


def check_refusal(error, *words):
    text = str(error.value)
    assert text.count("\n") == 2 and "Rule:" in text and "Fix:" in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("name", ["tritn", "", None, 3, "varlen", "FLASHINFER", "flash_infer"])
def test_an_unknown_name_lists_the_names(name):
    with pytest.raises(UnknownBackend) as error:
        new_cache(name)
    check_refusal(error, "'attention_backend'", "'auto', 'triton', 'torch', 'flashinfer'", repr(name))
    if name == "flash_infer":
        check_refusal(error, "did you mean 'flashinfer'")


@pytest.mark.parametrize("name", ["triton", *LIBRARIES])
def test_a_back_end_for_cuda_is_refused_on_the_cpu(monkeypatch, name):
    fake_flashinfer.install(monkeypatch, devices=("cuda",))
    with pytest.raises(BackendUnavailable) as error:
        new_cache(name)
    check_refusal(error, f"attention_backend='{name}'", "a CUDA device", "cpu")


def test_a_library_that_is_not_there_is_named(libraries, monkeypatch):
    libraries.__version__ = "0.1.6"
    with pytest.raises(BackendUnavailable) as error:
        new_cache("flashinfer")
    check_refusal(error, "flashinfer-python 0.2", "0.1.6")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BackendUnavailable) as error:
        new_cache("flashinfer")
    check_refusal(error, "flashinfer-python 0.2 or newer", "flashinfer")


UNFIT = [
    ("flashinfer", {"head_dim": 80}, "64, 128, 256"),
    ("flashinfer", {"dtype": torch.float32}, "bfloat16 or float16"),
]


@pytest.mark.parametrize(("name", "changes", "text"), UNFIT, ids=str)
def test_pools_that_a_library_cannot_serve_are_refused(libraries, name, changes, text):
    sizes = dict(num_layers=1, num_blocks=2, num_kv_heads=2, block_size=4, head_dim=64)
    sizes |= dict(dtype=torch.float16, attention_backend=name)
    PagedKVCache(**sizes)
    with pytest.raises(BackendUnavailable) as error:
        PagedKVCache(**sizes | changes)
    check_refusal(error, f"attention_backend='{name}'", text, str(next(iter(changes.values()))))


CALLS = [
    ("flashinfer", {"sinks": torch.zeros(HEADS)}, "'sinks'"),
    ("flashinfer", {"scale": -0.3}, "'scale'"),
    ("flashinfer", {"scale": 0.0}, "'scale'"),
    ("flashinfer", {"q": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)}, "'q'"),
    ("flashinfer", {"out": lambda out: out.repeat(1, 2, 1)[:, :HEADS]}, "'out'.*contiguous"),
]


@pytest.mark.parametrize(
    ("name", "changes", "text"), CALLS, ids=[f"{name} {text}" for name, _, text in CALLS]
)
def test_a_call_that_a_library_cannot_serve_is_refused_and_nothing_is_written(libraries, name, changes, text):
    cache = new_cache(name)
    q, k, v, out = new_rows(5)
    arguments = dict(q=q, k=k, v=v, out=out, k_cache=cache.k[0], v_cache=cache.v[0], scale=0.3)
    for argument, change in changes.items():
        arguments[argument] = change(arguments[argument]) if callable(change) else change
    with pytest.raises(CallNotServed, match=text) as error, PrefillBatch.build(cache, "ab", (3, 2)):
        attn_inplace(**arguments)
    check_refusal(error, f"attention_backend='{name}'")
    assert not cache.k[0].any() and (arguments["out"] == 7).all() and cache.context_len("a") == 0


WRONG = [
    ({"k": lambda t: t[:, :1]}, "'v'|'k_cache'"),
    ({"q": lambda t: t[:4]}, "'k'"),
    ({"k_cache": lambda t: t.clone()}, "'k_cache'"),
    ({"window": -1}, "'window'"),
    ({"implied_positions": True}, "position_ids"),
]


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize(("changes", "text"), WRONG, ids=[text for _, text in WRONG])
def test_what_the_op_refuses_a_library_is_never_asked(libraries, backend, changes, text):
    cache = new_cache(backend)
    q, k, v, out = new_rows(5)
    arguments = dict(q=q, k=k, v=v, out=out, k_cache=cache.k[0], v_cache=cache.v[0], scale=0.3)
    for argument, change in changes.items():
        arguments[argument] = change(arguments[argument]) if callable(change) else change
    with pytest.raises(BoundaryOpError, match=text), PrefillBatch.build(cache, "ab", (3, 2)):
        attn_inplace(**arguments)
    assert not cache.k[0].any() and (out == 7).all()


# --- auto and torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_auto_and_torch_never_pick_a_library(libraries, backend):
    cache = new_cache(backend, block_size=256)
    for ids, lens in HISTORY:
        check_step(cache, ids, lens)
    assert not FakeWrapper.made and cache.library is None


def test_no_library_is_imported_before_it_is_named():
    # Torch itself may bring some of them, so what it loads does not count.
    code = (
        "import sys, torch; before = set(sys.modules); import boundary_ops\n"
        "boundary_ops.PagedKVCache(num_layers=1, num_blocks=1, block_size=4, num_kv_heads=1, head_dim=8,\n"
        "                          dtype=torch.float32)\n"
        "new = set(sys.modules) - before\n"
        "print(*sorted(new & {'triton', 'flashinfer'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


# --- copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("backend", ["auto", "torch", *LIBRARIES])
def test_a_copy_keeps_the_back_end_and_nothing_of_its_state(libraries, backend, copied):
    cache = new_cache(backend)
    check_step(cache, "ab", (3, 2))
    made = len(FakeWrapper.made)
    other = copied(cache)
    assert other.attention_backend == backend and f"attention_backend='{backend}'" in repr(other)
    assert (other.library is None) == (cache.library is None) and other.owns_pool(other.k[0])
    if other.library is not None:
        assert other.library is not cache.library
    assert PagedKVCache.owner_of(other.k[0]) is other and PagedKVCache.owner_of(cache.k[0]) is cache
    check_step(other, "ab", (3, 2))
    assert len(FakeWrapper.made) == 2 * made


def test_a_copy_that_comes_to_a_place_without_the_library_says_so(libraries, monkeypatch):
    saved = pickle.dumps(new_cache("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BoundaryOpError, match="attention_backend='flashinfer'"):
        pickle.loads(saved)


def test_a_pool_and_its_views_lead_to_their_cache_and_copies_of_it_do_not():
    cache = new_cache()
    for tensor in (cache.k[1], cache.v[0], cache.k[0].detach(), cache.k[0][2:].flatten()):
        assert PagedKVCache.owner_of(tensor) is cache
    for tensor in (cache.k[0].clone(), copy.deepcopy(cache.k[0]), torch.zeros(3)):
        assert PagedKVCache.owner_of(tensor) is None
    pool = cache.k[0]
    del cache
    assert PagedKVCache.owner_of(pool) is None


# --- calls that repeat, warm-up, capture ------------------------------------------------------------------


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_bound_call_is_the_librarys(libraries, backend):
    cache = new_cache(backend)
    q, k, v, out = new_rows(5)
    bound = attn_inplace.bind(q, k, v, out, cache.k[0], cache.v[0], 0.3)
    with torch.no_grad():
        for ids, lens in (("ab", (3, 2)), ("ba", (1, 4))):
            check_step(cache, ids, lens, call=bound.function)
    assert FakeWrapper.made and bound.function is not attention.attend_inplace


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_bound_call_goes_by_the_running_steps_cache(libraries, backend):
    cache, other = new_cache(backend), new_cache("torch", block_size=4)
    q, k, v, out = new_rows(5)
    bound = attn_inplace.bind(q, k, v, out, cache.k[0], cache.v[0], 0.3)
    with torch.no_grad():
        check_step(other, "ab", (3, 2), call=bound.function)
        assert not FakeWrapper.made
        with pytest.raises(BoundaryOpError, match="'k_cache'"), PrefillBatch.build(cache, "ab", (3, 2)):
            bound.function(q, k, v, out, other.k[0], other.v[0], 0.3)
        with pytest.raises(BoundaryOpError, match="'q'.*6 tokens"), PrefillBatch.build(cache, "ab", (3, 3)):
            bound.function(q, k, v, out, cache.k[0], cache.v[0], 0.3)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_torch_operators_are_not_bound(backend):
    cache = new_cache(backend)
    q, k, v, out = new_rows(5)
    assert attention.bind(q, k, v, out, cache.k[0], cache.v[0], 0.3) is None


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("backend", LIBRARIES)
def test_warm_up_calls_the_library_and_touches_nothing(libraries, backend, named):
    cache = new_cache(backend)
    q, k, v, out = new_rows(3)
    arguments = dict(q=q, k=k, v=v, out=out, k_cache=cache.k[0], v_cache=cache.v[0], scale=0.3, window=2)
    args, kwargs = ((), arguments) if named else (tuple(arguments.values()), {})
    attn_inplace.warm_up(8, *args, **kwargs)
    (wrapper,) = FakeWrapper.made
    assert [plan["heads"] for plan in wrapper.plans] == [(HEADS, KV_HEADS, DIM, 4)] and wrapper.runs == 1
    assert wrapper.planned["window"] == 2 and wrapper.planned["lists"][0].tolist() == [0, 8]
    assert not cache.k[0].any() and (out == 7).all() and cache.request_ids == ()
    # What was made then serves the steps.
    check_step(cache, "ab", (3, 2), window=2)
    assert len(FakeWrapper.made) == 1


def test_warm_up_of_a_call_on_the_cpu_launches_nothing_where_there_is_a_cuda_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(program, "find_program", lambda: pytest.fail("the call is on the CPU"))
    cache = new_cache("auto")
    q, k, v, out = new_rows(3)
    attn_inplace.warm_up(8, q, k, v, out, cache.k[0], cache.v[0], 0.3)


def test_warm_up_refuses_what_a_call_would_be_refused(libraries):
    cache = new_cache("flashinfer")
    q, k, v, out = new_rows(3)
    with pytest.raises(CallNotServed, match="'sinks'"):
        attn_inplace.warm_up(8, q, k, v, out, cache.k[0], cache.v[0], 0.3, 0, 0.0, torch.zeros(HEADS))


@pytest.fixture
def model(libraries, monkeypatch):
    """A model of two layers over a cache with a named library; its heads are smaller than real ones."""
    monkeypatch.setattr(flashinfer, "HEAD_DIMS", (paged_models.DIM,))
    sizes = dict(num_layers=2, num_blocks=32, block_size=4, num_kv_heads=2, head_dim=paged_models.DIM)
    cache = PagedKVCache(**sizes, dtype=torch.bfloat16, attention_backend="flashinfer")
    return paged_models.new_paged(cache=cache).bfloat16()


def test_graphs_around_a_named_back_end_keep_to_it(model):
    graphed = paged_models.capture(model, boundary="eager")
    warmed_up = sum(made.runs for made in FakeWrapper.made)
    assert warmed_up == len(paged_models.BUCKETS)
    for lens in ((3, 2), (1, 4), (3, 2), (8, 5)):
        assert paged_models.serve_step(graphed, "ab", lens, close=CLOSE) == "replay"
    # Two layers, each step once without graphs and once with.
    assert sum(made.runs for made in FakeWrapper.made) - warmed_up == 4 * 2 * 2


def test_a_named_library_is_refused_where_the_op_would_be_captured(model):
    with pytest.raises(BackendNotCaptured) as error:
        paged_models.capture(model, boundary="captured")
    check_refusal(error, "attention_backend='flashinfer'", "boundary='eager'")


@pytest.mark.parametrize("backend", ["auto", "torch", *LIBRARIES])
def test_step_buffers_are_for_what_the_captured_op_computes(libraries, backend):
    cache = new_cache(backend)
    bounds = dict(max_num_seqs=2, max_num_tokens=8, max_seq_len=16)
    if cache.library is None:
        assert StepBuffers([*cache.k, *cache.v], **bounds).max_num_seqs == 2
        return
    with pytest.raises(BackendNotCaptured) as error:
        StepBuffers([pool.detach() for pool in cache.k], **bounds)
    check_refusal(error, f"attention_backend='{backend}'", "boundary='eager'")
