"""Finds the plain tensors inside of tensor subclasses, and refuses classes that do not list them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from piecewise import torch_api
from piecewise.errors.trace import DistributedTensor, OwnTorchFunction, SilentSubclass, StateNotStrided
from piecewise.ir.tensors import tensors_in


def holds_wrapper(value: Any) -> bool:
    return any(map(torch_api.is_wrapper, tensors_in(value)))


def tensors_inside(tensor: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yields a tensor and the tensors inside of a subclass, each with its path, outer ones first."""
    yield keys, tensor
    for name in tensor.__tensor_flatten__()[0] if torch_api.is_wrapper(tensor) else ():
        yield from tensors_inside(getattr(tensor, name), (*keys, name))


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Finds the plain tensors of a value, including those inside of subclasses."""
    for tensor in tensors_in(value):
        yield from (each for _, each in tensors_inside(tensor) if not torch_api.is_wrapper(each))


def refuse_class(what: str, tensor: torch.Tensor, *, cause: Exception | None = None) -> None:
    """Raises TraceError for a tensor whose class does not say, or not fully, what is inside."""
    cls = type(tensor)
    names = {"where": what, "name": f"{cls.__module__}.{cls.__qualname__}", "cls": cls.__name__}
    if any(
        kin.__name__ == "DTensor" and kin.__module__.startswith("torch.distributed") for kin in cls.__mro__
    ):
        raise DistributedTensor(**names) from cause
    if torch_api.is_opaque(tensor):
        raise SilentSubclass(**names) from cause
    if torch_api.has_own_torch_function(tensor):
        raise OwnTorchFunction(**names) from cause
    if tensor.layout is not torch.strided:
        raise StateNotStrided(layout=tensor.layout, **names) from cause
