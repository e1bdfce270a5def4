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
from piecewise.errors.api import BackendArguments, ExcludedByDynamo, NoHandle
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
    assert "no symbolic dim" in next(iter(handle.notes))


def test_one_token_is_a_graph_of_its_own_and_says_so():
    model, compiled = compiled_model()
    with torch.no_grad():
        with piecewise.capture_window():
            compiled(ids_of(5))
        check_call(model, compiled, 1)
        check_call(model, compiled, 1)
    handle = piecewise.handle(compiled)
    assert handle.stats.reasons == {FallbackReason.STATIC_TOKEN_COUNT: 2} and handle.stats.replays == 1
    assert list(handle.notes.values()) == [1], "planned once, in vain"
    assert "calls of one token run eagerly: Dynamo makes a graph of its own" in str(handle.report())


def test_a_graph_without_a_boundary_op_is_one_without_a_plan():
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = Rows()
    compiled = torch.compile(model, backend=piecewise_backend, options={"buckets": [8]}, dynamic=True)
    with torch.no_grad():
        x = torch.randn(5, HIDDEN)
        torch.testing.assert_close(compiled(x), model(x))
        handle = piecewise.handle(compiled)
        assert handle.stats.reasons == {FallbackReason.NO_GRAPH: 1}


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
    with pytest.raises(BackendArguments, match="Fix:"):
        piecewise_backend(torch.fx.GraphModule({}, torch.fx.Graph()), [], options={3: 4})
    compiled = torch.compile(Model(), backend=piecewise_backend, options={3: 4})
    with pytest.raises(Exception, match="option 3: expected the name of a setting, got int"), torch.no_grad():
        compiled(ids_of(5))


def test_a_mode_is_refused():
    compiled = torch.compile(Model(), backend=piecewise_backend, mode="max-autotune")
    with pytest.raises(Exception, match="'mode'"), torch.no_grad():
        compiled(ids_of(5))


def test_handle_of_something_else_is_an_error():
    with pytest.raises(NoHandle, match="no handle for Model"):
        piecewise.handle(Model())


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
