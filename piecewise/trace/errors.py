"""What a trace refuses, and Dynamo's own errors in this project's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from piecewise import torch_api
from piecewise.calls.structure import Structure
from runners.errors import TraceError

_MAX_DETAIL = 400
_SUBCLASS = "; it may be one of the code of tensor subclasses, for model.{} is a {}"


# Of modules of a library, by package.
_KNOWN_CHANGES = {
    "bitsandbytes": "load 8-bit weights with llm_int8_threshold=0.0, which keeps no outliers in Python, and "
    "call the model once before capture(), which lays the weights out; or load 4-bit weights"
}


def fix_for_change(model: nn.Module, path: str) -> str:
    """What to do about Python state that forward changes."""
    modules = [module for name, module in model.named_modules() if f"{path}.".startswith(f"model.{name}.")]
    package = type(modules[-1]).__module__.partition(".")[0] if modules else ""
    general = "keep it in a registered buffer and write that in place (self.count.add_(1)), or return it"
    return _KNOWN_CHANGES.get(package, general)


def refuse_flags(leaves: Sequence[Any], names: Mapping[int, str]) -> None:
    """The twins that were traced are plain tensors; forward would have answered otherwise for others."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.requires_grad or isinstance(leaf, nn.Parameter)):
            raise TraceError(
                f"input '{names[index]}'",
                expected="a tensor that does not require grad, as forward asks for that",
                got=f"a {type(leaf).__name__} with requires_grad={leaf.requires_grad}",
                rule="a trace is used only for calls that it is valid for [I10]",
                fix="pass a.detach(), or keep forward from asking",
            )


def refuse_opaque(node: Structure, given: Sequence[Any]) -> None:
    for child in node.children:
        refuse_opaque(child, given)
    known = (type(None), bool, float, complex, str, bytes, torch.dtype, torch.device, type, torch.Size)
    if (
        node.kind == "const"
        and not isinstance(node.value, known)
        and not any(node.value is item for item in given)
    ):
        if type(node.value).__module__.split(".")[0] == "enum" or hasattr(type(node.value), "__members__"):
            return
        raise TraceError(
            f"forward returns an object of type {type(node.value).__name__}",
            expected="tensors, numbers and containers of them",
            rule="the result is rebuilt on each call; an object with state of its own would be stale [I7]",
            fix="return its tensors, register it with torch.utils._pytree, "
            "or pass use_cache=False to a transformers model",
        )


def _first_words(lines: Sequence[str]) -> str:
    """What Dynamo says went wrong: its headline, and the sentence that names the construct."""
    for start in ("Explanation:", "Developer debug context:"):
        detail = next((line[len(start) :].strip() for line in lines if line.startswith(start)), "")
        if detail:
            return f"{lines[0]}: {detail[:_MAX_DETAIL]}"
    return lines[0] if lines else ""


def translated(error: Exception, held: Sequence[tuple[str, torch.Tensor]] = ()) -> TraceError:
    """Dynamo's error as one of ours.

    Args:
        held: the model's tensors, by path.
    """
    cause: BaseException = error
    while cause.__cause__ is not None and not str(cause):
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).strip().splitlines() if line.strip()]
    where = next((line for line in reversed(lines) if line.startswith("File ")), None)
    said = {word: next((line for line in lines if line.startswith(word)), "") for word in ("Rule:", "Fix:")}
    if all(said.values()):  # an error of ours, raised by code that Dynamo was tracing through
        rule, fix = (text.partition(":")[2].strip() for text in said.values())
        return TraceError(lines[0].partition(": ")[2] or lines[0], rule=rule, fix=fix)
    return TraceError(
        f"forward cannot be traced: {_first_words(lines) or type(cause).__name__}"
        + (f" ({where})" if where else ""),
        rule="forward must be one graph: no graph breaks [I10]",
        fix="the cause names the construct; torch.compile(model, fullgraph=True) fails on the same line"
        + next(
            (
                _SUBCLASS.format(path, type(each).__name__)
                for path, each in held
                if torch_api.is_wrapper(each)
            ),
            "",
        ),
    )
