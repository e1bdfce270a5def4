"""What a trace read from the model: tensors by recorded path, and plain values that were baked into the
graph.

Dynamo names each thing it read by a source such as ``L['model']._modules['layers']._modules['0'].eps``.
The last step of that path gives an owner (a dict or an object) and a key, so the current value is one
dictionary look-up away and needs no `nn.Module.__getattr__`. Run time compares these with what the trace
saw [I4, I10].
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from runners.state_check import StateRef

_VALUE_GUARDS = frozenset(
    {"CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH", "NONE_MATCH", "BOOL_MATCH", "TYPE_MATCH", "NN_MODULE",
     "CLOSURE_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH", "NOT_NONE_MATCH"}
)  # fmt: skip
# What a guard of kind TYPE_MATCH saw was only the type; the value may change freely (a list, a config
# object).
_IDENTITY_FREE = frozenset({"TYPE_MATCH", "NOT_NONE_MATCH"})


def readable_path(source: str) -> str:
    """``L['model']._modules['layers']._modules['0']._parameters['weight']`` → ``model.layers.0.weight``."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    text = re.sub(r"^[LG]\['([^']*)'\]", r"\1", text)
    return re.sub(r"\['?([^'\]]*)'?\]", r".\1", text)


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The local and global names that sources are written in."""

    local_names: Mapping[str, Any]
    global_names: Mapping[str, Any]

    def evaluate(self, source: str) -> Any:
        return eval(source, {"L": self.local_names, "G": self.global_names})  # Dynamo's own source text


def resolve(source: str, scope: Scope) -> StateRef | None:
    """The (owner, key) behind a source; None where the path does not end in an attribute, key or index."""
    try:
        tree = ast.parse(source, mode="eval").body
        if isinstance(tree, ast.Subscript):
            owner = scope.evaluate(ast.unparse(tree.value))
            key = ast.literal_eval(tree.slice)
            return (
                StateRef(owner, key, readable_path(source))
                if isinstance(owner, (dict, list, tuple))
                else None
            )
        if isinstance(tree, ast.Attribute):
            owner = scope.evaluate(ast.unparse(tree.value))
            names = getattr(owner, "__dict__", None)
            if isinstance(names, dict) and tree.attr in names:
                return StateRef(names, tree.attr, readable_path(source))
    except (SyntaxError, ValueError, KeyError, IndexError, AttributeError, TypeError, NameError):
        return None
    return None


def values_read(guards: Sequence[tuple[str, str]], scope: Scope, *, root: str) -> list[tuple[StateRef, Any]]:
    """Plain values under `root` that the trace burned in, each with the value it saw.

    Tensors are left out (they are graph inputs with addresses of their own), and so are submodules, hooks and
    `training`, which `module_facts` lists for every module, read or not.
    """
    found: dict[tuple[int, Any], tuple[StateRef, Any]] = {}
    for source, kind in guards:
        if kind not in _VALUE_GUARDS or kind in _IDENTITY_FREE or not source.startswith(root):
            continue
        ref = resolve(source, scope)
        if ref is None or isinstance(ref.owner, tuple):
            continue
        value = ref.owner[ref.key]
        if not isinstance(value, (torch.Tensor, nn.Module)):
            found[id(ref.owner), ref.key] = (ref, value)
    return list(found.values())


def module_facts(
    model: nn.Module, *, skip_root_forward: bool
) -> tuple[list[tuple[StateRef, Any]], list[dict]]:
    """Facts of every module that change what a call computes, read by the trace or not.

    Returns:
        (ref, value) of each submodule slot, `training` flag and instance-level `forward`; and the forward
        hook tables.
    """
    facts: list[tuple[StateRef, Any]] = []
    hooks: list[dict] = []
    for path, module in model.named_modules():
        name = f"model.{path}" if path else "model"
        for key, child in module._modules.items():
            facts.append((StateRef(module._modules, key, f"{name}.{key}"), child))
        facts.append((StateRef(module.__dict__, "training", f"{name}.training"), module.training))
        if path or not skip_root_forward:
            facts.append(
                (StateRef(module.__dict__, "forward", f"{name}.forward"), module.__dict__.get("forward"))
            )
        if path or not skip_root_forward:
            hooks += [module._forward_hooks, module._forward_pre_hooks]
    return facts, hooks
