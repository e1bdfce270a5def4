"""What a tensor of a class of its own holds, and which classes are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from piecewise import torch_api
from piecewise.ir.tensors import tensors_in
from runners.errors import TraceError


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
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(tensor, _distributed_tensor()):
        raise TraceError(
            f"{what} is a {name}",
            rule="collectives run between graphs, where the model calls them, and not inside of ops [I11]",
            fix="graph the model of one rank, on its local tensors, with the collectives written out",
        ) from cause
    if torch_api.is_opaque(tensor):
        raise TraceError(
            f"{what} is a {name}",
            expected="a plain tensor, or a subclass that names the tensors inside of it",
            got="a class with __torch_dispatch__ and without __tensor_flatten__",
            rule="graphs read the plain tensors inside of a subclass, at addresses that are compared [I4]",
            fix=f"give {cls.__name__} __tensor_flatten__ and __tensor_unflatten__, or keep its value as a "
            "plain tensor",
        ) from cause
    if torch_api.has_own_torch_function(tensor):
        raise TraceError(
            f"{what} is a {name}",
            got="a class with a __torch_function__ of its own",
            rule="a result is of the class that eager gives it, which a trace of such code does not tell",
            fix=f"derive {cls.__name__} from torch.nn.Parameter, give it __torch_dispatch__ and "
            "__tensor_flatten__, or keep its value as a plain tensor",
        ) from cause
    if tensor.layout is not torch.strided:
        raise TraceError(
            f"{what} is a {name} of layout {tensor.layout}",
            rule="graphs read plain strided memory [I4]",
            fix="keep its values and offsets as tensors of their own",
        ) from cause


def _distributed_tensor() -> Any:
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return DTensor
