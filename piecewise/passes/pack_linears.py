"""Packs linears that read the same input into one linear, over weights that lie in one storage.

    before   mm(x, t(wq)) · mm(x, t(wk)) · mm(x, t(wv))
    after    y = mm(x, t(as_strided(wq, [nq + nk + nv, hidden]))) · y[:, :nq] · y[:, nq:nq + nk] · ...

The graph keeps reading the model's own weights: `pack_` has laid them out one after the other, and the packed
linear reads the first one beyond its end. So no weight is copied, writes into one are seen, and the addresses
of all of them are compared on each call [I4].

A quantised weight is several tensors: integers or float8, and scales. Each kind is laid out in this way, and
the ops that a linear applies column by column are applied to all columns at once:

    mm(x, cast(t(w)) * t(s))      _scaled_mm(x, t(w), scale of x, t(s))      _int_mm(x, t(w))
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecewise import torch_api
from piecewise.ir.tensors import ArrayPlace, storage_of
from piecewise.passes.fakes import aten, frozen, value_of
from piecewise.passes.int8_matmul import int8_matmul
from piecewise.torch_api.pattern_matcher import find_regions, same_mutation_regions
from runners.state.state_check import InnerRef, StateRef

# Positions of the arguments with a column, or an element, per column of the result.
_LINEARS: Any = dict.fromkeys((aten.mm.default, aten._int_mm.default, int8_matmul), (1,))
_LINEARS |= {aten.addmm.default: (2, 0), aten._scaled_mm.default: (1, 3)}
# Ops that compute each column from the same column.
_BY_COLUMN = (aten._to_copy.default, aten.mul.Tensor)

# Linears of one input, in the order in which they run: per kind of tensor, such as weights, biases or scales,
# one for each linear, as positions among the graph's placeholders.
LinearGroup = tuple[tuple[int, ...], ...]


def sweep(module: fx.GraphModule, groups: Sequence[LinearGroup]) -> int:
    """Packs the linears of `groups` that the graph has; returns how many groups."""
    found = [nodes for group, nodes in find_groups(module.graph).items() if group in groups]
    for nodes in found:
        _pack(module.graph, nodes)
    return len(found)


def find_groups(graph: fx.Graph, parameters: set[int] | None = None) -> dict[LinearGroup, list[fx.Node]]:
    """Finds groups of two or more linears that could be one, each with its nodes; `parameters` are the
    positions of the placeholders that are the model's own tensors, None for all."""
    placeholders = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    find_regions(graph)
    together: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        places = _LINEARS.get(node.target) if node.op == "call_function" else None
        if places is None or (used := _parameters_of(node)) is None:
            continue
        if parameters is not None and any(placeholders[each] not in parameters for each in used):
            continue
        shared = [argument for place, argument in enumerate(node.args) if place not in places]
        kinds = [(value_of(each).dtype, value_of(each).device, value_of(each).shape[1:]) for each in used]
        made = [_recipe(node.args[place]) for place in places]
        region = node.meta["mutation_region_id"]
        key = node.target, frozen(shared), frozen(node.kwargs), *kinds, *made, region
        together.setdefault(key, []).append(node)
    found: dict[LinearGroup, list[fx.Node]] = {}
    for nodes in together.values():
        each = [[placeholders[used] for used in _parameters_of(node) or ()] for node in nodes]
        group = tuple(zip(*each, strict=True))
        if len(nodes) > 1 and all(len(set(kind)) == len(kind) for kind in group):
            found[group] = nodes
    return found


def _parameters_of(node: fx.Node) -> list[fx.Node] | None:
    """Returns the placeholders of which a linear makes its columns, weight first; None with other inputs."""
    found: list[fx.Node] = []
    columns = value_of(node).shape[1]
    for place in _LINEARS[node.target]:
        argument = node.args[place] if place < len(node.args) else None
        if not isinstance(argument, fx.Node) or not _add_parameters(argument, columns, found):
            return None
    return found if len(set(found)) == len(found) else None


def _add_parameters(node: fx.Node, columns: Any, found: list[fx.Node]) -> bool:
    """Adds the placeholders behind a value of `columns` columns; false where columns depend on others."""
    if node.target in _BY_COLUMN:
        operands = node.all_input_nodes
        wide = all(value_of(each).dim() == 2 and value_of(each).shape[1] == columns for each in operands)
        return wide and all(_add_parameters(each, columns, found) for each in operands)
    given: Any = node.args[0] if node.target is aten.t.default else node
    value = value_of(given)
    if given.op != "placeholder" or not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return False
    found.append(given)
    is_turned = given is not node
    static = not any(isinstance(size, torch.SymInt) for size in value.shape)
    return static and value.dim() == (2 if is_turned else 1) and value.shape[0] == columns


def _recipe(node: Any) -> Any:
    """Returns a comparable form of the ops that make columns, whatever the parameters."""
    if not isinstance(node, fx.Node):
        return frozen(node)
    if node.op == "placeholder":
        return "parameter"
    return (node.target, *map(_recipe, node.args), frozen(node.kwargs))


def _pack(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    assert all(same_mutation_regions(nodes[0], node) for node in nodes)
    rows = [int(value_of(node).shape[1]) for node in nodes]
    packed: dict[fx.Node, fx.Node] = {}

    def made(node: fx.Node) -> fx.Node:
        if node in packed:
            return packed[node]
        copy = graph.node_copy(node, made)
        copy.meta.pop("val", None)
        return copy

    first = nodes[0]
    with graph.inserting_before(first):
        for each in _parameters_of(first) or ():
            sizes = [sum(rows), *map(int, value_of(each).shape[1:])]
            packed[each] = graph.call_function(aten.as_strided.default, (each, sizes, [*sizes[1:], 1]))
        places = _LINEARS[first.target]
        arguments = tuple(made(each) if at in places else each for at, each in enumerate(first.args))  # type: ignore[arg-type]
        joined = graph.call_function(first.target, arguments, dict(first.kwargs))  # type: ignore[arg-type]
        begin = 0
        for node, size in zip(nodes, rows, strict=True):
            part = graph.call_function(aten.slice.Tensor, (joined, 1, begin, begin + size))
            node.replace_all_uses_with(part)
            begin += size
    for node in nodes:
        graph.erase_node(node)


# Kernels load weights in vectors of this size.
_ALIGNMENT_BYTES = 16


def why_not_packable(places: Sequence[StateRef]) -> str | None:
    """Returns why these tensors cannot lie in one storage, in order; None where they can or already do."""
    tensors = [place.get() for place in places]
    for place, tensor in zip(places, tensors, strict=True):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"{place.path} is a {type(tensor).__name__}"
        if isinstance(place.owner, ArrayPlace):
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
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def are_packed(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors lie one after the other from the beginning of one storage."""
    begins = itertools.accumulate((each.numel() for each in tensors), initial=0)
    places = ((storage_of(each), each.storage_offset()) for each in tensors)
    return all(place == (storage_of(tensors[0]), begin) for place, begin in zip(places, begins, strict=False))


def pack_(places: Sequence[StateRef]) -> None:
    """Moves tensors for which `why_not_packable` is None into one storage, in order, for good.

    The tensors stay the same objects, so optimizers, tied modules, `load_state_dict` and in-place updates
    work as before; a copy of the model gets a storage of its own. The peak is one more copy of them: an old
    storage goes with its last tensor.
    """
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
