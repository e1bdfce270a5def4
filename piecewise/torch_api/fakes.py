"""Makes fake tensors, records the aten ops that run on them, and sees inside tensor subclasses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo as dynamo
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._higher_order_ops.out_dtype import is_int_mm, out_dtype, out_dtype_fallback
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from piecewise.errors.trace import DistributedTensor, OwnTorchFunction, SilentSubclass, StateNotStrided
from runners.tensors import tensors_in

# Whether a value is a tensor around other tensors, which its class lists and can rebuild it from.
is_wrapper: Callable[[Any], bool] = is_traceable_wrapper_subclass
# Disables tensors' `__torch_function__` in a block.
below_torch_function = torch._C.DisableTorchFunctionSubclass


@contextmanager
def python_dispatcher() -> Iterator[None]:
    """Runs composite ops in this block as their Python decompositions, with the checks of values there. Some
    of torch 2.11's C++ kernels fail on symbolic sizes, such as `matmul` for a weight without a gradient."""
    checks = nullcontext() if torch.__version__ >= "2.13" else _OneHotChecks()
    with enable_python_dispatcher(), checks:
        yield


class _OneHotChecks(TorchFunctionMode):
    """Adds the checks of values that `one_hot` leaves out for fakes before torch 2.13."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "one_hot":
            given = dict(zip(("input", "num_classes"), args, strict=False)) | (kwargs or {})
            index, count = given["input"], given.get("num_classes", -1)
            for check in (index >= 0, index < count) if count != -1 else ():
                torch.ops.aten._assert_async.default(check.all())
        return func(*args, **(kwargs or {}))


def fake_mode_of(values: Sequence[Any]) -> Any:
    return detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])


def forget_tensors(fake_mode: Any) -> None:
    """Drops a fake mode's weak references to real tensors. `torch.utils.swap_tensors` refuses tensors with
    weak references, and the fakes of a trace stay alive."""
    if fake_mode is not None:
        describer = fake_mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def static_fake(fake_mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Makes the fake of a model's tensor, without symbols; fakes share memory as the tensors do."""
    return fake_mode.from_tensor(tensor, static_shapes=True)


def fake_twin(fake: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    """Makes a fake like another one, in the memory of `memory` or, for None, in its own, of size 0. The fakes
    share sizes and strides, which takes 13 µs, where an op on fakes with symbols takes 200 to 500."""
    assert isinstance(fake, FakeTensor)
    with torch._C._DisableTorchDispatch(), in_kernel_invocation_manager(fake.fake_mode):
        twin = FakeTensor(fake.fake_mode, torch.ops.aten.detach.default(fake), fake.fake_device)
        donor = torch.empty(0, device="meta") if memory is None else memory
        torch._functionalize_unsafe_set(twin, donor)  # type: ignore[attr-defined]
    return twin


def holds_constant(fake: torch.Tensor) -> bool:
    return getattr(fake, "constant", None) is not None


def is_composite(op: Any) -> bool:
    """Whether an aten op is composite; a mode sees it whole for tensors made under `inference_mode`."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def has_dynamic_dims(tensor: torch.Tensor) -> bool:
    return any(name.startswith("_dynamo_") and "dynamic" in name for name in vars(tensor))


def new_fake_mode(*, repeats: bool = False) -> FakeTensorMode:
    """Makes a fake mode with its own symbols; `repeats` as for `tracing_config`."""
    with fakes_remembered(repeats):
        return FakeTensorMode(shape_env=ShapeEnv())


def fakes_remembered(repeats: bool) -> Any:
    """Lets new fake modes in this block cache the results of ops by their operands, if `repeats`. Caching
    takes as long as running the op once more. A quarter of one layer's ops repeat others; without the cache a
    trace takes a tenth less time, and one of symbolic aten ops half."""
    enabled = repeats and dynamo.config.fake_tensor_cache_enabled  # type: ignore[attr-defined]
    return dynamo.config.patch(fake_tensor_cache_enabled=enabled)  # type: ignore[attr-defined]


_einsums = threading.Lock()
_einsum_blocks: list[bool] = []


@contextmanager
def einsums_from_the_left() -> Iterator[None]:
    """Makes `torch.einsum` multiply in the order of its operands in this block. opt_einsum chooses the order
    by sizes, which would fix them. torch's setting is process-wide, so of several threads' blocks the first
    one turns it off and the last one restores it."""
    settings: Any = torch.backends.opt_einsum
    with _einsums:
        _einsum_blocks.append(settings.enabled)
        settings.enabled = False
    try:
        yield
    finally:
        with _einsums:
            first, *_ = _einsum_blocks
            _einsum_blocks.pop()
            if not _einsum_blocks:
                settings.enabled = first


def functional_aten_graph(
    function: Callable[..., tuple], arguments: Sequence[Any], fake_mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """Records the aten ops of `function` on fakes; writes to arguments become copies at the end. Autocast
    outside and inside becomes casts; torch's decompositions are not applied."""
    with torch.inference_mode(False):
        return trace_aten(torch.func.functionalize(function, remove="mutations"), arguments, fake_mode)


def trace_aten(
    function: Callable[..., Any], arguments: Sequence[Any], fake_mode: Any, decompositions: dict | None = None
) -> torch.fx.GraphModule:
    """Records the aten ops that `function` runs on fakes and symbolic ints, without gradients and autocast.
    Nodes have fakes in ``meta["val"]``; ops that write stay unchanged."""
    # Python kernels for composite ops, since torch 2.11's C++ ones fail on symbolic sizes. That dispatcher is
    # on from where its guard is made, so the guard is made inside of the other modes.
    with torch.no_grad(), fake_mode, enable_python_dispatcher(), einsums_from_the_left():
        return make_fx(function, decomposition_table=decompositions)(*arguments)  # type: ignore[arg-type]


def is_opaque(value: Any) -> bool:
    """Whether the value is a tensor whose class dispatches in Python but does not list what is inside."""
    dispatch = getattr(type(value), "__torch_dispatch__", None)
    is_disabled = dispatch is torch._C._disabled_torch_dispatch_impl
    return isinstance(value, torch.Tensor) and not is_disabled and not is_wrapper(value)


def has_torch_function(value: Any) -> bool:
    """Whether Dynamo traces the `__torch_function__` of the tensor's class; false for wrappers."""
    function = getattr(type(value), "__torch_function__", None)
    is_called = function is not torch._C._disabled_torch_function_impl and type(value) is not torch.Tensor
    return isinstance(value, torch.Tensor) and is_called and not is_wrapper(value)


def has_own_torch_function(value: Any) -> bool:
    """Whether the class has its own `__torch_function__` and is no Parameter. Dynamo may give its results
    another class than eager does."""
    function = getattr(type(value), "__torch_function__", None)
    torchs: Any = torch.Tensor.__torch_function__
    is_torchs = getattr(function, "__func__", None) is torchs.__func__
    return has_torch_function(value) and not is_torchs and not issubclass(type(value), torch.nn.Parameter)


def trace_below(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    fake_mode: Any,
    *,
    int_matmul: Any,
    torch_function: bool,
) -> torch.fx.GraphModule:
    """Records the aten ops of `function` below tensor subclasses; guards on sizes stay in the fake mode.

    Args:
        leaves: fakes and symbolic numbers, the function's arguments.
        int_matmul: the product of two int8 matrices on a GPU, in int32.
        torch_function: whether to call the `__torch_function__` of classes, too.
    """

    def typed(op: Any, dtype: torch.dtype, *args: Any) -> Any:
        if is_int_mm(op, dtype, args):
            return int_matmul(*args)
        return out_dtype_fallback(op, dtype, *args)

    below = nullcontext() if torch_function else below_torch_function()
    with torch.inference_mode(False), below:
        return trace_aten(function, leaves, fake_mode, {out_dtype: typed})


def holds_wrapper(value: Any) -> bool:
    return any(map(is_wrapper, tensors_in(value)))


def tensors_inside(tensor: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yields a tensor and the tensors inside of a subclass, each with its path, outer ones first."""
    yield keys, tensor
    for name in tensor.__tensor_flatten__()[0] if is_wrapper(tensor) else ():
        yield from tensors_inside(getattr(tensor, name), (*keys, name))


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Finds the plain tensors of a value, including those inside of subclasses."""
    for tensor in tensors_in(value):
        yield from (each for _, each in tensors_inside(tensor) if not is_wrapper(each))


def refuse_class(what: str, tensor: torch.Tensor, *, cause: Exception | None = None) -> None:
    """Raises TraceError for a tensor whose class does not say, or not fully, what is inside."""
    cls = type(tensor)
    names = {"where": what, "name": f"{cls.__module__}.{cls.__qualname__}", "cls": cls.__name__}
    if any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed") for c in cls.__mro__):
        raise DistributedTensor(**names) from cause
    if is_opaque(tensor):
        raise SilentSubclass(**names) from cause
    if has_own_torch_function(tensor):
        raise OwnTorchFunction(**names) from cause
    if tensor.layout is not torch.strided:
        raise StateNotStrided(layout=tensor.layout, **names) from cause
