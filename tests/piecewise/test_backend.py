"""torch.compile(model, backend="piecewise"): Dynamo traces and guards, captured buckets serve the calls."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from inspection import inspect
from torch import nn

import boundary_ops
import piecewise
from piecewise.errors.analysis import NoBoundaryOp
from piecewise.errors.api import BackendArguments, BreaksApart, ExcludedByDynamo, NoHandle
from piecewise.torch_backend import piecewise_backend
from runners.stats import FallbackReason

HIDDEN, VOCAB, LAYERS = 16, 50, 2


def mix(q: torch.Tensor, out: torch.Tensor, pool: torch.Tensor) -> None:
    """Running mean over tokens, with the rows kept in the pool; computable by hand."""
    num_tokens = q.shape[0]
    pool[:num_tokens].copy_(q)
    out.copy_(q.cumsum(0) / torch.arange(1, num_tokens + 1)[:, None])


boundary_ops.define("test_backend::mix(Tensor q, Tensor(a!) out, Tensor(b!) pool) -> ()", mix)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.pool = torch.zeros(64, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x)
        out = torch.empty_like(q)
        torch.ops.test_backend.mix(q, out, self.pool)
        return x + torch.tanh(out)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x), "last": x[-1:]}

    def pools(self) -> list[torch.Tensor]:
        return [layer.pool for layer in self.layers]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_model(**options) -> tuple[Model, object]:
    model = Model().eval()
    return model, torch.compile(model, backend=piecewise_backend, options={"buckets": [8, 16], **options})


def ids_of(num_tokens: int) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (num_tokens,))
    torch._dynamo.mark_dynamic(ids, 0)
    return ids


def check_call(model: Model, compiled, num_tokens: int) -> None:
    ids = torch.randint(0, VOCAB, (num_tokens,))
    for pool in model.pools():
        pool.zero_()
    want = model(ids)
    pools = [pool.clone() for pool in model.pools()]
    for pool in model.pools():
        pool.zero_()
    got = compiled(ids)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name])
    for pool, kept in zip(model.pools(), pools, strict=True):
        torch.testing.assert_close(pool, kept)


def test_a_capture_window_captures_every_bucket_and_later_calls_replay():
    model, compiled = compiled_model()
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        handle = piecewise.handle(compiled)
        assert handle.stats.captured == (8, 16)
        for num_tokens in (2, 7, 8, 9, 15, 16):
            check_call(model, compiled, num_tokens)
    assert handle.stats.replays == 1 + 6
    assert handle.stats.calls_by_bucket == {8: 1 + 3, 16: 3}
    plan = handle.report().plans[0]
    assert plan.count("graph") == LAYERS + 1 and plan.count("boundary") == LAYERS and plan.count("eager") == 1


def test_I5_without_a_window_a_bucket_is_captured_at_its_third_call():
    model, compiled = compiled_model()
    with torch.no_grad():
        compiled(ids_of(5))
        handle = piecewise.handle(compiled)
        check_call(model, compiled, 6)
        assert handle.stats.captured == () and handle.stats.replays == 0
        check_call(model, compiled, 7)
        assert handle.stats.captured == (8,) and handle.stats.replays == 1
    assert handle.stats.reasons == {FallbackReason.NOT_CAPTURED: 2}


def test_I6_fallbacks_are_counted_and_equal_eager():
    model, compiled = compiled_model()
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        check_call(model, compiled, 17)
        with piecewise.eager_only():
            check_call(model, compiled, 6)
    check_call(model, compiled, 6)  # grad mode is on
    handle = piecewise.handle(compiled)
    assert handle.stats.reasons[FallbackReason.ABOVE_LARGEST_BUCKET] == 1
    assert handle.stats.reasons[FallbackReason.EAGER_ONLY] == 1
    assert sum(handle.stats.reasons.values()) == handle.stats.eager_calls


def test_I4_a_rebound_weight_is_noticed():
    model, compiled = compiled_model()
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        check_call(model, compiled, 6)
        model.head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN))
        check_call(model, compiled, 6)
        model.head.bias.copy_(torch.randn(VOCAB))  # in place: the graph reads the new values
        check_call(model, compiled, 6)


def test_a_static_first_trace_runs_eagerly_and_says_why():
    model, compiled = compiled_model()
    with torch.no_grad():
        check_call(model, compiled, 5)
    handle = piecewise.handle(compiled)
    assert handle.stats.reasons == {FallbackReason.STATIC_TOKEN_COUNT: 1}
    assert "no symbolic dim" in str(handle.report())


def test_one_token_replays_though_dynamo_makes_a_graph_of_its_own():
    model, compiled = compiled_model()
    handle = piecewise.handle(compiled)
    with torch.no_grad():
        check_call(model, compiled, 1)
        assert handle.stats.reasons == {FallbackReason.STATIC_TOKEN_COUNT: 1}, "no graph of several is there"
        with piecewise.capture_window():
            compiled(ids_of(5))
        check_call(model, compiled, 1)
        check_call(model, compiled, 1)
    assert handle.stats.replays == 3 and handle.stats.eager_calls == 1
    assert "calls of one token replay" in str(handle.report())


def test_one_token_that_is_another_program_runs_eagerly_and_says_so():
    class Branching(Model):
        def forward(self, ids):
            found = super().forward(ids)
            return found if ids.shape[0] > 1 else {name: x * 2 for name, x in found.items()}

    model = Branching().eval()
    compiled = torch.compile(model, backend=piecewise_backend, options={"buckets": [8]})
    handle = piecewise.handle(compiled)
    handle.capture(torch.arange(5))
    with torch.no_grad():
        check_call(model, compiled, 1)
        check_call(model, compiled, 2)
    assert handle.stats.replays == 1 and handle.stats.reasons == {FallbackReason.ONE_TOKEN_BRANCH: 1}
    assert "another program with one token" in str(handle.report())


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_model_without_a_boundary_op_is_an_error_at_each_call():
    compiled = torch.compile(Rows(), backend=piecewise_backend, options={"buckets": [8]}, dynamic=True)
    handle = piecewise.handle(compiled)
    with torch.no_grad():
        for call in (compiled, compiled, handle.capture, handle.explain):
            with pytest.raises(NoBoundaryOp, match="boundary_ops.define"):
                call(torch.randn(5, HIDDEN))
        with piecewise.eager_only():
            assert compiled(torch.ones(5, 2)).sum() == 20


def test_a_part_of_a_model_without_a_boundary_op_is_one_without_a_plan():
    class Broken(Model):
        def forward(self, ids):
            ids = ids + 0
            torch._dynamo.graph_break()
            return super().forward(ids)

    model = Broken().eval()
    options = {"buckets": [8, 16]}
    compiled = torch.compile(model, backend=piecewise_backend, options=options, dynamic=True)
    handle = piecewise.handle(compiled)
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        check_call(model, compiled, 7)
        assert handle.stats.reasons == {FallbackReason.NO_GRAPH: 2} and handle.stats.replays == 2
        for call in (handle.capture, handle.explain, handle.verify):
            with pytest.raises(BreaksApart, match="fullgraph=True"):
                call(ids_of(5))


def test_suspend_and_resume_capture_again_at_the_next_call():
    model, compiled = compiled_model()
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        handle = piecewise.handle(compiled)
        with pytest.raises(piecewise.StateError, match=r"(?s)resume\(\).*not suspended"):
            handle.resume()
        handle.suspend()
        handle.suspend()
        assert inspect(handle).pool is None and handle.stats.captured == ()
        old = weakref.ref(model.head.weight)
        check_call(model, compiled, 6)
        with piecewise.capture_window():
            check_call(model, compiled, 6)
        assert handle.stats.reasons == {FallbackReason.SUSPENDED: 2}
        assert handle.report().state == "suspended" and "suspended" in str(handle.report())
        model.head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN))
        gc.collect()
        assert old() is None, "nothing holds the weights while suspended"
        handle.resume()
        assert handle.stats.captured == ()
        plans = [signature.traced for signature in inspect(handle).signatures]
        check_call(model, compiled, 6)
        assert handle.stats.captured == (8, 16) and handle.stats.replays == 2
        check_call(model, compiled, 12)
        assert handle.stats.replays == 3
        assert [signature.traced for signature in inspect(handle).signatures] == plans, "no new trace"


def test_release_ends_a_suspension():
    model, compiled = compiled_model()
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        handle = piecewise.handle(compiled)
        handle.suspend()
        handle.release()
        for _ in range(3):
            check_call(model, compiled, 6)
        assert handle.stats.captured == (8,)


def test_a_plan_with_too_few_ops_in_graphs_is_an_error_once():
    model, compiled = compiled_model(min_coverage=0.99)  # x[-1:] is eager
    with torch.no_grad():
        with pytest.raises(piecewise.CaptureError, match=r"(?s)coverage.*consumes_token_dim.*min_coverage"):
            compiled(ids_of(5))
        check_call(model, compiled, 6)
    handle = piecewise.handle(compiled)
    assert handle.stats.reasons == {FallbackReason.LOW_COVERAGE: 1}
    assert inspect(handle).signatures == [] and inspect(handle).pool is None


def test_an_unknown_boundary_op_is_refused():
    _, compiled = compiled_model(boundary_ops=["test_backend::mixx"])
    with pytest.raises(Exception, match=r"(?s)test_backend::mixx.*did you mean"), torch.no_grad():
        compiled(ids_of(5))


def test_an_unknown_option_lists_the_valid_ones():
    _, compiled = compiled_model(bucket=[8])
    with pytest.raises(Exception, match="bucket.*nearest is buckets") as raised, torch.no_grad():
        compiled(ids_of(5))
    assert "warmup_steps" in str(raised.value)


def test_a_bucket_that_dynamos_guards_exclude_cannot_be_traced():
    class Branching(Model):
        def forward(self, ids):
            found = super().forward(ids)
            return found if ids.shape[0] <= 10 else {name: x * 2 for name, x in found.items()}

    options = {"buckets": [8, 16], "strict": True}
    compiled = torch.compile(Branching().eval(), backend=piecewise_backend, options=options)
    with pytest.raises(ExcludedByDynamo, match="bucket 16"), torch.no_grad(), piecewise.capture_window():
        compiled(ids_of(5))


def test_an_option_that_is_no_name_is_refused():
    compiled = torch.compile(Model(), backend=piecewise_backend, options={3: 4})
    with pytest.raises(BackendArguments, match="Fix:"):
        piecewise.handle(compiled)
    with (
        pytest.raises(
            Exception, match=r"'options': expected a dict with the names of settings, got \{3: 4\}"
        ),
        torch.no_grad(),
    ):
        compiled(ids_of(5))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_a_mode_is_refused_with_what_to_set_instead(mode):
    compiled = torch.compile(Model(), backend=piecewise_backend, mode=mode)
    text = rf"(?s)mode='{mode}': expected no mode.*Fix:.*'reduce-overhead'.*\"lowering\": \"inductor\""
    with pytest.raises(BackendArguments, match=text):
        piecewise.handle(compiled)
    with pytest.raises(Exception, match=text), torch.no_grad():
        compiled(ids_of(5))
    piecewise.handle(torch.compile(Model(), backend=piecewise_backend, mode="default"))


def test_settings_come_from_a_toml_file_and_options_win(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("[buckets]\nnum_tokens = [4, 8]\n[capture]\nwarmup_steps = 5\n")
    for given in (path, str(path)):
        options = {"config": given, "buckets": [8, 16]}
        config = piecewise.handle(
            torch.compile(Model(), backend=piecewise_backend, options=options)
        ).piecewise_config
        assert config.buckets == (8, 16) and config.warmup_steps == 5
    whole = piecewise.PiecewiseConfig(buckets=[4])
    compiled = torch.compile(Model(), backend=piecewise_backend, options={"config": whole})
    assert piecewise.handle(compiled).piecewise_config == whole
    for wrong, text in (
        ({"config": "nowhere.toml"}, "nowhere.toml"),
        ({"config": 3}, "path of a TOML file"),
        (str(path), '"config": "settings.toml"'),
    ):
        with pytest.raises(piecewise.ConfigError, match=text):
            piecewise.handle(torch.compile(Model(), backend=piecewise_backend, options=wrong))


def test_handle_of_something_else_is_an_error():
    for other in (Model(), torch.compile(Model(), backend="eager"), torch.compile(len, backend="eager"), 3):
        with pytest.raises(NoHandle, match=f"no handle for {type(other).__name__}"):
            piecewise.handle(other)


def test_the_backend_is_registered_by_name():
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group="torch_dynamo_backends") if point.name == "piecewise"]
    if not found:
        pytest.skip("the distribution is not installed here, only on the path")
    assert found[0].load() is piecewise_backend


def test_release_gives_the_memory_back_and_calls_stay_right():
    model, compiled = compiled_model()
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        handle = piecewise.handle(compiled)
        handle.release()
        assert handle.stats.captured == ()
        for _ in range(3):
            check_call(model, compiled, 6)
        assert handle.stats.captured == (8,)


class Scaled(Model):
    """Two floats of the model: one that a kernel takes, and one that is multiplied first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(HIDDEN), 0.5

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.embedding(ids)) * (self.scale + 1)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


def test_floats_of_the_model_that_dynamo_passes_as_tensors_stay_in_the_graph():
    model = Scaled().eval()
    compiled = torch.compile(model, backend=piecewise_backend, options={"buckets": [8]}, dynamic=True)
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(torch.arange(5))
        handle = piecewise.handle(compiled)
        check_call(model, compiled, 7)
        plan = handle.report().plans[0]
        assert handle.stats.replays == 2 and plan.count("eager") == 0 and plan.coverage == 1.0
        model.scale = 2.0
        check_call(model, compiled, 7)
        assert handle.stats.reasons == {FallbackReason.UNSEEN_SIGNATURE: 1}
        model.scale = 0.5
        check_call(model, compiled, 7)
        assert handle.stats.replays == 3


def test_I4_release_after_a_rebound_weight_captures_the_new_one():
    model, compiled = compiled_model()
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        model.head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN))
        check_call(model, compiled, 6)
        handle = piecewise.handle(compiled)
        assert handle.stats.reasons == {FallbackReason.MOVED_ADDRESS: 1}
        handle.release()
        with piecewise.capture_window():
            check_call(model, compiled, 6)
        check_call(model, compiled, 7)
        assert handle.stats.replays == 3
