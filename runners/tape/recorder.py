"""Turns the ops of one run into calls that repeat them on the same memory, as the table in `tape.py` says.

Recording happens below autograd and autocast, where every op is one kernel with plain arguments. What an op
makes is told from what it was given by storage identity, not by its schema: `_unsafe_view` or a custom op may
return an argument without saying so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runners._torch import OpOverload, decomposes, without_modes, without_torch_function
from runners.errors import DeviceCrossing, NotStrided, TensorResized
from runners.rows import num_spanned
from runners.tape.arena import Arena, fill_with_garbage_
from runners.tape.readbacks import Watch, WatchedOps
from runners.tensors import map_tensors, tensors_in

_EMPTY_OPS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
)
_CONSTANT_OPS = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
        *("full", "full_like", "new_full", "scalar_tensor", "lift_fresh"),
    )
)


# Which one of the tensors in a result, the tensor, and the recorded one that takes its place.
_Output = tuple[int, Tensor, Tensor]


class Recorder(WatchedOps):
    """Records the ops that run while it is active into `arena`; `steps` hands the record over."""

    def __init__(self, arena: Arena, watch: Watch) -> None:
        super().__init__(watch)
        self._arena = arena
        self._calls: list[Callable[[], object]] = []
        self._bools: list[Tensor] = []

    def clear(self) -> None:
        """Drops the record; a traceback may keep this object alive."""
        self._calls, self._bools = [], []
        self._watch.host_scalars.clear()

    def steps(self) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
        """The fills that overwrite all recorded memory, and the recorded ops, as calls without arguments.

        Raises:
            CaptureError: something was refused, and the recorded function swallowed the error.
        """
        if self._watch.error is not None:
            raise self._watch.error
        fills: list[Callable[[], object]] = []
        fills += [partial(fill_with_garbage_, words) for words in self._arena.spans()]
        fills += [partial(mask.fill_, True) for mask in self._bools]
        return fills, self._calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind is not torch.Tensor for kind in types):
            # Subclasses with a dispatch of their own take themselves apart; their parts come back here.
            return NotImplemented
        if decomposes(func):
            return self._call_decomposed(func, args, kwargs)
        with without_torch_function():
            self._check_op(func, args, kwargs)
            given = list(tensors_in((*args, *kwargs.values())))
            call = partial(func._op, *_aliased(args), **_aliased(kwargs))
            before = [_place(tensor) for tensor in given] if func._schema.is_mutable else []
            storages = {tensor.untyped_storage()._cdata for tensor in given if tensor.layout is torch.strided}
        try:
            result = self._call_op(func, args, kwargs)
        except RuntimeError as error:
            if "not resizable" in str(error):
                self._watch.refuse(func, TensorResized)
            raise
        with without_torch_function():
            if torch.Tag.inplace_view in func.tags:
                return result
            if func._schema.is_mutable and before != [_place(tensor) for tensor in given]:
                self._watch.refuse(func, TensorResized)
            if func is torch.ops.aten.lift_fresh.default:
                storages = set()
            return self._record(func, call, result, storages)

    def record_call(self, function: Callable[..., Sequence[Any]], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Runs an opaque call unwatched and notes it as one step; its fresh results move into the arena."""
        call = partial(function, *_aliased(args))
        storages = {tensor.untyped_storage()._cdata for tensor in tensors_in(args)}
        with without_modes(), without_torch_function():
            results = tuple(function(*args))
            outputs = self._moved(list(tensors_in(results)), storages)
            for _, theirs, mine in outputs:
                _copy_for(mine, theirs)(theirs)
            self._calls.append(_copying(call, outputs))
        return _replaced(results, outputs)

    def _record(self, func: OpOverload, call: partial[Any], result: Any, storages: set[int]) -> Any:
        """Moves a result's fresh tensors into the arena, notes how to make them, returns the result."""
        leaves = list(tensors_in(result))
        for leaf in leaves:
            self._check(func, leaf)
        fresh = [leaf for leaf in leaves if leaf.untyped_storage()._cdata not in storages]
        if not fresh:
            if not self._is_view_or_query(func, result):
                self._calls.append(call)
            return result
        if all(leaf.device != self._arena.device for leaf in fresh):
            # A 0-dim host constant beside a pool on another device: no memory of the pool, and nothing to
            # repeat.
            return result
        outputs = self._moved(leaves, storages)
        self._note(func, call, outputs)
        return _replaced(result, outputs)

    def _check(self, func: OpOverload, leaf: Tensor) -> None:
        if leaf.layout is not torch.strided or leaf.is_quantized:
            self._watch.refuse(func, NotStrided)
        if leaf.device != self._arena.device and not (leaf.device.type == "cpu" and leaf.dim() == 0):
            self._watch.refuse(func, DeviceCrossing)

    def _is_view_or_query(self, func: OpOverload, result: Any) -> bool:
        if func._schema.is_mutable:
            return False
        if func.is_view:
            return True
        # `_unsafe_view` has no view schema, `is_pinned` no tensor; a custom op that returns nothing does
        # something.
        return func.namespace == "aten" and bool(func._schema.returns)

    def _moved(self, leaves: Sequence[Tensor], storages: set[int]) -> list[_Output]:
        """The leaves in none of these storages, each with an arena tensor of the same sizes and strides;
        those that share a storage share one there too."""
        numbered = enumerate(leaves)
        fresh = [(at, leaf) for at, leaf in numbered if leaf.untyped_storage()._cdata not in storages]
        bounds: dict[int, tuple[int, int]] = {}
        for _, leaf in fresh:
            start = int(leaf.storage_offset()) * leaf.element_size()
            end = start + num_spanned(leaf.shape, leaf.stride()) * leaf.element_size()
            low, high = bounds.get(leaf.untyped_storage()._cdata, (start, end))
            bounds[leaf.untyped_storage()._cdata] = min(low, start), max(high, end)
        # From a multiple of 16, so that each offset stays one in units of any dtype.
        bounds = {storage: (low // 16 * 16, high) for storage, (low, high) in bounds.items()}
        memory = {storage: self._arena.allocate(high - low) for storage, (low, high) in bounds.items()}
        recorded: list[_Output] = []
        for at, leaf in fresh:
            storage = leaf.untyped_storage()._cdata
            offset = leaf.storage_offset() - bounds[storage][0] // leaf.element_size()
            mine = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            mine.set_(memory[storage].untyped_storage(), offset, leaf.shape, leaf.stride())
            if mine.dtype is torch.bool and mine.numel():
                self._bools.append(_spanned(mine))
            recorded.append((at, leaf, mine))
        return recorded

    def _note(self, func: OpOverload, call: partial[Any], outputs: list[_Output]) -> None:
        name = func._schema.name
        _, leaf, mine = outputs[0]
        if name in _EMPTY_OPS:
            _poison_(mine)
            return
        for _, theirs, target in outputs:
            _copy_for(target, theirs)(theirs)
        if name in _CONSTANT_OPS:
            self._note_constant(func, mine)
            return
        self._calls.append(_copying(_pinned(func, call, leaf), outputs))

    def _note_constant(self, func: OpOverload, mine: Tensor) -> None:
        if func is torch.ops.aten.lift_fresh.default:
            self._watch.host_scalars[mine.untyped_storage()._cdata] = mine
        if mine.numel():
            self._calls.append(partial(_spanned(mine).fill_, _spanned(mine)[0].item()))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return ()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.untyped_storage()._cdata


def _aliased(value: Any) -> Any:
    """The value with each tensor replaced by a plain alias of its memory."""
    return map_tensors(value, Tensor.detach)


def _replaced(result: Any, outputs: Sequence[_Output]) -> Any:
    """The result with recorded tensors in the places of those that they stand for."""
    recorded = {id(theirs): mine for _, theirs, mine in outputs}
    return map_tensors(result, lambda tensor: recorded.get(id(tensor), tensor))


def _spanned(tensor: Tensor) -> Tensor:
    return tensor.as_strided((num_spanned(tensor.shape, tensor.stride()),), (1,))


def _poison_(tensor: Tensor) -> None:
    memory = tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if memory.numel() % 2 == 0:
        fill_with_garbage_(memory.view(torch.int16))
    else:
        memory.fill_(0x7F)
    if tensor.dtype is torch.bool:
        _spanned(tensor).fill_(True)


def _copy_for(recorded: Tensor, fresh: Tensor) -> Callable[[Tensor], object]:
    """How to copy a result like `fresh` into its recorded tensor."""
    target = recorded.detach()
    sizes_and_strides = sorted(zip(fresh.stride(), fresh.shape, strict=True))
    reach = 1
    is_overlapping = False
    for stride, size in sizes_and_strides:
        is_overlapping |= size > 1 and stride < reach
        reach += (size - 1) * stride if size else 0
    if not is_overlapping or not fresh.numel():
        return target.copy_
    # One element has several places in it, which copy_ refuses: copy the memory under it instead.
    memory, stride_of_fresh = _spanned(target), fresh.stride()

    def copy(result: Tensor) -> None:
        assert result.stride() == stride_of_fresh, f"recorded with strides {stride_of_fresh}"
        memory.copy_(_spanned(result))

    return copy


def _copying(call: Callable[[], Any], outputs: Sequence[_Output]) -> Callable[[], object]:
    """The call, and copies of its results into recorded tensors."""
    copies = [(at, _copy_for(mine, theirs)) for at, theirs, mine in outputs]

    def step() -> None:
        made = list(tensors_in(call()))
        for at, copy in copies:
            copy(made[at])

    return step


def _pinned(func: OpOverload, call: partial[Any], leaf: Tensor) -> partial[Any]:
    """Makes a factory's dtype and device explicit, so that a later default does not reach the replay."""
    names = {argument.name for argument in func._schema.arguments}
    if not {"dtype", "device"} <= names or any(True for _ in tensors_in(call.args)):
        return call
    return partial(call.func, *call.args, **{**call.keywords, "dtype": leaf.dtype, "device": leaf.device})
