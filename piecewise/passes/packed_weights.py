"""Packs several weights into one storage; the parameters become views of it.

The tensors stay the same objects, so optimizers, tied modules, `load_state_dict` and in-place updates work as
before; a copy of the model gets a storage of its own. The layout is permanent: only addresses change.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from piecewise import torch_api
from piecewise.ir.array_places import is_of_array
from piecewise.ir.tensors import storage_of
from runners.state.state_check import InnerRef, StateRef

# Kernels load weights in vectors of this size.
_ALIGNMENT_BYTES = 16


def why_not_packable(places: Sequence[StateRef]) -> str | None:
    """Returns why these tensors cannot lie in one storage, in order; None where they can or already do."""
    tensors = [place.get() for place in places]
    for place, tensor in zip(places, tensors, strict=True):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"{place.path} is a {type(tensor).__name__}"
        if is_of_array(place):
            return f"{place.path} is a NumPy array, which stays where it is"
        if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_inference():
            return f"{place.path} is not a plain contiguous tensor"
        if not tensor.numel():
            return f"{place.path} is empty"
    first = tensors[0]
    if any((each.dtype, each.device, each.shape[1:]) != (first.dtype, first.device, first.shape[1:])
           for each in tensors):  # fmt: skip
        return f"{places[0].path} and the others differ in dtype, device or width"
    if len({id(each) for each in tensors}) < len(tensors):
        return f"{places[0].path} is used twice"
    if are_packed(tensors):
        return None
    begins = itertools.accumulate((each.numel() for each in tensors), initial=0)
    moved = {id(each): begin for each, begin in zip(tensors, begins, strict=False)}
    for place in places:
        if isinstance(place, InnerRef) and not _may_move(place, moved):
            return f"{place.path} is inside of a class that takes no tensors which lie there"
    if any(each.numel() * each.element_size() % _ALIGNMENT_BYTES for each in tensors[:-1]):
        return f"the weight behind {places[0].path} would not be aligned"
    storages = {storage_of(each): each.untyped_storage() for each in tensors}
    members = Counter(map(storage_of, tensors))
    for key, storage in storages.items():
        # Another user would keep the old memory: a view, or a graph captured before.
        if torch_api.num_storage_users(storage) > members[key]:
            held = (place for place, each in zip(places, tensors, strict=True) if storage_of(each) == key)
            return f"{next(held).path} shares its memory with another tensor, or is in use by other graphs"
    return None


def _may_move(place: StateRef, moved: Mapping[int, int]) -> bool:
    """Whether a subclass accepts its inner tensors at new offsets: eager rebuilds it from them in each op,
    and a class may ask for equal offsets."""
    while isinstance(place, InnerRef):
        place = place.owner
    try:
        _made_on_meta(place.get(), moved)
    except Exception:  # a class may raise anything
        return False
    return True


def _made_on_meta(tensor: Any, moved: Mapping[int, int]) -> torch.Tensor:
    if not torch_api.is_wrapper(tensor):
        size, stride = tensor.size(), tensor.stride()
        begin = moved.get(id(tensor), tensor.storage_offset())
        end = begin + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        memory = torch.empty(max(end, begin), dtype=tensor.dtype, device="meta")
        return memory.as_strided(size, stride, begin)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _made_on_meta(getattr(tensor, name), moved) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made


def are_packed(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors lie one after the other from the beginning of one storage."""
    expected = 0
    for each in tensors:
        if storage_of(each) != storage_of(tensors[0]) or each.storage_offset() != expected:
            return False
        expected += each.numel()
    return True


def pack_(places: Sequence[StateRef]) -> None:
    """Moves tensors for which `why_not_packable` is None into one storage, in order; objects and values stay.
    The peak is one more copy of them: an old storage goes with its last tensor."""
    tensors: list[Any] = [place.get() for place in places]
    if are_packed(tensors):
        return
    with torch.inference_mode(False), torch.no_grad():
        first = tensors[0]
        packed = first.new_empty((sum(each.shape[0] for each in tensors), *first.shape[1:]))
        begin = 0
        for each in tensors:
            part = packed.narrow(0, begin, each.shape[0])
            part.copy_(each)
            each.data = part  # frees the old memory before the next copy
            begin += each.shape[0]
