"""Finds the plain tensors inside of tensor subclasses, and refuses classes that do not tell them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from piecewise import torch_api
from piecewise.errors.trace import DistributedTensor, NotStrided, OwnTorchFunction, SilentSubclass
from piecewise.ir.tensors import tensors_in


def holds_wrapper(value: Any) -> bool:
    return any(map(torch_api.is_wrapper, tensors_in(value)))


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors of a value, those inside of subclasses too."""
    for tensor in tensors_in(value):
        if torch_api.is_wrapper(tensor):
            for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                yield from plain_tensors(getattr(tensor, name))
        else:
            yield tensor


def refuse_class(what: str, tensor: torch.Tensor, *, cause: Exception | None = None) -> None:
    """Raises TraceError for a tensor of a class that says nothing, or too little, of what is inside."""
    cls = type(tensor)
    names = {"where": what, "name": f"{cls.__module__}.{cls.__qualname__}", "cls": cls.__name__}
    if isinstance(tensor, _distributed_tensor()):
        raise DistributedTensor(**names) from cause
    if torch_api.is_opaque(tensor):
        raise SilentSubclass(**names) from cause
    if torch_api.has_own_torch_function(tensor):
        raise OwnTorchFunction(**names) from cause
    if tensor.layout is not torch.strided:
        raise NotStrided(layout=tensor.layout, **names) from cause


def _distributed_tensor() -> Any:
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return DTensor
