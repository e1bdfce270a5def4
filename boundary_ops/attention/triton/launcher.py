"""Launches a compiled Triton program directly, past the JIT's look-up of it by all its arguments.

A JIT launch works out the types and alignments of two dozen arguments again, which takes longer than the
program runs at small sizes. Here the caller keeps the compiled program under a key that decides all of it,
and later launches go to its launcher; addresses are ints, which saves a driver query per tensor.

This file alone touches what triton does not promise: `CompiledKernel.run`, `.function`, `.packed_metadata`
and the order of the launcher's arguments, which triton 3.6 and 3.9 share. Else the JIT launches each time.
"""

import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton

from boundary_ops._torch import raw_device, raw_stream

# (grid x, grid y, stream, arguments in the order of the program's parameters)
DirectLaunch = Callable[[int, int, int, tuple[Any, ...]], None]
LAUNCHER_PARAMETERS = ("gridX", "gridY", "gridZ", "stream", "function")
# Set while programs are compiled and not launched.
_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)


def is_interpreted(program: Any) -> bool:
    """Whether triton was imported with TRITON_INTERPRET=1 and runs the program on the CPU."""
    return not isinstance(program, triton.runtime.JITFunction)


@contextmanager
def compiling_together() -> Iterator[None]:
    """Postpones the launches of `jit_launch` in a block, then compiles all its programs at the same time.

    Most of a compile is LLVM and ptxas, so threads share the processors. A failed compile is silent here: the
    next launch compiles again and raises. The garbage collector is off: on Python 3.11 a collection during a
    parse may end another thread's parse in a SystemError about recursion depth.
    """
    collects = gc.isenabled()
    gc.disable()
    before = _compiles_only.set(True)
    try:
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            yield
    finally:
        _compiles_only.reset(before)
        if collects:
            gc.enable()


def jit_launch(
    program: Any, grid: tuple[int, int], arguments: Sequence[Any], num_warps: int, num_stages: int
) -> DirectLaunch | None:
    """Launches through the JIT, compiling where needed; returns how to launch the same program directly.

    In a block of `compiling_together` it returns None: the next launch will tell. Tensors come as tensors.
    """
    # Fused multiply-add was always on up to triton 3.9; the softmax's exponent wants it.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if _compiles_only.get():
        program.warmup(*arguments, grid=grid, **options)
        return None
    compiled = program[grid](*arguments, **options)
    return None if is_interpreted(program) else direct_launch(compiled)


def direct_launch(compiled: Any) -> DirectLaunch | None:
    """Returns a function that launches `compiled`, or None where this triton has no such launcher."""
    parts = ("run", "function", "packed_metadata")
    run, function, metadata = (getattr(compiled, name, None) for name in parts)
    if function is None or metadata is None or not _is_known(run):
        return None

    def launch(x: int, y: int, stream: int, arguments: tuple[Any, ...]) -> None:
        # No launch metadata and no hooks: those serve profilers of triton's own.
        run(x, y, 1, stream, function, metadata, None, None, None, *arguments)  # type: ignore[misc]

    return launch


def _is_known(run: Any) -> bool:
    try:
        names = tuple(inspect.signature(run).parameters)
    except (TypeError, ValueError):
        return False
    return names[: len(LAUNCHER_PARAMETERS)] == LAUNCHER_PARAMETERS


def current_stream(device_index: int) -> int:
    """Returns the current stream of a CUDA device, as the driver's number; 0 for the interpreter's -1."""
    if device_index < 0:
        return 0
    if raw_stream is not None:
        return int(raw_stream(device_index))
    return int(torch.cuda.current_stream(device_index).cuda_stream)


def current_device() -> int:
    """Returns the current CUDA device; one was used, so that this starts nothing."""
    return int(raw_device()) if raw_device is not None else torch.cuda.current_device()
