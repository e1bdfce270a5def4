"""Holds all private names of torch that this package uses; tests/runners/test_torch.py tries them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from runners.tensors import tensors_in

__all__ = ["OpOverload", "OpOverloadPacket", "TorchDispatchMode"]

copy_each = torch._foreach_copy_
without_modes = _disable_current_modes
without_torch_function = torch._C.DisableTorchFunction
without_keys = torch._C._ExcludeDispatchKeyGuard
# The raw handle of a device's current stream; not in a torch without CUDA.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
_TensorGuards = torch._C._dynamo.guards.TensorGuards  # type: ignore[attr-defined]
_AUTOGRAD = ("AutogradOther", "AutogradCPU", "AutogradCUDA")


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Any:
    """Makes Dynamo's guard: `check` compares tensors' metadata, fails where two are one; None for none."""
    return _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None) if tensors else None


def storage_at(address: int, device: torch.device, num_bytes: int) -> Any:
    """Makes a storage of bytes that it does not own."""
    return torch._C._construct_storage_from_data_pointer(address, device, num_bytes)


def clear_cublas_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()


def release_graph_pool(device_index: int, handle: Any) -> None:
    torch._C._cuda_releasePool(device_index, handle)


def launch_of(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """Returns the graph's replay without the Python of torch's wrapper."""
    return partial(torch._C._CUDAGraph.replay, graph)


@cache
def keys_above_kernels() -> torch._C.DispatchKeySet:
    """Returns the keys of autograd, autocast, view tracking and modes."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for name in dir(torch._C.DispatchKey):
        if name.startswith(("Autocast", "Python")) or name in _AUTOGRAD:
            keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


def overload_for(packet: OpOverloadPacket, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Finds the overload that a packet takes for these arguments."""
    return getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs))


def call_boxed(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an op by way of the dispatcher, past function modes."""
    return torch._C._dispatch_call_boxed(op._handle, *args, **kwargs)


def call_kernel(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls an op's own kernel, below autograd and modes."""
    device = next((tensor.device.type for tensor in tensors_in((*args, *kwargs.values()))), "cpu")
    key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device))
    return op._handle.redispatch_boxed(torch._C.DispatchKeySet(key), *args, **kwargs)


def decomposes(op: OpOverload) -> bool:
    """Whether an op is composed of other ops alone, which are then inspected in its place. Above autograd
    torch decomposes such an op itself; inference tensors and kernels are below."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
