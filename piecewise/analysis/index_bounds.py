"""Checks index operands before the kernels that trust them.

An index out of range is an `IndexError` on a CPU, but on CUDA a device-side assertion, after which the
process cannot use the device. Warm-ups run ops on placeholder values, so on CUDA they check indices first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise import torch_api
from piecewise.ir.tensors import bound_arguments
from runners._torch import call_kernel

# (indices, number of entries to choose from, whether negative indices count from the end)
Operand = tuple[Tensor, int, bool]
Arguments = Mapping[str, Any]


def _along_dim(arguments: Arguments, may_be_negative: bool = False) -> list[Operand]:
    source, index, dim = arguments["self"], arguments["index"], arguments["dim"]
    # An index without elements may have other dims than the source.
    return [(index, source.shape[dim] if source.dim() and index.numel() else 1, may_be_negative)]


def _embedding(arguments: Arguments) -> list[Operand]:
    found = [(arguments["indices"], arguments["weight"].shape[0], False)]
    if "offsets" in arguments:
        found.append((arguments["offsets"], arguments["indices"].numel() + 1, False))
    return found


def _index(arguments: Arguments) -> Iterator[Operand]:
    dim = 0
    for index in arguments["indices"]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            yield index, arguments["self"].shape[dim], True
        dim += index.dim() if is_mask else 1


def _loss_target(arguments: Arguments) -> list[Operand]:
    scores, target = arguments["self"], arguments["target"]
    counted = target[target != arguments["ignore_index"]]
    return [(counted, scores.shape[1 if scores.dim() > 1 else 0], False)]


# By op name, without the trailing underscore of in-place ops.
_OPERANDS: dict[str, Callable[[Arguments], Iterable[Operand]]] = {
    name: operands
    for names, operands in {
        "embedding embedding_renorm _embedding_bag _embedding_bag_forward_only": _embedding,
        "index _unsafe_index index_put _index_put_impl _unsafe_index_put _unsafe_masked_index": _index,
        "index_select index_add index_copy index_reduce": _along_dim,
        "gather scatter scatter_add scatter_reduce": _along_dim,
        "index_fill": lambda arguments: _along_dim(arguments, may_be_negative=True),
        "take put": lambda arguments: [(arguments["index"], arguments["self"].numel(), True)],
        "nll_loss_forward nll_loss2d_forward": _loss_target,
    }.items()
    for name in names.split()
}


def _is_no_share(values: Any) -> Tensor:
    return ~((torch.as_tensor(values) >= 0) & (torch.as_tensor(values) <= 1)).all()


# Other ops that check values on the device: whether the check would fail.
_FAILS: dict[str, Callable[[Arguments], Tensor]] = {
    "_assert_async": lambda a: ~a["self"].bool().all(),
    "bernoulli": lambda a: _is_no_share(a["self"] if a.get("p") is None else a["p"]),
    "binary_cross_entropy": lambda a: _is_no_share(a["self"]) | _is_no_share(a["target"]),
    "repeat_interleave": lambda a: (a["repeats"] < 0).any(),
    "poisson": lambda a: ~(a["self"] >= 0).all(),
    "multinomial": lambda a: ((a["self"] < 0) | ~a["self"].isfinite()).any() | (a["self"].sum(-1) <= 0).any(),
}


def _name_of(op: torch_api.OpOverload) -> str:
    return op._schema.name.partition("::")[2].removesuffix("_")


def checks_values(op: torch_api.OpOverload) -> bool:
    """Whether an op's kernel may check values on the device; true for every custom op."""
    name = _name_of(op)
    return op.namespace not in ("aten", "prim", "prims") or name in _OPERANDS or name in _FAILS


def check_indices(op: torch_api.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises IndexError where an index of an aten op's call is out of range, RuntimeError where a kernel's
    own check of values would fail; reads the operands' extremes back to the host."""
    if op.namespace != "aten" or not checks_values(op):
        return
    name, bound = _name_of(op), bound_arguments(op, args, kwargs)
    if name in _FAILS and bool(_FAILS[name](bound)):
        raise RuntimeError(f"{name}: its check of values fails")
    for index, size, may_be_negative in _OPERANDS[name](bound) if name in _OPERANDS else ():
        if not index.numel():
            continue
        low, high = (int(value) for value in torch.aminmax(index))
        if low < (-size if may_be_negative else 0) or high >= size:
            wrong = high if high >= size else low
            raise IndexError(f"{name}: index {wrong} is out of range for {size} entries")


class CheckedIndices(torch_api.TorchDispatchMode):
    """Calls `check_indices` before each aten op in its block, also inside Python kernels of custom ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            check_indices(func, args, kwargs)
            return func(*args, **kwargs)
        with self:
            return call_kernel(func, args, kwargs)
