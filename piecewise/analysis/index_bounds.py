"""Checks index operands before the kernels that trust them.

On a CPU an index out of range is an `IndexError`. On a CUDA device it is an assertion that ends the whole
process' use of the device. Warm-ups run ops on made-up values, so on CUDA they look at the indices first, and
raise what a CPU would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from piecewise import torch_api
from piecewise.ir.tensors import bound_arguments
from runners.tape.readbacks import kernel_keys

# (indices, how many there are to choose from, whether negative ones count from the end)
Operand = tuple[Tensor, int, bool]


def _along_dim(arguments: Mapping[str, Any], may_be_negative: bool = False) -> list[Operand]:
    source, index, dim = arguments["self"], arguments["index"], arguments["dim"]
    # An index without elements may have other dims than the source.
    return [(index, source.shape[dim] if source.dim() and index.numel() else 1, may_be_negative)]


def _embedding(arguments: Mapping[str, Any]) -> list[Operand]:
    found = [(arguments["indices"], arguments["weight"].shape[0], False)]
    if "offsets" in arguments:
        found.append((arguments["offsets"], arguments["indices"].numel() + 1, False))
    return found


def _index(arguments: Mapping[str, Any]) -> Iterator[Operand]:
    dim = 0
    for index in arguments["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            yield index, arguments["self"].shape[dim], True
            dim += 1


def _loss_target(arguments: Mapping[str, Any]) -> list[Operand]:
    scores, target = arguments["self"], arguments["target"]
    counted = target[target != arguments["ignore_index"]]
    return [(counted, scores.shape[1 if scores.dim() > 1 else 0], False)]


_OPERANDS: dict[str, Callable[[Mapping[str, Any]], Iterable[Operand]]] = {
    **dict.fromkeys(("embedding", "embedding_renorm_"), _embedding),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _embedding),
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "index_put_"), _index),
    **dict.fromkeys(("_index_put_impl_", "_unsafe_index_put", "_unsafe_masked_index"), _index),
    **dict.fromkeys(("index_select", "index_add", "index_add_", "index_copy", "index_copy_"), _along_dim),
    **dict.fromkeys(("index_reduce", "index_reduce_"), _along_dim),
    **dict.fromkeys(("index_fill", "index_fill_"), partial(_along_dim, may_be_negative=True)),
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_"), _along_dim),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_"), _along_dim),
    **dict.fromkeys(("take", "put", "put_"), lambda a: [(a["index"], a["self"].numel(), True)]),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _loss_target),
}


def _is_no_share(values: Any) -> Tensor:
    return ~((torch.as_tensor(values) >= 0) & (torch.as_tensor(values) <= 1)).all()


# Other ops that look at values on the device: whether they would end its use.
_FAILS: dict[str, Callable[[Mapping[str, Any]], Tensor]] = {
    "_assert_async": lambda a: ~a["self"].bool().all(),
    "bernoulli": lambda a: _is_no_share(a["self"]) if a.get("p") is None else torch.tensor(False),
    "bernoulli_": lambda a: _is_no_share(a["p"]),
    "binary_cross_entropy": lambda a: _is_no_share(a["self"]) | _is_no_share(a["target"]),
    "repeat_interleave": lambda a: (a["repeats"] < 0).any(),
    "poisson": lambda a: ~(a["self"] >= 0).all(),
    "multinomial": lambda a: ((a["self"] < 0) | ~a["self"].isfinite()).any() | (a["self"].sum(-1) <= 0).any(),
}


def checks_values(op: torch_api.OpOverload) -> bool:
    """Whether an op's kernel looks at values on the device, as far as is known."""
    namespace, _, name = op._schema.name.partition("::")
    return namespace not in ("aten", "prim", "prims") or name in _OPERANDS or name in _FAILS


def check_indices(op: torch_api.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises IndexError where an index operand of this call of an aten op is out of range, and RuntimeError
    where a kernel's own check of values would fail.

    Reads the operands' extremes back to the host. Ops that check no values pass.

    Args:
        op: as the dispatcher sees it, such as `torch.ops.aten.embedding.default`.
        args, kwargs: its arguments.
    """
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "aten" or not (name in _FAILS or name in _OPERANDS):
        return
    bound = bound_arguments(op, args, kwargs)
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
    """Calls `check_indices` before each aten op in its block, those that custom ops call in Python
    included."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            check_indices(func, args, kwargs)
            return func(*args, **kwargs)
        with self:
            return func._handle.redispatch_boxed(kernel_keys(args, kwargs), *args, **kwargs)
