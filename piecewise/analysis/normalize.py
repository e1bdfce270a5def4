"""Rewrites a traced graph into the form that the splitter reads, without changing what it computes.

1. Nested graph modules that only wrap (activation checkpointing, `invoke_subgraph`) are inlined, which
   uncovers the boundary ops inside them.
2. The nodes between the entry and the exit of a `vmap` become one node: their tensors exist only inside.
3. Autocast regions become `meta["autocast"]` on each node: a region may span segments, and each segment
   re-opens it. Grad-mode switches are dropped, since captures serve calls without grad.
4. Ops on tensor subclasses become the ops below them, on the plain inner tensors (`trace/subclasses.py`).
5. A `getitem` on a tuple moves next to its producer, so that tuples never cross a segment border.
6. Numbers that the model returns, and that Dynamo carries in 0-dim tensors, become numbers again.
7. Float attributes that Dynamo carries in tensors (`dynamic=True`) become numbers where the trace fixed them.
8. Uses of a dropout that drops nothing become uses of its input: eager returns that very tensor, while
   the fake is a copy.
9. Uses of an in-place op's result become uses of the tensor that it wrote: one name per memory.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from piecewise import torch_api
from piecewise.errors.analysis import NestedTuple, ReshapesInPlace
from piecewise.ir.nodes import call_on_fakes, is_call, source_line, storages_of, target_name, value_of
from piecewise.ir.tensors import storage_of
from piecewise.trace.subclasses import Wrapped, mark_subclasses, open_state, see_through
from piecewise.trace.trace import Trace

_GRAD_SWITCHES = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")
_REGIONS = ("_enter_autocast", "_exit_autocast", *_GRAD_SWITCHES)
# Higher-order ops that run their first graph module on the remaining arguments, unconditionally and once.
_WRAPPERS = "wrap tag_activation_checkpoint invoke_subgraph inline_asm wrap_with_set_grad_enabled".split()
_DROPOUTS = (F.dropout, torch.dropout, torch.dropout_, torch.ops.aten.dropout, torch.ops.aten.dropout.default)
# These change the geometry of a tensor that has a name already: one name would have two shapes.
_RESHAPE_IN_PLACE = frozenset(
    "unsqueeze_ squeeze_ t_ transpose_ swapaxes_ swapdims_ as_strided_ resize_ resize_as_ set_".split()
)


def normalized(trace: Trace) -> Trace:
    """Rewrites the trace's graph in place, and replaces tensor subclasses by their plain inner tensors.
    Raises as `normalize`, and TraceError for state of an unsupported subclass."""
    mark_subclasses(trace)
    numbers = [leaf.index for leaf in trace.result_leaves if leaf.kind == "output" and leaf.value is float]
    return open_state(trace, normalize(trace.graph, shape_env=trace.shape_env, numbers=numbers))


def normalize(
    graph: fx.GraphModule, *, shape_env: torch_api.ShapeEnv | None = None, numbers: Collection[int] = ()
) -> dict[int, Wrapped]:
    """Applies the rewrites above in place; the module stays runnable but for its autocast regions. Symbols
    are simplified by `shape_env`, and `numbers` are positions of outputs that the model returns as plain
    numbers. Returns the outputs that are tensor subclasses, by position.

    Raises:
        SplitError: an op changes the shape or strides of a tensor in place.
        TraceError: a tensor subclass cannot be replaced by its inner tensors.
    """
    _inline_wrappers(graph)
    for node in filter(is_call, graph.graph.nodes):
        name, line = target_name(node), source_line(node)
        if name.rpartition("::")[2] in _RESHAPE_IN_PLACE:
            raise ReshapesInPlace(name=name, where=f" ({line})" if line else "", twin=name.rstrip("_"))
    _join_transforms(graph)
    _lift_regions(graph.graph)
    wrapped = see_through(graph)
    _move_getitems(graph.graph)
    _unwrap_numbers(graph.graph, numbers)
    _fold_fixed_floats(graph.graph, shape_env)
    _unwrap_idle_dropout(graph.graph)
    _rename_in_place_results(graph.graph)
    return wrapped


def _function_name(node: fx.Node) -> str:
    return target_name(node) if node.op == "call_function" else ""


def _inline_wrappers(graph: fx.GraphModule) -> None:
    for node in list(graph.graph.nodes):
        inner, given = _wrapped_module(graph, node)
        if inner is None:
            continue
        _inline_wrappers(inner)
        values: dict[fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True))
        with graph.graph.inserting_before(node):
            for held in inner.graph.find_nodes(op="get_attr"):
                name = f"{node.name}_{held.name}"
                setattr(graph, name, getattr(inner, str(held.target)))
                values[held] = graph.graph.create_node("get_attr", name)
                values[held].meta = dict(held.meta)
            result = graph.graph.graph_copy(inner.graph, values)
        for user in list(node.users):
            is_item = user.op == "call_function" and user.target is operator.getitem
            if is_item and isinstance(result, (tuple, list)):
                user.replace_all_uses_with(result[user.args[1]])  # type: ignore[arg-type, index]
                graph.graph.erase_node(user)
        if node.users:
            if not isinstance(result, fx.Node):
                raise NestedTuple(name=node.name)
            node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
    graph.recompile()


def _wrapped_module(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule | None, list[Any]]:
    if node.op == "call_module":
        inner = graph.get_submodule(str(node.target))
        if isinstance(inner, fx.GraphModule) and not node.kwargs:
            return inner, list(node.args)
    elif isinstance(node.target, torch_api.HigherOrderOperator) and node.target.name() in _WRAPPERS:
        for position, argument in enumerate(node.args):
            if isinstance(argument, fx.Node) and argument.op == "get_attr":
                held = getattr(graph, str(argument.target), None)
                if isinstance(held, fx.GraphModule):
                    return held, [item for item in node.args[position + 1 :] if not isinstance(item, str)]
    return None, []


class _Joined:
    """Runs the nodes of a `vmap` as one function; equal programs have equal names."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self.__name__, self.__module__ = "vmap", __name__

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        return self._module(*arguments)

    def __repr__(self) -> str:
        return f"vmap of {self._module.code}"


def _join_transforms(graph: fx.GraphModule) -> None:
    inside: list[fx.Node] = []
    depth = 0
    for node in list(graph.graph.nodes):
        name = _function_name(node)
        depth += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        if depth or inside:
            inside.append(node)
        if inside and not depth:
            _join(graph, inside)
            inside = []


def _join(graph: fx.GraphModule, nodes: list[fx.Node]) -> None:
    held = set(nodes)
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    given = [source for source in read if source not in held]
    made = [node for node in nodes if any(user not in held for user in node.users)]
    inner = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: inner.placeholder(f"a{at}") for at, node in enumerate(given)}
    for node in nodes:
        copies[node] = inner.node_copy(node, lambda old: copies[old])
    inner.output(tuple(copies[node] for node in made))
    with graph.graph.inserting_before(nodes[0]):
        joined = graph.graph.call_function(_Joined(fx.GraphModule(graph, inner)), tuple(given))
    kept = ("stack_trace", "nn_module_stack")
    joined.meta = {key: value for key, value in nodes[0].meta.items() if key in kept}
    joined.meta["example_value"] = tuple(map(value_of, made))
    for at, node in enumerate(made):
        with graph.graph.inserting_after(joined):
            item = graph.graph.call_function(operator.getitem, (joined, at))
        item.meta = joined.meta | {"example_value": value_of(node)}
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in held)
    for node in reversed(nodes):
        graph.graph.erase_node(node)


def _lift_regions(graph: fx.Graph) -> None:
    open_regions: dict[fx.Node, tuple] = {}
    for node in list(graph.nodes):
        name = _function_name(node)
        if name == "_enter_autocast":
            open_regions[node] = tuple(node.args)
        elif name == "_exit_autocast":
            open_regions.pop(node.args[0], None)  # type: ignore[call-overload]
        elif name not in _GRAD_SWITCHES and is_call(node):
            node.meta["autocast"] = tuple(open_regions.values())
    for node in reversed(list(graph.nodes)):  # an exit takes its entry's result
        if _function_name(node) in _REGIONS:
            graph.erase_node(node)


def _move_getitems(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        value = value_of(node)
        is_tuple = isinstance(value, (tuple, list)) and not isinstance(value, torch.Size)
        anchor = node
        for user in list(node.users) if is_tuple and is_call(node) else ():
            if user.op == "call_function" and user.target is operator.getitem:
                anchor.append(user)
                anchor = user


def _unwrap_numbers(graph: fx.Graph, numbers: Collection[int]) -> None:
    output = graph.output_node()
    items = list(output.args[0])  # type: ignore[arg-type]
    for position in numbers:
        carrier = items[position]
        if isinstance(carrier, fx.Node) and carrier.target is torch.scalar_tensor:
            number = carrier.args[0]
            if isinstance(number, fx.Node) and isinstance(value_of(number), torch_api.SYMBOLIC):
                items[position] = number
    output.args = (tuple(items),)


def _fold_fixed_floats(graph: fx.Graph, shape_env: torch_api.ShapeEnv | None) -> None:
    for node in list(graph.nodes):
        value = value_of(node)
        if node.op != "call_method" or node.target != "item" or not isinstance(value, torch.SymFloat):
            continue
        # A data-dependent number stays: eager would check it on each call.
        if isinstance(value.node._expr, sympy.Expr) and torch_api.is_unbacked(value.node._expr):
            continue
        fixed = torch_api.expression(value, shape_env)
        if fixed is not None and fixed.is_number:
            node.replace_all_uses_with(float(fixed))  # type: ignore[arg-type]
            graph.erase_node(node)


def _unwrap_idle_dropout(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _DROPOUTS:
            continue
        given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
        training = given.get("training", given.get("train", True))
        if training is False or (training is True and given.get("p") == 0):
            copied = storages_of([node])
            node.replace_all_uses_with(given["input"])  # type: ignore[arg-type]
            graph.erase_node(node)
            # Fakes of views into the copy are made again, from those of their new base.
            fake_mode = torch_api.fake_mode_of(list(map(value_of, graph.nodes)))
            for view in graph.nodes:
                if is_call(view) and not copied.isdisjoint(storages_of([view])):
                    view.meta["example_value"] = call_on_fakes(view, fake_mode)


def _rename_in_place_results(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        written = node.args[0] if is_call(node) and node.args else None
        if isinstance(written, fx.Node) and _writes_first_argument(node):
            # Comparing as text adds no guard on sizes.
            fakes = [fake for fake in map(value_of, (written, node)) if isinstance(fake, torch.Tensor)]
            views = [f"{storage_of(t)} {[*t.shape]} {[*t.stride()]} {t.storage_offset()}" for t in fakes]
            if len(views) == 2 and views[0] == views[1]:
                node.replace_all_uses_with(written)


def _writes_first_argument(node: fx.Node) -> bool:
    name = target_name(node).rpartition("::")[2]
    if name.startswith("__") and name.endswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    if getattr(node.target, "__module__", "") == "_operator" and name.startswith("i"):
        return name not in ("inv", "invert", "index", "is_", "is_not")
    return name.endswith("_") or node.kwargs.get("inplace") is True
