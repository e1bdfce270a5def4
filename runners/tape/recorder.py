"""Turns the ops of one run into calls that repeat them on the same memory, as the table in `tape.py` says.

Recording happens below autograd and autocast, where every op is one kernel with plain arguments. An op's new
tensors are known by their storages, not by its schema: `_unsafe_view` or a custom op may return an argument
without saying so.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runners._torch import OpOverload, decomposes, without_modes, without_torch_function
from runners.errors import DeviceCrossing, TensorResized, UnstridedTensor
from runners.rows import num_spanned
from runners.tape.arena import Arena, fill_with_garbage_
from runners.tape.readbacks import Watch, WatchedOps
from runners.tensors import map_tensors, tensors_in

_EMPTY_OPS = "empty empty_like new_empty empty_strided new_empty_strided empty_permuted".split()
_FILLS = "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full"
_CONSTANT_OPS = (*_FILLS.split(), "scalar_tensor", "lift_fresh")
# A call without arguments.
Step = Callable[[], object]
# Which one of the tensors in a result, the tensor, and the recorded one that takes its place.
_Output = tuple[int, Tensor, Tensor]


class Recorder(WatchedOps):
    """Records the ops that run while it is active into `arena`; `steps` hands the record over."""

    def __init__(self, arena: Arena, watch: Watch) -> None:
        super().__init__(watch)
        self._arena = arena
        self._calls: list[Step] = []
        self._bools: list[Tensor] = []

    def clear(self) -> None:
        """Drops the record; a traceback may keep this object alive."""
        self._calls, self._bools = [], []
        self._watch.host_scalars.clear()

    def steps(self) -> tuple[list[Step], list[Step]]:
        """Returns fills that overwrite all recorded memory with garbage, and the recorded ops; raises the
        `CaptureError` that the recorded function swallowed, if any."""
        if self._watch.error is not None:
            raise self._watch.error
        fills: list[Step] = [partial(fill_with_garbage_, words) for words in self._arena.spans()]
        return [*fills, *(partial(mask.fill_, True) for mask in self._bools)], self._calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
            storages = {_storage(tensor) for tensor in given if tensor.layout is torch.strided}
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
        storages = set(map(_storage, tensors_in(args)))
        with without_modes(), without_torch_function():
            results = tuple(function(*args))
            outputs = self._moved(_fresh(results, storages))
            self._calls.append(_copying(call, outputs))
        return _replaced(results, outputs)

    def _record(self, func: OpOverload, call: partial[Any], result: Any, storages: set[int]) -> Any:
        """Moves a result's fresh tensors into the arena, notes how to make them, returns the result."""
        for leaf in tensors_in(result):
            if leaf.layout is not torch.strided or leaf.is_quantized:
                self._watch.refuse(func, UnstridedTensor)
            if leaf.device != self._arena.device and not (leaf.device.type == "cpu" and leaf.dim() == 0):
                self._watch.refuse(func, DeviceCrossing)
        fresh = _fresh(result, storages)
        if not fresh:
            # `_unsafe_view` has no view schema, `is_pinned` no tensor; a custom op that returns nothing does
            # something.
            is_query = func.is_view or func.namespace == "aten" and bool(func._schema.returns)
            if func._schema.is_mutable or not is_query:
                self._calls.append(call)
            return result
        if all(leaf.device != self._arena.device for _, leaf in fresh):
            # A 0-dim host constant beside a pool on another device: no memory of the pool, nothing to repeat.
            return result
        outputs = self._moved(fresh)
        self._note(func, call, outputs)
        return _replaced(result, outputs)

    def _moved(self, fresh: Sequence[tuple[int, Tensor]]) -> list[_Output]:
        """Gives each tensor an arena tensor of the same sizes and strides; shared storages stay shared."""
        bounds: dict[int, tuple[int, int]] = {}
        for _, leaf in fresh:
            start = int(leaf.storage_offset()) * leaf.element_size()
            end = start + num_spanned(leaf.shape, leaf.stride()) * leaf.element_size()
            low, high = bounds.get(_storage(leaf), (start, end))
            bounds[_storage(leaf)] = min(low, start), max(high, end)
        # From a multiple of 16, so that each offset stays one in units of any dtype.
        bounds = {storage: (low // 16 * 16, high) for storage, (low, high) in bounds.items()}
        memory = {storage: self._arena.allocate(high - low) for storage, (low, high) in bounds.items()}
        recorded: list[_Output] = []
        for at, leaf in fresh:
            storage = _storage(leaf)
            offset = leaf.storage_offset() - bounds[storage][0] // leaf.element_size()
            mine = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            mine.set_(memory[storage].untyped_storage(), offset, leaf.shape, leaf.stride())
            if mine.dtype is torch.bool and mine.numel():
                self._bools.append(_spanned(mine))
            recorded.append((at, leaf, mine))
        return recorded

    def _note(self, func: OpOverload, call: partial[Any], outputs: list[_Output]) -> None:
        name = func._schema.name.removeprefix("aten::")
        _, leaf, mine = outputs[0]
        if name in _EMPTY_OPS:
            _overwrite_with_garbage_(mine)
            return
        step = _copying(_pinned(func, call, leaf), outputs)
        if name not in _CONSTANT_OPS:
            self._calls.append(step)
            return
        if func is torch.ops.aten.lift_fresh.default:
            self._watch.host_scalars[_storage(mine)] = mine
        if mine.numel():
            self._calls.append(partial(_spanned(mine).fill_, _spanned(mine)[0].item()))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _fresh(result: Any, storages: set[int]) -> list[tuple[int, Tensor]]:
    """Finds the tensors of a result that are in none of these storages, each with its position."""
    return [(at, leaf) for at, leaf in enumerate(tensors_in(result)) if _storage(leaf) not in storages]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    is_strided = tensor.layout is torch.strided
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), _storage(tensor)) if is_strided else ()


def _aliased(value: Any) -> Any:
    return map_tensors(value, Tensor.detach)


def _replaced(result: Any, outputs: Sequence[_Output]) -> Any:
    """Puts recorded tensors into a result in the places of its own."""
    recorded = {id(theirs): mine for _, theirs, mine in outputs}
    return map_tensors(result, lambda tensor: recorded.get(id(tensor), tensor))


def _spanned(tensor: Tensor) -> Tensor:
    return tensor.as_strided((num_spanned(tensor.shape, tensor.stride()),), (1,))


def _overwrite_with_garbage_(tensor: Tensor) -> None:
    memory = tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if memory.numel() % 2 == 0:
        fill_with_garbage_(memory.view(torch.int16))
    else:
        memory.fill_(0x7F)
    if tensor.dtype is torch.bool:
        _spanned(tensor).fill_(True)


def _copy_for(recorded: Tensor, fresh: Tensor) -> Callable[[Tensor], object]:
    """Makes a function that copies a result like `fresh` into its recorded tensor."""
    target = recorded.detach()
    reach = 1
    is_overlapping = False
    for stride, size in sorted(zip(fresh.stride(), fresh.shape, strict=True)):
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


def _copying(call: Callable[[], Any], outputs: Sequence[_Output]) -> Step:
    """Copies results into recorded tensors; returns a step that calls again and copies the new results."""
    copies = [(at, _copy_for(mine, theirs)) for at, theirs, mine in outputs]
    for (_, copy), (_, theirs, _) in zip(copies, outputs, strict=True):
        copy(theirs)

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
