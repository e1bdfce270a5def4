"""Reads names, source places and fakes of traced nodes, and runs a node on its fakes.

A traced node has its fakes, or sizes, in ``meta["example_value"]``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx

from piecewise import torch_api
from piecewise.ir.tensors import storage_of, tensors_in


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
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and isinstance(value_of(node.args[0]), (tuple, list))
    )


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
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = path.replace("L['model']", "").replace("['", ".").replace("']", "").replace("._modules", "")
    # A forward wrapped by a bound method is reached through a private attribute of the same module.
    return re.sub(r"\._\w+(\.\w+)*?\.__self__", "", path).strip(".")


def source_line(node: fx.Node, *, outside: str | None = None) -> str:
    """Returns the user's line, ``modeling.py:42, in forward: x = x[-1:]``; skips the folder `outside`."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    places = [
        index
        for index, line in enumerate(lines)
        if line.startswith("File ") and (outside is None or outside not in line)
    ]
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
