"""The CUDA engine's logic on a stand-in for CUDA: the order of calls, and the clean-up of each failure.

The stand-in keeps a capture's state as CUDA does, and torch's account of it as two versions of torch do: one
closes it when a capture ends with an error, the other leaves it open.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401  (imported lazily by torch, and not while parts of it are replaced)
from torch import Tensor

from runners import _torch as torch_api
from runners.cuda import driver as cuda_driver
from runners.cuda.driver import StreamCapture
from runners.cuda.graph import CudaEngine
from runners.cuda.pool import CudaPool
from runners.errors import (
    ForeignAllocator,
    InsideCapture,
    OutOfDeviceMemory,
    PoolHasGraphs,
    PoolInUse,
    ReplayAfterReset,
    UnjoinedStream,
    WaitForDevice,
    WorkElsewhere,
)

DEVICE = torch.device("cuda", 0)


class Machine:
    """One CUDA stream, torch's allocator and its default generator, as far as a capture touches them."""

    def __init__(self, *, closes_account_on_error: bool) -> None:
        self.closes_account_on_error = closes_account_on_error
        self.status = StreamCapture.NONE
        self.unjoined = False
        self.num_nodes = 3
        self.open_accounts = 0  # captures that torch's allocator believes in
        self.holds: dict[Any, int] = {}  # by pool handle
        self.generator: Any = "the user's"
        self.num_handles = 0
        self.num_syncs = 0

    def new_handle(self) -> tuple[int, int]:
        self.num_handles += 1
        return 0, self.num_handles

    def end(self) -> None:
        """cudaStreamEndCapture."""
        status, self.status = self.status, StreamCapture.NONE
        if status is StreamCapture.INVALIDATED:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if self.unjoined:
            self.unjoined = False
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    def restart(self, stream: int) -> None:
        self.status, self.unjoined = StreamCapture.ACTIVE, False

    def drop(self, stream: int) -> None:
        self.status, self.unjoined = StreamCapture.NONE, False

    def release_pool(self, index: int, handle: Any) -> None:
        self.holds[handle] -= 1

    def synchronize(self, device: Any = None) -> None:
        self.num_syncs += 1
        if self.status is not StreamCapture.NONE:
            self.status = StreamCapture.INVALIDATED
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Graph:
    """`torch.cuda.CUDAGraph` on a `Machine`."""

    machine: Machine

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph
        self.is_open = self.is_ended = False
        self.handle: Any = None
        self.num_replays = 0

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local" and not gc.isenabled()
        assert self.machine.generator != "the user's", "the capture would put it into capture mode"
        self.handle, self.is_open = pool, True
        self.machine.open_accounts += 1
        self.machine.holds[pool] = self.machine.holds.get(pool, 0) + 1
        self.machine.status = StreamCapture.ACTIVE

    def capture_end(self) -> None:
        def close() -> None:
            if not self.is_open:
                raise RuntimeError("capture_end() called before capture_begin().")
            self.is_open = False
            self.machine.open_accounts -= 1

        try:
            self.machine.end()
        except RuntimeError:
            if self.machine.closes_account_on_error:
                close()
            raise
        close()
        self.is_ended = True

    def instantiate(self) -> None:
        assert self.is_ended

    def raw_cuda_graph(self) -> int:
        return 1

    def pool(self) -> Any:
        if not self.is_ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.handle

    def replay(self) -> None:
        self.num_replays += 1

    def reset(self) -> None:
        if self.is_ended:
            self.machine.holds[self.handle] -= 1
        self.is_ended = False


class Stream:
    cuda_stream = 11

    def __init__(self, device: Any = None) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other)


class Generator:
    """Whose state the default generator can be given."""

    def __init__(self, device: Any = None) -> None:
        pass


@pytest.fixture(params=[True, False], ids=["account closed on error", "account left open"])
def machine(request: Any, monkeypatch: Any) -> Machine:
    if torch.cuda.is_available():
        pytest.skip("replaces torch.cuda, which is in use here")
    made = Machine(closes_account_on_error=request.param)
    monkeypatch.setattr(Graph, "machine", made, raising=False)

    class Default:
        def graphsafe_get_state(self) -> Any:
            return made.generator

        def graphsafe_set_state(self, state: Any) -> None:
            made.generator = state

    @contextlib.contextmanager
    def block(*args: Any) -> Any:
        yield

    cuda = dict(
        CUDAGraph=Graph, Stream=Stream, device=block, stream=block, current_stream=Stream,
        set_stream=lambda stream: None, synchronize=made.synchronize, empty_cache=lambda: None,
        mem_get_info=lambda device=None: (100, 200), graph_pool_handle=made.new_handle,
        default_generators=[Default()], current_blas_handle=lambda: 0,
        memory_snapshot=lambda: [
            dict(address=0, total_size=1 << 62, segment_pool_id=(0, number), device=0)
            for number in range(1, made.num_handles + 1)
        ],
    )  # fmt: skip
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    inner = dict(
        _CUDAGraph=Graph, _cuda_clearCublasWorkspaces=lambda: None, _cuda_releasePool=made.release_pool,
    )  # fmt: skip
    for name, value in inner.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch_api, "current_raw_stream", lambda index: 11)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(cuda_driver, "capture_status", lambda stream: made.status)
    monkeypatch.setattr(cuda_driver, "restart_capture", made.restart)
    monkeypatch.setattr(cuda_driver, "end_capture", made.drop)
    monkeypatch.setattr(cuda_driver, "num_nodes", lambda graph: made.num_nodes)
    return made


def assert_clean(machine: Machine, *, num_live: int = 0) -> None:
    assert machine.status is StreamCapture.NONE
    assert machine.open_accounts == 0
    assert sum(machine.holds.values()) == num_live
    assert machine.generator == "the user's"
    assert gc.isenabled()


def test_a_capture_leaves_modes_as_they_were_and_hands_out_aliases(machine: Machine) -> None:
    pool, x = CudaPool(DEVICE), torch.randn(4)
    graph = CudaEngine().capture(lambda: [x * 2, 5, None], pool=pool, segment="segment 0")
    assert_clean(machine, num_live=1)
    assert graph.num_ops == 3 and len(pool.book) == 1
    doubled, number, nothing = graph.outputs
    assert torch.equal(doubled, x * 2) and number == 5 and nothing is None
    graph.replay()
    graph.reset()
    assert graph.outputs == () and pool.num_live == 0
    with pytest.raises(ReplayAfterReset, match="reset"):
        graph.replay()
    pool.release()
    assert_clean(machine)


class ModelError(Exception):
    """An error of the model's own."""


def failing(kind: str, machine: Machine) -> list[Tensor]:
    y = torch.ones(3) * 2
    if kind == "wait":
        torch.cuda.synchronize()
    elif kind == "swallowed wait":
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
    elif kind == "unjoined":
        machine.unjoined = True
    elif kind == "unjoined and an error":
        machine.unjoined = True
        raise ModelError("no")
    elif kind == "error":
        raise ModelError("no")
    elif kind == "interrupt":
        raise KeyboardInterrupt
    elif kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
    return [y]


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("wait", WaitForDevice, r"a wait for the device.*test_cuda_captures.py:\d+: `"),
        ("swallowed wait", WaitForDevice, "a wait for the device"),
        ("unjoined", UnjoinedStream, "not joined again"),
        ("unjoined and an error", ModelError, "no"),
        ("error", ModelError, "no"),
        ("interrupt", KeyboardInterrupt, None),
        ("memory", OutOfDeviceMemory, "no memory left.*9.00 GiB"),
    ],
)
def test_I8_each_kind_of_failure_is_cleaned_up(
    kind: str, error: type[BaseException], says: str | None, machine: Machine
) -> None:
    engine, pool, x = CudaEngine(), CudaPool(DEVICE), torch.randn(4)
    with pytest.raises(error, match=says):
        engine.capture(lambda: failing(kind, machine), pool=pool, segment="segment 3")
    assert_clean(machine)
    assert len(pool.book) == 0 and not pool.is_recording
    pool.end_bucket()
    first = machine.num_handles
    good = engine.capture(lambda: [x + 1], pool=pool, segment="segment 3")
    assert machine.num_handles == first + 1, "a handle is dead once nothing holds it"
    with pytest.raises(error):
        engine.capture(lambda: failing(kind, machine), pool=pool, segment="segment 4")
    assert_clean(machine, num_live=1)
    engine.capture(lambda: [x + 2], pool=pool, segment="segment 4")
    assert machine.num_handles == first + 1, "one pool for all"
    assert torch.equal(good.outputs[0], x + 1)


def test_I8_the_failed_functions_tensors_go_at_once(machine: Machine) -> None:
    import weakref

    held: list[Any] = []

    def fn() -> list[Tensor]:
        mine = torch.ones(3)
        held.append(weakref.ref(mine))
        raise ModelError("no")

    with pytest.raises(ModelError) as caught:
        CudaEngine().capture(fn, pool=CudaPool(DEVICE), segment="segment 0")
    assert caught.value is not None and held[0]() is None


def test_an_empty_graph_is_right_for_views_only(machine: Machine) -> None:
    engine, pool, x = CudaEngine(), CudaPool(DEVICE), torch.randn(4, 2)
    machine.num_nodes = 0
    views = engine.capture(lambda: [x.view(-1), x.T[:1], torch.empty(3)], pool=pool, segment="segment 0")
    assert views.is_empty
    for work in (lambda: [x * 3], lambda: [x.add_(1)], lambda: [torch.zeros(2)], lambda: [x.T.contiguous()]):
        with pytest.raises(WorkElsewhere, match=r"segment 1, op aten.*kernels that ran on another stream"):
            engine.capture(work, pool=pool, segment="segment 1")
    assert_clean(machine, num_live=1)


def test_captures_do_not_nest_and_a_pool_serves_one_at_a_time(machine: Machine) -> None:
    engine, pool, x = CudaEngine(), CudaPool(DEVICE), torch.randn(4)
    graph = engine.capture(lambda: [x + 1], pool=pool, segment="segment 0")

    def nested() -> list[Tensor]:
        with pytest.raises(InsideCapture, match="capture of segment 2.*the capture of segment 1"):
            engine.capture(lambda: [x], pool=CudaPool(DEVICE), segment="segment 2")
        with pytest.raises(InsideCapture, match="replay of segment 0.*the capture of segment 1"):
            graph.replay()
        with pytest.raises(PoolInUse, match="in progress"):
            pool.release()
        return [x + 2]

    engine.capture(nested, pool=pool, segment="segment 1")
    with pytest.raises(PoolHasGraphs, match="1 still captured"):
        pool.release()


def test_the_caches_are_given_up_once_per_bucket(machine: Machine) -> None:
    engine, pool, x = CudaEngine(), CudaPool(DEVICE), torch.randn(4)
    counts = []
    kept = []
    for _ in range(2):
        pool.begin_bucket()
        before = machine.num_syncs
        kept += [engine.capture(lambda: [x + 1], pool=pool, segment=f"segment {i}") for i in range(5)]
        counts.append(machine.num_syncs - before)
        pool.end_bucket()
    assert counts == [1, 1] and len(kept) == 10


def test_calls_join_the_last_stream_only_where_it_changed(machine: Machine, monkeypatch: Any) -> None:
    pool = CudaPool(DEVICE)
    first = pool._last_stream
    pool.begin_call()
    assert pool._last_stream is first
    monkeypatch.setattr(torch_api, "current_raw_stream", lambda index: 12)
    pool.begin_call()
    second = pool._last_stream
    assert second is not first and second.waits == [first]
    pool.begin_call()
    assert pool._last_stream is second and second.waits == [first]


def test_another_allocator_than_torchs_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(ForeignAllocator, match="expected 'native', got 'cudaMallocAsync'"):
        CudaEngine().new_pool(DEVICE)
