"""Refuses what a recording cannot hold: host reads, shapes that depend on values, tensors of host values.

A CUDA capture fails on these, or worse, freezes the value. On the CPU torch does them silently, and no single
hook sees them all: `.tolist()` and `.numpy()` never reach the dispatcher, and a function mode is off inside
the kernel of a custom op. So two modes look at once, `HostReads` at Python's calls and the recorder at the
dispatcher's ops, and both are put up again around each kernel that may be written in Python.

Not seen by either, as they go straight to C: `torch.frombuffer`, `torch.utils.dlpack.to_dlpack`, pickling,
reading memory through `data_ptr()`, and kernels that read values in C++ without going through the dispatcher.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runners import _torch, errors
from runners.source_lines import source_line
from runners.tensors import tensors_in

Refusal: TypeAlias = type[errors.Unrecordable]


_READING_METHODS = (
    *("item", "tolist", "numpy", "equal", "is_nonzero", "allclose", "map_", "map2_", "apply_"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("__array__", "__dlpack__", "__repr__", "__format__", "__deepcopy__"),
)
_VALUE_SHAPE_OPS = ("aten::_linalg_check_errors",)
_RESIZING_OPS = ("aten::resize_", "aten::resize_as_", "aten::set_", "aten::resize_as_sparse_")
_CROSSING_OPS = ("aten::copy_", "aten::_to_copy", "aten::copy", "aten::_copy_from")
_INDEX_PUTS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put")


@cache
def _refused_functions() -> dict[Callable[..., Any], tuple[str, Refusal]]:
    functions: dict[Callable[..., Any], tuple[str, Refusal]] = {}
    for name in _READING_METHODS:
        functions[getattr(torch.Tensor, name)] = (f"Tensor.{name}", errors.ReadBack)
    for name in ("equal", "is_nonzero", "allclose"):
        functions[getattr(torch, name)] = (f"torch.{name}", errors.ReadBack)
    for name in ("tensor", "as_tensor", "asarray"):
        functions[getattr(torch, name)] = (f"torch.{name}", errors.HostTensor)
    functions[torch.Tensor.new_tensor] = ("Tensor.new_tensor", errors.HostTensor)
    return functions


def _refusal_for_function(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, Refusal] | None:
    if func in (torch.tensor_split, torch.Tensor.tensor_split, torch.tensordot):
        # Their tensor argument is read on the host, in C++, where the dispatcher does not see it.
        given = args[1:] if func is not torch.tensordot else (*args[2:], kwargs.get("dims"))
        named = (kwargs.get("indices_or_sections"), kwargs.get("tensor_indices_or_sections"))
        if any(isinstance(value, Tensor) for value in (*given, *named)):
            return f"torch.{func.__name__}", errors.ReadBack
    found = _refused_functions().get(func)
    if found is not None and found[1] is errors.HostTensor:
        sources = (*args[func is torch.Tensor.new_tensor :], kwargs.get("data"), kwargs.get("obj"))
        # A tensor as the source is a copy on the device, or nothing at all.
        if isinstance(sources[0], Tensor):
            return None
    return found


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def refusal_for_op(
    func: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], host_scalars: dict[int, Tensor]
) -> Refusal | None:
    """Says why an op's call below autograd cannot be recorded, or None; `host_scalars` are `Watch`'s."""
    name, tags = func._schema.name, func.tags
    if torch.Tag.data_dependent_output in tags:
        return errors.ReadBack
    if name == "aten::index":
        return errors.ValueDependentShape if any(map(_is_mask, args[1])) else None
    if name in _INDEX_PUTS and any(map(_is_mask, args[1])):
        # Torch turns `x[mask] = number` into a masked fill, which has no shape to find out.
        given = [index for index in args[1] if index is not None]
        is_fill = len(given) == 1 and args[2].untyped_storage()._cdata in host_scalars
        return None if is_fill else errors.ValueDependentShape
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if torch.Tag.dynamic_output_shape in tags or name in _VALUE_SHAPE_OPS:
        return errors.ValueDependentShape
    # A number becomes a 0-dim tensor, a mere fill; a list or an array becomes a copy from the host.
    if name == "aten::lift_fresh" and args[0].dim() > 0:
        return errors.HostTensor
    if name in _RESIZING_OPS:
        return errors.TensorResized
    if name in _CROSSING_OPS:
        devices = {tensor.device for tensor in tensors_in(args)}
        target: torch.device | None = kwargs.get("device")
        moves = (target and (target.type != d.type or target.index not in (None, d.index)) for d in devices)
        if len(devices) > 1 or any(moves):
            return errors.DeviceCrossing
    return None


class Watch:
    """Refuses what a recording cannot hold, and keeps the refusal should the model swallow the error.

    `host_scalars` are 0-dim tensors that torch made from Python numbers, by storage.
    """

    def __init__(self, segment: str) -> None:
        self.segment = segment
        self.error: errors.Unrecordable | None = None
        self.host_scalars: dict[int, Tensor] = {}

    def refuse(self, op: Any, refusal: Refusal) -> NoReturn:
        error = refusal(f"{self.segment}, op {op}", more=source_line())
        self.error = self.error or error
        raise error


def one_hot_on_device(indices: Tensor, num_classes: int) -> Tensor:
    """Computes `one_hot` without the check of bounds for which torch reads values back, on the CPU alone."""
    hot = torch.zeros((*indices.shape, num_classes), dtype=torch.int64, device=indices.device)
    return hot.scatter_(-1, indices.unsqueeze(-1), 1)


class HostReads(TorchFunctionMode):
    """Refuses Python calls that a recording cannot hold; all others run as they are."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _refusal_for_function(func, args, kwargs)
        if found is not None:
            self._watch.refuse(*found)
        if func is torch.nn.functional.one_hot:
            num_classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            if num_classes > 0:
                return one_hot_on_device(args[0] if args else kwargs["input"], num_classes)
        if isinstance(func, _torch.OpOverloadPacket):
            func = _torch.overload_for(func, args, kwargs)
        if isinstance(func, _torch.OpOverload) and func.namespace != "aten":
            # The boxed call does not ask function modes again, so this one may stay up inside the kernel.
            with self:
                return _torch.call_boxed(func, args, kwargs)
        return func(*args, **kwargs)


class WatchedOps(_torch.TorchDispatchMode):
    """Refuses ops that a recording cannot hold; records nothing, for use inside a custom op's kernel."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check_op(func, args, kwargs)
        if _torch.decomposes(func):
            return self._call_decomposed(func, args, kwargs)
        result = self._call_op(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            self._watch.host_scalars[result.untyped_storage()._cdata] = result
        return result

    def _check_op(self, func: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refusal = refusal_for_op(func, args, kwargs, self._watch.host_scalars)
        if refusal is not None:
            self._watch.refuse(func, refusal)

    def _call_op(self, func: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op, with both modes up again if its kernel may be Python."""
        if func.namespace in ("aten", "prims"):
            with _torch.without_torch_function():
                return func(*args, **kwargs)
        with HostReads(self._watch), WatchedOps(self._watch):
            return _torch.call_kernel(func, args, kwargs)

    def _call_decomposed(self, func: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op that `decomposes`, so that this mode sees the ops it calls."""
        if func.namespace in ("aten", "prims"):
            with self, _torch.without_torch_function():
                return func.decompose(*args, **kwargs)
        with self, HostReads(self._watch):
            return _torch.call_kernel(func, args, kwargs)
