"""Real CUDA graphs: the engine's contract, and what only real graphs can break."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from runners.engines import engine_for
from runners.errors import CaptureError, PoolHasGraphs, PoolReleased, ReplayAfterReset, WorkElsewhere
from runners.piecewise_runner import BucketPhase, PiecewiseRunner

gpu = pytest.mark.gpu
SIDE = 512


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def engine() -> Any:
    return engine_for("cuda", "cuda")


@pytest.fixture
def pool(engine: Any, device: torch.device) -> Any:
    return engine.new_pool(device)


def matrix(device: torch.device, rows: int = SIDE) -> Tensor:
    return torch.randn(rows, SIDE, device=device)


def chain(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    y = torch.relu(x @ weight)
    return [y, torch.softmax(y, -1)]


def assert_nothing_is_left(stream: torch.cuda.Stream) -> None:
    """No capture mode, in CUDA or in torch: each of these fails while torch believes in a capture."""
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.randn(4, device="cuda")
    torch.cuda.get_rng_state()


@gpu
def test_a_replay_reads_its_inputs_anew(engine: Any, pool: Any, device: torch.device) -> None:
    x, weight = matrix(device), matrix(device)
    graph = engine.capture(lambda: chain(x, weight), pool=pool, segment="segment 0")
    assert graph.num_ops >= 3 and not graph.is_empty
    for _ in range(3):
        x.normal_()
        graph.replay()
        expected = chain(x, weight)
        assert all(map(torch.equal, graph.outputs, expected))
    graph.reset()
    assert graph.outputs == () and graph.is_reset
    with pytest.raises(ReplayAfterReset, match="reset"):
        graph.replay()
    graph.reset()


@gpu
def test_what_is_passed_through_stays_itself(engine: Any, pool: Any, device: torch.device) -> None:
    x, weight = matrix(device), torch.nn.Parameter(matrix(device))

    def fn() -> Sequence[Any]:
        y = x + 1
        return [x, x[:2], weight, None, 7, y, y[1:], y.view(-1)]

    graph = engine.capture(fn, pool=pool, segment="segment 0")
    graph.replay()
    inputs, leading, same, nothing, number, y, tail, flat = graph.outputs
    assert inputs is x and same is weight and nothing is None and number == 7
    assert leading.data_ptr() == x.data_ptr()
    assert y.untyped_storage()._cdata == tail.untyped_storage()._cdata == flat.untyped_storage()._cdata
    assert torch.equal(y, x + 1) and torch.equal(tail, y[1:]) and torch.equal(flat, (x + 1).view(-1))


@gpu
def test_I9_a_smaller_bucket_takes_no_memory(engine: Any, pool: Any, device: torch.device) -> None:
    weight = matrix(device)
    graphs, sizes = {}, []
    for rows in (8192, 4096, 1024, 16):
        x = torch.randn(rows, SIDE, device=device)
        pool.begin_bucket()
        first = engine.capture(lambda x=x: chain(x, weight), pool=pool, segment="segment 0")
        second = engine.capture(lambda a=first.outputs[1]: chain(a, weight), pool=pool, segment="segment 1")
        pool.end_bucket()
        graphs[rows] = x, first, second
        sizes.append(pool.allocated_bytes)
    # torch keeps requests of at most 1 MiB in segments of 2 MiB: only the last bucket makes such.
    assert sizes[0] > 0 and len(set(sizes[:3])) == 1 and sizes[3] <= sizes[0] + (4 << 20), sizes
    snapshot = torch.cuda.memory_snapshot()
    ours = [segment for segment in snapshot if tuple(segment["segment_pool_id"]) == tuple(pool._handle)]
    assert sum(segment["total_size"] for segment in ours) == sizes[3]
    assert all(block["state"] == "inactive" for segment in ours for block in segment["blocks"])
    for x, first, second in (graphs[16], graphs[8192], graphs[1024], graphs[8192], graphs[4096]):
        x.normal_()
        first.replay()
        second.replay()
        expected = chain(chain(x, weight)[1], weight)
        assert all(map(torch.equal, second.outputs, expected))
    before = torch.cuda.mem_get_info()[0]
    for _, first, second in graphs.values():
        first.reset()
        second.reset()
    pool.release()
    assert pool.allocated_bytes == 0 and torch.cuda.mem_get_info()[0] >= before + sizes[0]


@gpu
def test_I9_only_outputs_that_are_dead_are_overwritten(engine: Any, pool: Any, device: torch.device) -> None:
    """The output of segment 0 is read by segment 3; those between reuse each other's memory."""
    x = torch.randn(4096, SIDE, device=device)
    graphs = [engine.capture(lambda: [x + 1], pool=pool, segment="segment 0")]
    kept = graphs[0].outputs[0]
    addresses = set()
    for step in range(1, 6):
        last = graphs[-1].outputs[0]
        graphs.append(engine.capture(lambda a=last: [a * 2], pool=pool, segment=f"segment {step}"))
        pool.keep_only([kept, graphs[-1].outputs[0]])
        addresses.add(graphs[-1].outputs[0].data_ptr())
    last = graphs[-1].outputs[0]
    graphs.append(engine.capture(lambda a=last: [a + kept], pool=pool, segment="segment 6"))
    pool.end_bucket()
    assert kept.data_ptr() not in addresses and len(addresses) < 5
    for graph in graphs:
        graph.replay()
    assert torch.equal(graphs[-1].outputs[0], (x + 1) * 32 + (x + 1))


@gpu
def test_the_workspaces_of_cublas_are_the_pools_own(engine: Any, pool: Any, device: torch.device) -> None:
    """Whoever drops torch's workspaces, and fills what they leave, must not reach a captured matmul."""
    x, weight = (torch.randn(64, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))
    graph = engine.capture(lambda: [x @ weight.T], pool=pool, segment="segment 0")
    pool.end_bucket()
    expected = x @ weight.T
    torch._C._cuda_clearCublasWorkspaces()
    spoil = [torch.full((1 << 22,), float("nan"), device=device) for _ in range(16)]
    for _ in range(3):
        graph.replay()
        assert torch.equal(graph.outputs[0], expected)
    assert all(bool(tensor.isnan().all()) for tensor in spoil)


@gpu
def test_gc_is_off_during_a_capture_and_as_before_after_it(
    engine: Any, pool: Any, device: torch.device
) -> None:
    x = matrix(device)
    seen = []

    def fn() -> Sequence[Tensor]:
        seen.append(gc.isenabled())
        return [x * 2]

    def failing() -> Sequence[Tensor]:
        fn()
        raise ValueError("no")

    try:
        for enabled in (True, False):
            (gc.enable if enabled else gc.disable)()
            engine.capture(fn, pool=pool, segment="s")
            assert gc.isenabled() is enabled
            with pytest.raises(ValueError, match="no"):
                engine.capture(failing, pool=pool, segment="s")
            assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False] * 4


def _run_beside(work: Callable[[], None], engine: Any, pool: Any, x: Tensor) -> Any:
    """Captures while another thread does `work`, all of it in mid-capture; re-raises what fails there."""
    begun, done = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        begun.wait(30)
        try:
            work()
        except BaseException as error:
            failures.append(error)
        done.set()

    thread = threading.Thread(target=run)
    thread.start()

    def fn() -> Sequence[Tensor]:
        y = x + 1
        begun.set()
        assert done.wait(60)
        return [y * 2]

    try:
        graph = engine.capture(fn, pool=pool, segment="segment 0")
    finally:
        begun.set()
        thread.join(60)
    if failures:
        raise failures[0]
    return graph


@gpu
def test_another_thread_may_use_the_device_during_a_capture(
    engine: Any, pool: Any, device: torch.device
) -> None:
    x = matrix(device)
    made = []

    def work() -> None:
        for _ in range(5):
            # More than any cache holds, so that the driver is asked for memory.
            big = torch.full((1 << 26,), 3.0, device=device)
            made.append(torch.randn(1000, device=device).sum().item())
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                made.append((big[:10] * 2).cpu().sum().item())
            stream.synchronize()
            torch.cuda.Event().record()

    graph = _run_beside(work, engine, pool, x)
    assert len(made) == 10 and made[1] == 60.0
    x.normal_()
    graph.replay()
    assert torch.equal(graph.outputs[0], (x + 1) * 2)


@gpu
def test_a_wait_for_the_whole_device_in_another_thread(engine: Any, pool: Any, device: torch.device) -> None:
    """The driver breaks a capture, thread-local or not, when another thread waits for the whole device."""
    x = matrix(device)
    with pytest.raises((CaptureError, torch.AcceleratorError)):
        _run_beside(torch.cuda.synchronize, engine, pool, x)
    assert_nothing_is_left(torch.cuda.current_stream())
    graph = engine.capture(lambda: [(x + 1) * 2], pool=pool, segment="segment 0")
    graph.replay()
    assert torch.equal(graph.outputs[0], (x + 1) * 2)


def _fault(kind: str, x: Tensor) -> Sequence[Tensor]:
    y = x * 2
    if kind == "wait":
        torch.cuda.synchronize()
    elif kind == "item":
        y = y + y.sum().item()
    elif kind == "copy":
        y.cpu()
    elif kind == "exception":
        raise KeyError("the model's own")
    elif kind == "memory":
        torch.empty(1 << 45, dtype=torch.uint8, device=x.device)
    elif kind == "unjoined":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = y + 1
    elif kind == "stream left":
        torch.cuda.set_stream(torch.cuda.Stream())
        raise KeyError("on another stream")
    elif kind == "not a list":
        return y  # type: ignore[return-value]
    return [y]


@gpu
@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        (
            "wait",
            CaptureError,
            r"segment 3.*a wait for the device.*test_cuda_graph.py:\d+: .torch.cuda.synchron",
        ),
        ("item", CaptureError, r"segment 3.*test_cuda_graph.py:\d+: .y = y \+ y.sum\(\).item"),
        ("copy", CaptureError, r"segment 3.*test_cuda_graph.py:\d+: .y.cpu"),
        ("exception", KeyError, "the model's own"),
        ("memory", CaptureError, r"segment 3.*no memory left.*test_cuda_graph.py:\d+: .torch.empty"),
        ("unjoined", CaptureError, "segment 3.*forked from the captured one and not joined"),
        ("stream left", KeyError, "on another stream"),
        ("not a list", CaptureError, "segment 3.*a tuple or list"),
    ],
)
def test_I8_a_failed_capture_leaves_nothing(
    kind: str, error: type[Exception], says: str, engine: Any, pool: Any, device: torch.device
) -> None:
    x, weight = matrix(device), matrix(device)
    stream, random_state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    with pytest.raises(error, match=says):
        engine.capture(lambda: _fault(kind, x), pool=pool, segment="segment 3")
    pool.end_bucket()
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert pool.num_live == 0 and pool.allocated_bytes == 0
    assert_nothing_is_left(stream)
    # At most the scratch generator's numbers and a segment of a forked stream stay.
    assert torch.cuda.memory_reserved() <= reserved + (8 << 20)
    for rows in (SIDE, 64):
        leading = x[:rows].contiguous()
        graph = engine.capture(lambda a=leading: chain(a, weight), pool=pool, segment="segment 3")
        pool.end_bucket()
        graph.replay()
        assert all(map(torch.equal, graph.outputs, chain(leading, weight)))


@gpu
@pytest.mark.parametrize("kind", ["wait", "exception", "memory", "unjoined"])
def test_I8_a_failure_among_good_captures_keeps_them(
    kind: str, engine: Any, pool: Any, device: torch.device
) -> None:
    x, weight = matrix(device), matrix(device)
    good = engine.capture(lambda: chain(x, weight), pool=pool, segment="segment 0")
    pool.end_bucket()
    size = pool.allocated_bytes
    for _ in range(3):
        with pytest.raises((CaptureError, KeyError)):
            engine.capture(lambda: _fault(kind, x), pool=pool, segment="segment 1")
        pool.end_bucket()
    assert_nothing_is_left(torch.cuda.current_stream())
    assert pool.num_live == 1 and pool.allocated_bytes <= size + (32 << 20)
    x.normal_()
    good.replay()
    assert all(map(torch.equal, good.outputs, chain(x, weight)))
    good.reset()
    pool.release()
    assert pool.allocated_bytes == 0


@gpu
def test_kernels_on_another_stream_are_an_error_and_views_are_not(
    engine: Any, pool: Any, device: torch.device
) -> None:
    x, spare = matrix(device), matrix(device)

    def elsewhere() -> Sequence[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return [torch.mul(x, 3, out=spare)]

    def joined() -> Sequence[Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 3
        torch.cuda.current_stream().wait_stream(side)
        return [y]

    with pytest.raises(WorkElsewhere, match=r"segment 2, op aten.mul.*kernels that ran on another stream"):
        engine.capture(elsewhere, pool=pool, segment="segment 2")
    views = engine.capture(lambda: [x.view(-1), x.T, x.contiguous()], pool=pool, segment="segment 2")
    assert views.is_empty and views.num_ops == 0
    views.replay()
    assert views.outputs[0].data_ptr() == x.data_ptr()
    graph = engine.capture(joined, pool=pool, segment="segment 2")
    graph.replay()
    assert torch.equal(graph.outputs[0], x * 3)


@gpu
def test_a_handle_is_new_once_no_graph_is_left(engine: Any, pool: Any, device: torch.device) -> None:
    x = matrix(device)
    handles = []
    for _ in range(3):
        graph = engine.capture(lambda: [x + 1], pool=pool, segment="segment 0")
        handles.append(tuple(pool._handle))
        pool.end_bucket()
        graph.replay()
        assert torch.equal(graph.outputs[0], x + 1)
        with pytest.raises(PoolHasGraphs, match="1 still captured"):
            pool.release()
        graph.reset()
    assert len(set(handles)) == 3
    pool.release()
    pool.release()
    with pytest.raises(PoolReleased, match="released"):
        engine.capture(lambda: [x + 1], pool=pool, segment="segment 0")


@gpu
def test_a_pool_that_nobody_holds_is_gone_without_a_collection(engine: Any, device: torch.device) -> None:
    pool = engine.new_pool(device)
    x = torch.ones(4, device=device)
    graph = engine.capture(lambda: (x * 2,), pool=pool, segment="double")
    pool.end_bucket()
    graph.reset()
    pool.release()
    gone = weakref.ref(pool)
    gc.disable()
    try:
        del graph, pool
        assert gone() is None
    finally:
        gc.enable()


@gpu
def test_a_call_on_another_stream_waits_for_the_last_one(
    engine: Any, pool: Any, device: torch.device
) -> None:
    x, weight = torch.zeros(4096, SIDE, device=device), matrix(device) / SIDE
    graph = engine.capture(lambda: [torch.tanh(x @ weight)], pool=pool, segment="segment 0")
    pool.end_bucket()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for step in range(30):
        with torch.cuda.stream(streams[step % 3]):
            pool.begin_call()
            if step % 3 == 0:
                torch.cuda._sleep(2_000_000)  # the next call must not overtake this one
            x.fill_(float(step))
            graph.replay()
            found = graph.outputs[0].clone()
        expected = torch.tanh(torch.full_like(x, float(step)) @ weight)
        streams[step % 3].synchronize()
        assert torch.equal(found, expected), step


@gpu
def test_I8_captures_leave_the_generator_alone(engine: Any, pool: Any, device: torch.device) -> None:
    x = matrix(device)
    torch.cuda.manual_seed(5)
    expected = torch.randn(8, device=device)
    torch.cuda.manual_seed(5)
    graph = engine.capture(lambda: [x + 1], pool=pool, segment="segment 0")
    graph.replay()
    assert torch.equal(torch.randn(8, device=device), expected)
    assert torch.cuda.initial_seed() == 5


@gpu
def test_a_runner_closes_the_bucket_that_fails_and_serves_the_rest(
    engine: Any, pool: Any, device: torch.device
) -> None:
    weight = matrix(device)

    def segment(rows: int, x: Tensor) -> Sequence[Tensor]:
        if rows == 32:
            torch.cuda.synchronize()
        return chain(x, weight)

    runner = PiecewiseRunner(segment, name="segment 1", engine=engine, pool=pool, module_path="layers.0")
    for rows in (64, 32, 16):
        x = matrix(device, rows)
        for _ in range(3):
            runner.warm_up(rows, (x,))
        with pytest.raises(CaptureError) if rows == 32 else contextlib.nullcontext():
            runner.capture(rows, (x,))
        pool.end_bucket()
        assert all(map(torch.equal, runner(rows, x), chain(x, weight)))
    assert runner.captured == (64, 16) and runner.num_replays == 2
    state = runner.state_for(32)
    assert state.phase is BucketPhase.EAGER_ONLY and "segment 1 (layers.0)" in state.reason
    assert "a wait for the device" in state.reason
