"""Reads names, source places and fakes of traced nodes, and runs a node on its fakes.

A traced node has its fakes, or sizes, in ``meta["example_value"]``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx

from piecewise import torch_api
from piecewise.ir.tensors import map_tensors, storage_of, tensors_in


def value_of(node: fx.Node) -> Any:
    """Returns the node's fakes and sizes; None for a node that was added later or makes nothing."""
    return node.meta.get("example_value")


def fakes_of(nodes: Iterable[fx.Node]) -> Iterator[torch.Tensor]:
    """Yields the fakes of nodes' tensors."""
    return (tensor for node in nodes for tensor in tensors_in(value_of(node)))


def has_fakes(*nodes: fx.Node) -> bool:
    """Whether one of the nodes is a tensor or holds some."""
    return any(True for _ in fakes_of(nodes))


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """Collects the memory of nodes' tensors."""
    return set(map(storage_of, fakes_of(nodes)))


def is_call(node: fx.Node) -> bool:
    return node.op.startswith("call")


def is_tuple_item(node: fx.Node) -> bool:
    """Whether the node takes an item of another node's tuple."""
    source = node.args[0] if node.op == "call_function" and node.target is operator.getitem else None
    return isinstance(source, fx.Node) and isinstance(value_of(source), (tuple, list))


def makes_empty(node: fx.Node) -> bool:
    """Whether the node allocates memory without writing it."""
    return target_name(node).rpartition("::")[2].startswith(("empty", "new_empty"))


def target_name(node: fx.Node) -> str:
    """Returns the op's name: ``linear``, ``view``, ``toy::attn_inplace``."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch_api.OpOverload):
        return target._schema.name
    if isinstance(target, torch_api.OpOverloadPacket):
        return target._qualified_op_name
    return getattr(target, "__name__", str(target))


def module_path(node: fx.Node) -> str:
    """Returns the innermost module that called this op, as a user writes it: ``layers.0.self_attn``."""
    if not (stack := node.meta.get("nn_module_stack")):
        return ""
    # The module itself: its name here, in a Dynamo call of it, or of the forward that `enable` swapped.
    root = r"^(L\['\w+'\](\[\d+\])?|G\['forward\d+'\]\.__self__)"
    path = re.sub(root, "", list(stack.values())[-1][0])
    path = path.replace("['", ".").replace("']", "").replace("._modules", "")
    # A forward wrapped by a bound method is reached through a private attribute of the same module.
    return re.sub(r"\._\w+(\.\w+)*?\.__self__", "", path).strip(".")


def source_line(node: fx.Node, *, outside: str | None = None) -> str:
    """Returns the user's line, ``modeling.py:42, in forward: x = x[-1:]``; skips the folder `outside`."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    files = [(index, line) for index, line in enumerate(lines) if line.startswith("File ")]
    places = [index for index, line in files if outside is None or outside not in line]
    if not places:
        return ""
    where, *code = lines[places[-1] : places[-1] + 2]
    return ": ".join([where.removeprefix("File "), *filter(None, code)])


def whereabouts(node: fx.Node) -> str:
    """Describes the module and the line that call the op, as far as known."""
    return ", ".join(filter(None, (module_path(node), source_line(node))))


def call_on_fakes(node: fx.Node, fake_mode: Any) -> Any:
    """Runs the node on its arguments' fakes; leaves no guard or symbol behind."""
    return run_on_fakes(node, fake_mode, nullcontext())[0]


def run_on_fakes(node: fx.Node, fake_mode: Any, mode: Any) -> tuple[Any, set[sympy.Basic]]:
    """Runs the node as `call_on_fakes`, under `mode`; also returns what the node asked of sizes."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    with (
        autocast_of(node),
        torch_api.asked_of_sizes(getattr(fake_mode, "shape_env", None)) as asked,
        torch_api.python_dispatcher(),
        torch.inference_mode(False),
        torch.no_grad(),
        fake_mode if fake_mode is not None else nullcontext(),
        mode,
    ):
        call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        return call(*(args[1:] if node.op == "call_method" else args), **kwargs), asked


@contextmanager
def autocast_of(node: fx.Node) -> Iterator[None]:
    """Opens a normalized node's autocast regions again; casts of weights run again, to be seen."""
    before = torch.is_autocast_cache_enabled()
    with ExitStack() as regions:
        for arguments in node.meta.get("autocast", ()):
            regions.enter_context(torch.autocast(*arguments))
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(before)


def copy_calls(
    graph: fx.Graph,
    values: dict[fx.Node, Any],
    place: fx.Node,
    *,
    like: Mapping[fx.Node, Any] | None,
    fake_mode: Any,
    meta_of: Callable[[fx.Node], dict[str, Any]],
) -> dict[fx.Node, Any]:
    """Copies the calls of `graph` in front of `place`; returns the fake of each of its nodes in the copy.

    A node's result and its memory follow from the op and from the sizes, strides and shared memory of its
    arguments. A copy whose arguments agree in these with a known one takes that one's fakes, moved to the
    memory of its own arguments, and runs no op.

    Args:
        values: placeholder → argument; the copies are added.
        like: fakes of a copy with equivalent arguments; None runs each node.
        meta_of: the copy's ``meta``, without its fake.
    """
    fakes = {node: value_of(given) if isinstance(given, fx.Node) else given for node, given in values.items()}
    # Tensor or memory of the other copy → the one in this copy.
    twins: dict[int, torch.Tensor] = {}
    memory: dict[int, torch.Tensor] = {}
    taken: dict[int, int] = {}
    for node, value in fakes.items():
        if like is not None and isinstance(value, torch.Tensor):
            there, here = storage_of(like[node]), storage_of(value)
            twins[id(like[node])] = value
            if storage_of(memory.setdefault(there, value)) != here or taken.setdefault(here, there) != there:
                like = None  # memory is shared in one of the copies alone

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in twins:
            twins[id(tensor)] = torch_api.fake_twin(tensor, memory.get(storage_of(tensor)))
            memory.setdefault(storage_of(tensor), twins[id(tensor)])
        return twins[id(tensor)]

    with place.graph.inserting_before(place):
        for node in filter(is_call, graph.nodes):
            copy = values[node] = place.graph.node_copy(node, lambda old: values[old])
            copy.meta = meta_of(node)
            old = like[node] if like is not None else None
            if like is None or any(map(torch_api.holds_constant, tensors_in(old))):
                made = call_on_fakes(copy, fake_mode)
                for tensor, new in zip(tensors_in(old), tensors_in(made), strict=False):
                    twins[id(tensor)] = memory[storage_of(tensor)] = new
            else:
                made = map_tensors(old, twin)
            copy.meta["example_value"] = fakes[node] = made
    return fakes
