"""boundary="captured": capture-safe boundary ops inside graphs, and what keeps a call from them."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from paged_models import (
    BUCKETS,
    VOCAB,
    Paged,
    capture,
    captured_paged,
    kinds,
    new_cache,
    new_paged,
    pools_of,
    serve_step,
)
from torch import nn

import boundary_ops
import piecewise
from boundary_ops import BoundaryOpError, PagedKVCache, PrefillBatch, StepMismatch
from boundary_ops.attention import captured as captured_attention
from boundary_ops.attention.step_buffers import StepBuffers
from boundary_ops.errors.declare import WrongCapturedForm
from piecewise.errors.capture import MissingCaptureLimit
from piecewise.torch_backend import handle as find_handle
from piecewise.torch_backend import piecewise_backend

# Steps of one prefill after the other: chunks of two requests, of unequal lengths, at the buckets' edges.
CHUNKS = (("a", (3,)), ("ab", (1, 3)), ("ba", (4, 4)), ("a", (1,)), ("b", (8,)), ("ab", (2, 1)))


def _total(x, out):
    out.copy_(x.cumsum(0))


total = boundary_ops.define("captured_boundary::total(Tensor x, Tensor(a!) out) -> ()", _total)


def summed(x):
    out = torch.empty_like(x)
    total(x, out)
    return x + 0.1 * out


# --- results and plans ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 3])
def test_one_graph_per_bucket_and_the_results_of_eager(num_layers):
    graphed = capture(new_paged(num_layers))
    assert kinds(graphed) == ("g", num_layers)
    (report,) = graphed.report().captures
    assert [bucket.num_graphs for bucket in report.buckets] == [1] * len(BUCKETS)
    assert graphed.report().coverage == 1.0
    assert f"{num_layers} boundary ops captured" in str(graphed.report())
    eager = capture(new_paged(num_layers), boundary="eager")
    assert kinds(eager) == ("gb" * num_layers + "g", 0)
    for names, lens in CHUNKS:
        torch.manual_seed(len(names) + lens[0])
        assert serve_step(graphed, names, lens) == "replay"
        torch.manual_seed(len(names) + lens[0])
        assert serve_step(eager, names, lens) == "replay"
        for mine, theirs in zip(pools_of(graphed.model.cache), pools_of(eager.model.cache), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert graphed.report().captures[0].serves_one_token


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_sizes_around_the_buckets_edges(n):
    graphed = captured_paged()
    expected = "replay" if n <= 16 else "above_largest_bucket"
    for pool in pools_of(graphed.model.cache):
        pool.fill_(float("nan"))  # what nobody wrote has no effect
    assert serve_step(graphed, "a", (n,)) == expected
    assert serve_step(graphed, "b", (n,)) == expected
    first, second = n // 2, n - n // 2
    if first:
        assert serve_step(graphed, "cd", (first, second)) == expected


@pytest.mark.parametrize("options", [{"window": 3}, {"softcap": 2.0}, {"window": 5, "softcap": 0.5}], ids=str)
def test_options_of_the_attention(options):
    graphed = capture(new_paged(**options))
    for names, lens in CHUNKS:
        assert serve_step(graphed, names, lens) == "replay"


def test_padded_rows_and_static_memory_have_no_effect():
    graphed = captured_paged()
    serve_step(graphed, "ab", (7, 2))
    batch = PrefillBatch.build(graphed.model.cache, "ab", (3, 2))
    ids = torch.randint(0, VOCAB, (5,))
    with batch, torch.no_grad():
        report = graphed.verify(ids, batch.positions[0])
    assert report.ok, str(report)
    (size,) = report.checks
    assert size.path == "graph" and "padding of nan" in size.runs
    assert graphed.model.cache.context_len("a") == 7, "a verification is no step"


def test_verify_finds_metadata_that_was_not_loaded(monkeypatch):
    graphed = captured_paged()
    serve_step(graphed, "a", (4,))
    monkeypatch.setattr(StepBuffers, "load", lambda self: None)
    batch = PrefillBatch.build(graphed.model.cache, "a", (3,))
    with batch, torch.no_grad():
        report = graphed.verify(torch.arange(3), batch.positions[0])
    assert not report.ok
    assert "segment 0" in str(report) or "the plan as a whole is not what the model computes" in str(report)


def test_verify_names_a_captured_op_that_is_wrong_on_padded_rows(monkeypatch):
    graphed = captured_paged()
    serve_step(graphed, "a", (4,))

    def wrong(q, *args):
        return attend(q, *args) * (2 if len(q) == 8 else 1)

    attend = captured_attention._attend_rows
    monkeypatch.setattr(captured_attention, "_attend_rows", wrong)
    batch = PrefillBatch.build(graphed.model.cache, "ab", (3, 4))
    with batch, torch.no_grad():
        difference = graphed.verify(torch.arange(7), batch.positions[0]).first_difference
    assert difference is not None and difference.segment.startswith("segment 0")
    assert difference.op == "piecewise.attn_captured.default"


def test_an_eager_slice_and_an_op_that_is_not_capture_safe_stay_outside():
    graphed = capture(new_paged(after=lambda x: x[-1:]))
    assert kinds(graphed) == ("geg", 2)
    assert serve_step(graphed, "ab", (3, 4)) == "replay"
    mixed = capture(new_paged(between=summed))
    assert kinds(mixed) == ("gbgbg", 2)
    assert "total, not captured: is not declared capture_safe" in str(mixed.report())
    assert mixed.report().plans[0].reasons() == {"not_capture_safe": 2}
    for names, lens in CHUNKS:
        assert serve_step(mixed, names, lens) == "replay"


def test_explain_shows_the_plan_of_the_setting():
    with torch.no_grad():
        example = torch.arange(7), torch.arange(7)
        graphed = piecewise.compile(
            new_paged(), buckets=[8], progress=False, boundary="captured", max_num_seqs=2, max_seq_len=20
        )
        plan = graphed.explain(*example)
    assert [segment.kind for segment in plan.segments] == ["graph"]
    assert ": 2 boundary ops captured |" in plan.to_markdown()


# --- capture leaves no trace --------------------------------------------------------------------------------


def test_I8_capture_leaves_no_trace_in_the_cache():
    model = new_paged()
    for pool in pools_of(model.cache):
        pool.normal_()
    former = [pool.clone() for pool in pools_of(model.cache)]
    random = torch.get_rng_state()
    graphed = capture(model)
    graphed.refresh()
    for pool, before in zip(pools_of(model.cache), former, strict=True):
        assert torch.equal(pool, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.cache.request_ids == ()


def test_I8_a_lazy_capture_inside_a_step_writes_that_step_alone():
    graphed = piecewise.compile(
        new_paged(), buckets=[4, 8], progress=False, capture="lazy", boundary="captured", max_num_seqs=2,
        max_seq_len=40,
    )  # fmt: skip
    found = [serve_step(graphed, "a", (lens,)) for lens in (3, 4, 3, 6, 7, 8, 3)]
    assert found == ["not_captured"] * 2 + ["replay"] + ["not_captured"] * 2 + ["replay"] * 2


# --- steps that cannot be served from graphs ------------------------------------------------------------


def test_a_step_beyond_the_bounds_runs_eagerly_and_is_counted():
    graphed = captured_paged()
    assert serve_step(graphed, "abc", (1, 1, 1)) == "step_limit"
    assert serve_step(graphed, "a", (16,)) == "replay"
    assert serve_step(graphed, "a", (3,)) == "replay"
    assert serve_step(graphed, "a", (1,)) == "step_limit", "21 tokens of 20"
    assert serve_step(graphed, "ab", (1, 2)) == "step_limit"
    assert serve_step(graphed, "bc", (1, 2)) == "replay"


def test_errors_are_those_of_the_eager_op():
    graphed, other = captured_paged(), new_cache()
    ids, positions = torch.arange(5), torch.arange(5)
    with torch.no_grad():
        with pytest.raises(BoundaryOpError, match="running `with batch:` block"):
            graphed(ids, positions)
        with PrefillBatch.build(other, "a", (5,)), pytest.raises(BoundaryOpError, match="another tensor"):
            graphed(ids, positions)
        with PrefillBatch.build(graphed.model.cache, "a", (4,)):
            with pytest.raises(BoundaryOpError, match="4 tokens"):
                graphed(ids, positions)
    assert graphed.stats.reasons == {"step_mismatch": 3} and graphed.stats.replays == 0
    assert serve_step(graphed, "b", (5,)) == "replay"


def test_I4_a_cache_that_was_replaced_is_noticed_and_captured_again():
    graphed = captured_paged()
    assert serve_step(graphed, "a", (5,)) == "replay"
    model, former = graphed.model, graphed.model.cache
    kept = [pool.clone() for pool in pools_of(former)]
    model.cache = new_cache()
    for index, layer in enumerate(model.layers):
        layer.k_cache, layer.v_cache = model.cache.k[index], model.cache.v[index]
    assert serve_step(graphed, "a", (5,)) == "moved_address"
    assert serve_step(graphed, "a", (2,)) == "moved_address"
    assert all(map(torch.equal, pools_of(former), kept)), "nothing is written to the old cache"
    assert graphed.refresh().ok
    assert serve_step(graphed, "a", (3,)) == "replay"
    assert all(map(torch.equal, pools_of(former), kept))


def test_I4_a_cache_that_was_replaced_while_suspended_is_the_one_that_steps_belong_to():
    graphed = captured_paged()
    assert serve_step(graphed, "a", (5,)) == "replay"
    graphed.suspend()
    model, former = graphed.model, pools_of(graphed.model.cache)
    model.cache = new_cache()
    for index, layer in enumerate(model.layers):
        layer.k_cache, layer.v_cache = model.cache.k[index], model.cache.v[index]
    kept = [pool.clone() for pool in former]
    assert serve_step(graphed, "a", (5,)) == "suspended"
    assert graphed.resume().ok
    assert serve_step(graphed, "a", (2,)) == "replay"
    assert all(map(torch.equal, former, kept))


def test_weights_that_moved_while_suspended_need_no_other_metadata(monkeypatch):
    graphed = captured_paged()
    graphed.suspend()
    for weight in graphed.model.parameters():
        weight.data = weight.data.clone()
    monkeypatch.setattr(StepBuffers, "__init__", None)
    assert graphed.resume().ok
    monkeypatch.undo()
    assert serve_step(graphed, "a", (2,)) == "replay"


def test_I4_a_pool_that_moves_inside_a_step_of_its_cache():
    graphed = captured_paged()
    pool = graphed.model.layers[1].k_cache
    pool.data = pool.data.clone()
    cache = graphed.model.cache
    cache.pool_addresses = frozenset(each.data_ptr() for each in (*cache.k, *cache.v))
    assert serve_step(graphed, "a", (5,)) == "moved_address"


def test_two_models_with_caches_of_their_own():
    first, second = captured_paged(), captured_paged()
    for names, lens in CHUNKS:
        assert serve_step(first, names, lens) == "replay"
        assert serve_step(second, names[::-1], lens) == "replay"


def test_two_caches_in_one_model_are_the_eager_error():
    model = new_paged()
    other = new_cache()
    model.layers[1].k_cache, model.layers[1].v_cache = other.k[1], other.v[1]
    graphed = capture(model)
    with torch.no_grad(), PrefillBatch.build(model.cache, "a", (5,)):
        with pytest.raises(BoundaryOpError, match="another tensor"):
            graphed(torch.arange(5), torch.arange(5))
    assert graphed.stats.reasons == {"step_mismatch": 1}


def test_a_cache_that_is_an_input_keeps_its_op_outside():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, k_cache, v_cache):
            q = self.first(x).unflatten(1, (2, 8))
            out = torch.empty_like(q)
            boundary_ops.attn_inplace(q, q, q, out, k_cache, v_cache, 0.3)
            return self.second(out.flatten(1))

    cache = new_cache(1)
    torch.manual_seed(0)
    graphed = piecewise.compile(
        Given().eval(), buckets=[8], progress=False, boundary="captured", max_num_seqs=2, max_seq_len=20
    )
    x = torch.randn(5, 16)
    with torch.no_grad():
        assert graphed.capture(x, cache.k[0], cache.v[0]).ok
        assert kinds(graphed) == ("gbg", 0)
        assert "not captured: its pools are not tensors of the model" in str(graphed.report())
        with PrefillBatch.build(cache, "a", (5,)):
            found = graphed(x, cache.k[0], cache.v[0])
            torch.testing.assert_close(found, graphed.model(x, cache.k[0], cache.v[0]))
    assert graphed.stats.replays == 1


# --- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["max_num_seqs", "max_seq_len"])
def test_missing_bounds_are_named(missing):
    with pytest.raises(MissingCaptureLimit) as caught:
        capture(new_paged(), **{missing: None})
    message = str(caught.value)
    assert f"expected a value of {missing}" in message and "piecewise::attn_inplace" in message
    assert f"{missing}=..." in message


def test_bounds_are_needed_only_by_ops_with_a_captured_form():
    model = nn.Sequential(nn.Linear(4, 4))
    model.forward = lambda x: summed(model[0](x))
    graphed = piecewise.compile(model, buckets=[8], progress=False, boundary="captured")
    assert graphed.capture(torch.ones(5, 4)).ok and kinds(graphed)[1] == 0


def test_ops_that_are_left_out_of_boundary_ops_are_not_rewritten():
    graphed = capture(new_paged(between=summed), boundary_ops=["piecewise::attn_inplace"])
    assert kinds(graphed)[1] == 2
    assert serve_step(graphed, "a", (5,)) == "replay"


def test_I10_an_op_in_a_graph_that_is_defined_anew_is_captured_anew():
    schema = "captured_boundary::again(Tensor x, Tensor(a!) out) -> ()"
    settings = dict(token_args={"x": 0, "out": 0}, capture_safe=True)
    again = boundary_ops.define(schema, lambda x, out: out.copy_(x * 2), **settings)

    class Again(nn.Module):
        def forward(self, x):
            x = x + 1
            out = torch.empty_like(x)
            again(x, out)
            return x + out

    graphed = piecewise.compile(Again(), buckets=[8], boundary="captured", progress=False)
    x = torch.randn(5, 3)
    with torch.no_grad():
        assert graphed.capture(x).ok
        torch.testing.assert_close(graphed(x), (x + 1) * 3)
        boundary_ops.define(schema, lambda x, out: out.copy_(x * 4), **settings)
        torch.testing.assert_close(graphed(x), (x + 1) * 5)
        assert graphed.stats.reasons == {"module_state_changed": 1}
        assert "the declaration of op 'captured_boundary::again'" in str(graphed.report())
        assert graphed.refresh().ok
        torch.testing.assert_close(graphed(x), (x + 1) * 5)
    assert graphed.stats.replays == 2


def test_the_form_must_fit_its_op():
    form = boundary_ops.attn_inplace.captured_form
    for options in ({"capture_safe": False}, {"capture_safe": True}):
        with pytest.raises(WrongCapturedForm, match="captured_form"):
            boundary_ops.register("captured_boundary::total", captured_form=form, **options)
    assert boundary_ops.lookup("captured_boundary::total") is total


# --- ops of the user's own --------------------------------------------------------------------------------


def _own(q, out, cache, lens):
    """Running sums per packed sequence, and the rows into the cache; `lens` says which rows are real."""
    row = torch.arange(q.shape[0], device=q.device)
    ends = lens.cumsum(0)
    is_real = (row < ends[-1])[:, None]
    owner = torch.searchsorted(ends, row, right=True)
    same = (owner[:, None] == owner) & (row[:, None] >= row) & is_real & is_real.T
    q = torch.where(is_real, q, 0.0)
    out.copy_(torch.where(is_real, same.to(q) @ q, out))
    cache[: q.shape[0]] = torch.where(is_real, q, cache[: q.shape[0]])


own = boundary_ops.define(
    "captured_boundary::own(Tensor q, Tensor(a!) out, Tensor(b!) cache, Tensor lens) -> ()",
    _own,
    token_args={"q": 0, "out": 0},
    capture_safe=True,
)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.cache = torch.zeros(32, 6)

    def forward(self, x, lens):
        q = self.first(x)
        out = torch.empty_like(q)
        own(q, out, self.cache, lens)
        return self.second(out)


def test_an_own_op_with_metadata_as_inputs_is_captured():
    torch.manual_seed(3)
    model = Own().eval()
    model.cache.normal_()
    former = model.cache.clone()
    graphed = piecewise.compile(model, buckets=[4, 8], progress=False, boundary="captured")
    with torch.no_grad():
        report = graphed.capture(torch.randn(6, 6), torch.tensor([2, 4, 0]))
        assert report.ok and kinds(graphed) == ("g", 1)
        assert torch.equal(model.cache, former), "capture leaves no trace"
        for lens in ((2, 1, 0), (4, 0, 0), (3, 2, 3), (1, 0, 0), (5, 1, 1)):
            x, metadata = torch.randn(sum(lens), 6), torch.tensor(lens)
            before = model.cache.clone()
            want, wanted = model(x, metadata), model.cache.clone()
            model.cache.copy_(before)
            torch.testing.assert_close(graphed(x, metadata), want)
            torch.testing.assert_close(model.cache, wanted)
        assert graphed.stats.replays == 5
        # Metadata has one shape in a graph.
        x, metadata = torch.randn(4, 6), torch.tensor([2, 2])
        torch.testing.assert_close(graphed(x, metadata), model(x, metadata))
    assert graphed.stats.reasons == {"unseen_signature": 1}


class _Scale:
    """Metadata of `scaled`: a number that Python keeps, 0 for no rows."""

    current = None

    def __init__(self):
        self.value = torch.zeros(1)

    @property
    def tensors(self):
        return {"scale": self.value}

    def mismatch(self, num_tokens):
        if _Scale.current is None:
            return StepMismatch.OTHER_STEP
        return StepMismatch.TOO_LARGE if _Scale.current > 9 else None

    def load(self):
        self.value.fill_(_Scale.current)

    def clear(self):
        self.value.zero_()


def _scaled(x, out):
    out.copy_(x * _Scale.current)


def _scaled_by_tensor(x, out, scale):
    out.copy_(torch.where(scale > 0, x * scale, out))


scaled_form = boundary_ops.define(
    "captured_boundary::scaled_form(Tensor x, Tensor(a!) out, Tensor scale) -> ()", _scaled_by_tensor,
    token_args={"x": 0, "out": 0}, capture_safe=True,
)  # fmt: skip
scaled = boundary_ops.define(
    "captured_boundary::scaled(Tensor x, Tensor(a!) out) -> ()", _scaled, token_args={"x": 0, "out": 0},
    capture_safe=True,
    captured_form=boundary_ops.CapturedForm(scaled_form, lambda limits, calls: _Scale()),
)  # fmt: skip


def test_an_own_op_with_a_captured_form(monkeypatch):
    def scale(x):
        out = torch.empty_like(x)
        scaled(x, out)
        return out

    graphed = capture(new_paged(between=scale))
    assert kinds(graphed) == ("g", 4)
    monkeypatch.setattr(_Scale, "current", 2.0)
    assert serve_step(graphed, "ab", (3, 2)) == "replay"
    monkeypatch.setattr(_Scale, "current", 3.0)
    assert serve_step(graphed, "ab", (3, 2)) == "replay"
    monkeypatch.setattr(_Scale, "current", 10.0)
    assert serve_step(graphed, "ab", (3, 2)) == "step_limit"


# --- everything else that a graphed model does ------------------------------------------------------------


def test_release_refresh_copies_and_enable():
    graphed = captured_paged()
    graphed.release()
    assert serve_step(graphed, "a", (5,)) == "released"
    with torch.no_grad():
        assert graphed.capture(torch.arange(7), torch.arange(7)).ok
    assert serve_step(graphed, "a", (5,)) == "replay"
    for copied in (copy.deepcopy(graphed), pickle.loads(pickle.dumps(graphed))):
        assert serve_step(copied, "a", (2,)) == "not_captured"
        with torch.no_grad():
            assert copied.capture(torch.arange(7), torch.arange(7)).ok
        assert serve_step(copied, "a", (2,)) == "replay"
    assert serve_step(graphed, "a", (3,)) == "replay"
    model = new_paged()
    enabled = piecewise.enable(
        model, buckets=[8], progress=False, boundary="captured", max_num_seqs=2, max_seq_len=20
    )
    with torch.no_grad():
        enabled.capture(torch.arange(7), torch.arange(7))
    assert serve_step(enabled, "a", (5,)) == "replay"
    piecewise.disable(model)


def test_threads_each_in_a_step_of_their_own():
    graphed = captured_paged()
    cache = graphed.model.cache
    batches = [PrefillBatch.build(cache, [f"request {i}"], (3 + i,)) for i in range(3)]
    inputs = [torch.randint(0, VOCAB, (batch.num_tokens,)) for batch in batches]
    with torch.no_grad():
        expected = []
        for batch, ids in zip(batches, inputs, strict=True):
            with batch:
                expected.append(graphed.model(ids, batch.positions[0]))
    wrong = []

    def serve(index):
        with torch.no_grad():
            for _ in range(10):
                with batches[index]:
                    found = graphed(inputs[index], batches[index].positions[0])
                if not torch.allclose(found, expected[index], atol=1e-5):
                    wrong.append(index)

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and graphed.stats.replays == 30


@pytest.mark.parametrize("boundary", ["captured", "eager"])
@pytest.mark.parametrize("first", [2, 3])
def test_the_torch_compile_backend(boundary, first):
    """With two tokens of "a" the first step has as many tokens as a page, and Dynamo one symbol for both."""
    model = new_paged()
    options = {
        "buckets": [8],
        "progress": False,
        "boundary": boundary,
        "max_num_seqs": 2,
        "max_seq_len": 20,
    }
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=piecewise_backend, options=options, dynamic=True)
    cache = model.cache
    with torch.no_grad():
        for step in range(5):
            batch = PrefillBatch.build(cache, "ab", (first, 2 + step % 2))
            ids = torch.randint(0, VOCAB, (batch.num_tokens,))
            with batch:
                want = model(ids, batch.positions[0])
            wanted = [pool.clone() for pool in pools_of(cache)]
            for pool in pools_of(cache):
                pool.view(-1, *pool.shape[2:])[batch.slot_mapping] = 0
            with batch:
                torch.testing.assert_close(compiled(ids, batch.positions[0]), want, rtol=1e-5, atol=1e-5)
            for pool, content in zip(pools_of(cache), wanted, strict=True):
                torch.testing.assert_close(pool, content, rtol=1e-5, atol=1e-5)
    handle = find_handle(compiled)
    assert handle.stats.replays >= 2, handle.report()
    found = [segment.kind for segment in handle.report().plans[0].segments]
    assert found == (["graph"] if boundary == "captured" else ["graph", "boundary"] * 2 + ["graph"])


def test_without_grad_mode_and_in_inference_mode():
    graphed = captured_paged()
    batch = PrefillBatch.build(graphed.model.cache, "a", (5,))
    ids = torch.arange(5)
    with batch, torch.inference_mode():
        torch.testing.assert_close(graphed(ids, batch.positions[0]), graphed.model(ids, batch.positions[0]))
    with batch:
        graphed(ids, batch.positions[0])
    assert graphed.stats.replays == 1 and graphed.stats.reasons == {"grad_enabled": 1}


def test_segments_with_captured_ops_keep_their_kernels_and_say_so():
    graphed = capture(new_paged(after=lambda x: x[-1:]), lowering="inductor", buckets=(8,))
    assert serve_step(graphed, "ab", (3, 4)) == "replay"
    assert "it holds captured boundary ops" in str(graphed.report())


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_transformers_models(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    cache = PagedKVCache.for_model(model, num_tokens=160, block_size=4)
    boundary_ops.huggingface.attach(model, cache)
    graphed = piecewise.compile(
        model, buckets=[4, 8, 16], progress=False, boundary="captured", max_num_seqs=3, max_seq_len=48
    )
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert graphed.capture(input_ids=ids, position_ids=ids.clone()).ok
        assert kinds(graphed) == ("g", 3)
        assert not any(pool.any() for pool in pools_of(cache))
        for names, lens in (("a", (5,)), ("abc", (1, 7, 2)), ("ba", (4, 4)), ("c", (1,)), ("cab", (9, 5, 2))):
            batch = PrefillBatch.build(cache, names, lens)
            prompts = [torch.randint(0, 97, (length,)) for length in lens]
            former = [pool.clone() for pool in pools_of(cache)]
            call = dict(input_ids=batch.pack(prompts), position_ids=batch.positions)
            with batch, piecewise.eager_only():
                want = graphed(**call).logits
            wanted = [pool.clone() for pool in pools_of(cache)]
            for pool, content in zip(pools_of(cache), former, strict=True):
                pool.copy_(content)
            with batch:
                torch.testing.assert_close(graphed(**call).logits, want, rtol=1e-4, atol=1e-4)
            for pool, content in zip(pools_of(cache), wanted, strict=True):
                torch.testing.assert_close(pool, content, rtol=1e-5, atol=1e-5)
        assert graphed.stats.replays == 5
        # Positions that the model makes itself are right for a fresh sequence alone: the op stays outside.
        assert graphed.capture(input_ids=ids).ok
        plan = graphed.report().plans[1]
        assert plan.count("boundary") == 3 and plan.reasons() == {"not_capturable": 3}
        assert "pass position_ids to have it captured" in str(plan)
        with PrefillBatch.build(cache, "d", (6,)):
            assert graphed(input_ids=ids).logits.isfinite().all()
    assert graphed.stats.replays == 6


def test_paged_is_what_the_fixtures_say():
    """The model attends across tokens, so that the comparisons above mean something."""
    model = new_paged()
    assert isinstance(model, Paged)
    with torch.no_grad(), PrefillBatch.build(model.cache, "a", (4,)) as batch:
        ids = torch.tensor([1, 2, 3, 4])
        one = model(ids, batch.positions[0])
        other = model(torch.tensor([5, 2, 3, 4]), batch.positions[0])
    assert (one[3] - other[3]).abs().max() > 1e-3


def test_I4_weights_that_moved_are_noticed_beside_the_graph_and_the_step_is_right_all_the_same():
    graphed = captured_paged()
    assert serve_step(graphed, "a", (5,)) == "replay"
    layer = graphed.model.layers[0]
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.randn_like(layer.qkv.weight))
    assert serve_step(graphed, "ab", (2, 3)) == "replay", "an update in place just works"
    layer.qkv.weight = nn.Parameter(torch.randn_like(layer.qkv.weight))
    assert serve_step(graphed, "ab", (3, 2)) == "moved_address"
    assert graphed.refresh().ok
    assert serve_step(graphed, "ab", (1, 4)) == "replay"


def test_fusions_leave_captured_ops_where_they_are():
    graphed = capture(new_paged(), fusions=("pack_linears",))
    assert kinds(graphed) == ("g", 2)
    for names, lens in CHUNKS:
        assert serve_step(graphed, names, lens) == "replay"
    batch = PrefillBatch.build(graphed.model.cache, "ab", (3, 2))
    with batch, torch.no_grad():
        assert graphed.verify(torch.arange(5), batch.positions[0]).ok
