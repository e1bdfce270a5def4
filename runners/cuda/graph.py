"""Captures and replays CUDA graphs: the only user of `torch.cuda.CUDAGraph`.

`torch.cuda.graph` is not used. Its entry waits for the device, collects garbage and empties the caches, once
per segment; its exit leaves torch in capture mode where a capture has failed. Here:

* Captures are thread-local, so other threads may allocate, free and wait meanwhile. torch keeps its default
  generator in capture mode for as long, which would make their random ops fail: the capture is begun with a
  scratch generator in its place. gc is off, for all threads, so there is one capture at a time.
* A capture that fails is ended, whatever state CUDA left it in (`driver.py`), its graph reset and its memory
  given back to the pool. The error says in words what went wrong (`faults.py`).
* A graph without nodes is right for a function that makes views only. Where the function did work, its
  kernels went to another stream, and each replay would miss them: an error.

Memory is the business of `pool.py`. Random ops may be refused: segments have none.
"""

import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from runners._torch import TorchDispatchMode, launch_of, release_graph_pool
from runners.collector import paused_collector
from runners.cuda import driver as cuda_driver
from runners.cuda.driver import StreamCapture
from runners.cuda.faults import translated
from runners.cuda.pool import CudaPool
from runners.engine import CapturedGraph, GraphEngine, checked_outputs
from runners.errors import ForeignAllocator, WorkElsewhere
from runners.mode import capture_of, capturing
from runners.source_lines import source_line
from runners.tensors import tensors_in

# gc and torch's generator mode belong to the process, and so does this.
_one_at_a_time = threading.RLock()


class CudaGraph(CapturedGraph):
    """Holds one captured segment at one bucket."""

    def __init__(self, segment: str, graph: torch.cuda.CUDAGraph, *, num_ops: int, pool: CudaPool) -> None:
        super().__init__(segment, (), num_ops)
        self._pool, self._graph = pool, graph
        self._launch = launch_of(graph)

    def replay(self) -> None:
        """Launches the graph on the caller's current stream."""
        if self.is_reset or capturing() is not None:
            self.refuse_replay()
        self._launch()

    def reset(self) -> None:
        """Waits for replays that are under way, then drops the graph and its hold on the pool. Idempotent."""
        if self.is_reset:
            return
        torch.cuda.synchronize(self._pool.device)
        super().reset()
        self._graph.reset()
        del self._launch, self._graph


class CudaEngine(GraphEngine):
    """Makes CUDA graphs; see the module's docstring."""

    name = device_type = "cuda"
    has_triton = dies_of_bad_index = True

    def new_pool(self, device: torch.device) -> CudaPool:
        """Makes an empty pool on a CUDA device; raises `ForeignAllocator`."""
        torch.cuda.init()
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise ForeignAllocator(backend=backend)
        index = torch.device(device).index
        return CudaPool(torch.device("cuda", torch.cuda.current_device() if index is None else index))

    def capture(self, fn: Callable[[], Sequence[Any]], *, pool: CudaPool, segment: str) -> CudaGraph:
        pool.check_capture(segment)
        with _one_at_a_time, torch.cuda.device(pool.device), torch.inference_mode(False), torch.no_grad():
            handle = pool.handle_for_capture()
            pool.is_recording = True
            try:
                with paused_collector(), capture_of(segment), torch.cuda.stream(pool.stream):
                    graph, outputs = _captured(fn, pool, handle, segment)
                    num_nodes = cuda_driver.num_nodes(graph.raw_cuda_graph())
                if num_nodes == 0:
                    _check_does_no_work(fn, graph, segment)
                # The graph is counted first: its memory is asked for below.
                made = CudaGraph(segment, graph, num_ops=num_nodes, pool=pool)
                pool.graphs.add(made)
                made.outputs = tuple(map(pool.book.aliased, outputs))
                return made
            finally:
                pool.is_recording = False

    def free_memory(self, device: torch.device) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def fork_random_state(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[device])

    def has_tf32(self) -> bool:
        return torch.backends.cuda.matmul.allow_tf32


def _captured(
    fn: Callable[[], Sequence[Any]], pool: CudaPool, handle: Any, segment: str
) -> tuple[torch.cuda.CUDAGraph, tuple[Any, ...]]:
    """Captures one run of `fn` on the current stream: the instantiated graph, and what `fn` returned."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        _begin(graph, pool, handle)
        outputs = checked_outputs(fn(), segment)
        torch.cuda.set_stream(pool.stream)  # `fn` may have left another one
        _end(graph)
        graph.instantiate()
        return graph, outputs
    except BaseException as error:
        failure = translated(error, segment)
        _abandon(graph, pool, handle)
        # A traceback keeps the frames of `fn` alive, and with them tensors in the pool.
        traceback.clear_frames(error.__traceback__)
        if failure is None:
            raise
        raise failure from error


def _begin(graph: torch.cuda.CUDAGraph, pool: CudaPool, handle: Any) -> None:
    generator = torch.cuda.default_generators[pool.index]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(pool.scratch_generator)
    try:
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
    finally:
        generator.graphsafe_set_state(state)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # torch warns of empty graphs, which are looked into here.
        warnings.simplefilter("ignore")
        graph.capture_end()


def _abandon(graph: torch.cuda.CUDAGraph, pool: CudaPool, handle: Any) -> None:
    """Ends a capture in any state, so that torch, CUDA and the pool are as before it began."""
    raw = pool.stream.cuda_stream
    torch.cuda.set_stream(pool.stream)
    is_over = cuda_driver.capture_status(raw) is StreamCapture.NONE
    try:
        if cuda_driver.capture_status(raw) is StreamCapture.INVALIDATED:
            cuda_driver.restart_capture(raw)
        if not is_over:
            _end(graph)
    except RuntimeError:
        # Work on a forked stream was not joined, which shows only when the capture ends.
        is_over = True
    if is_over:
        try:
            graph.pool()  # which torch says only once its own account of the capture is closed
        except RuntimeError:
            _end_unjoined(graph, pool, handle)
    graph.reset()


def _end_unjoined(graph: torch.cuda.CUDAGraph, pool: CudaPool, handle: Any) -> None:
    """Closes torch's account of a capture that CUDA has ended with an error.

    Older versions keep it open and close it over an empty capture; newer ones only keep the pool held.
    """
    raw = pool.stream.cuda_stream
    try:
        cuda_driver.restart_capture(raw)
        _end(graph)
    except RuntimeError:
        cuda_driver.end_capture(raw)
        with suppress(RuntimeError):
            release_graph_pool(pool.index, handle)


def _check_does_no_work(fn: Callable[[], Sequence[Any]], graph: torch.cuda.CUDAGraph, segment: str) -> None:
    """Raises where `fn` does more than make views, although its graph is empty."""
    try:
        with _WorkFinder(segment) as finder:
            fn()
        if finder.error is not None:
            raise finder.error
    except BaseException:
        graph.reset()
        raise


class _WorkFinder(TorchDispatchMode):
    """Finds the first op that makes or writes values, as an error that names it."""

    def __init__(self, segment: str) -> None:
        super().__init__()
        self.error: WorkElsewhere | None = None
        self._segment = segment

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.error is None and _is_work(func, args, kwargs, result):
            self.error = WorkElsewhere(f"{self._segment}, op {func}", more=source_line())
        return result


def _is_work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    if "::empty" in func._schema.name or "::new_empty" in func._schema.name:
        return False
    given = list(tensors_in((*args, *kwargs.values())))
    if func._schema.is_mutable:
        return any(tensor.numel() for tensor in given)
    made = list(tensors_in(result))
    if func.namespace != "aten" and not made:
        return True
    held = {tensor.untyped_storage()._cdata for tensor in given}
    return any(tensor.numel() and tensor.untyped_storage()._cdata not in held for tensor in made)
