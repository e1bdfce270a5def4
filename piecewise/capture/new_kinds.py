"""Says in words how a call differs from the captured kind of call that is nearest, and what to pass instead:

    the dtype of input_ids is torch.int32, was torch.int64 at capture (pass input_ids.to(torch.int64))

Texts hold no sizes that follow the token count, so that calls of one kind have one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from piecewise.calls.binder import MISSING, LeafRule, bound_call
from piecewise.calls.structure import PLAIN, Structure, flatten_structure
from piecewise.capture.call_rules import leaf_rules
from piecewise.capture.captured_call import CapturedSignature, SignatureList

_MAX_LISTED = 3
_ABSENT = Structure("const", value=MISSING)


def nearest_difference(signatures: SignatureList, args: Any, kwargs: Any) -> str:
    """Describes how a call differs from the nearest signature; empty if no argument alone does."""
    found = [list(_differences(each, args, kwargs)) for each in signatures]
    return "; ".join(min(filter(None, found), key=len, default=[])[:_MAX_LISTED])


def _differences(signature: CapturedSignature, args: Any, kwargs: Any) -> Iterator[str]:
    bound, example = bound_call(signature.binder, args, kwargs), signature.traced.trace.example
    if bound is None:
        return
    rules = leaf_rules(signature.traced)
    values, leaves = flatten_structure(bound)
    captured, given = (dict(signature.binder.leaf_nodes(each)) for each in (example.values, values))
    for name in dict.fromkeys([*captured, *given]):
        node, new = captured.get(name, _ABSENT), given.get(name, _ABSENT)
        value = leaves[new.index] if new.index >= 0 else new.value
        rule = rules.get(node.index)
        expected = example.leaves[node.index] if rule else node.value
        if rule is not None and isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
            yield from _broken(rule, value, name)
        elif rule is not None and rule.exact is None and type(value) is type(expected):
            continue  # an int that may change
        elif (node.kind, node.keys) != (new.kind, new.keys) or not _is_same(expected, value):
            fix = " (leave it out)" if expected is None or expected is MISSING else ""
            yield f"{name} is {_shown(value)}, was {_shown(expected)} at capture{fix}"
    twins, others = _twins(given, leaves), _twins(captured, example.leaves)
    for name in twins if twins.keys() == others.keys() else ():
        if twins[name] != others[name]:
            is_one = twins[name] != name
            first, number = (twins if is_one else others)[name], "one tensor" if is_one else "two tensors"
            yield f"{first} and {name} are {number}, unlike at capture"


def _twins(nodes: Mapping[str, Structure], leaves: Sequence[Any]) -> dict[str, str]:
    """Maps each tensor's name to the first name of the same tensor."""
    firsts: dict[int, str] = {}
    tensors = {name: id(leaves[node.index]) for name, node in nodes.items() if node.kind == "tensor"}
    return {name: firsts.setdefault(tensor, name) for name, tensor in tensors.items()}


def _broken(rule: LeafRule, value: torch.Tensor, name: str) -> Iterator[str]:
    dense = f" (pass {name}.contiguous())" if rule.contiguous else ""
    sizes = ((f"size of dim {dim}", value.shape[dim], size, "") for dim, size in rule.static.items())
    for what, has, had, fix in (
        ("dtype", value.dtype, rule.dtype, f" (pass {name}.to({rule.dtype}))"),
        ("device", value.device, rule.device, f" (pass {name}.to('{rule.device}'))"),
        ("number of dims", value.dim(), rule.rank, ""),
        ("contiguity", value.is_contiguous(), rule.contiguous, dense),
        *(sizes if value.dim() == rule.rank else ()),
    ):
        if has != had:
            yield f"the {what} of {name} is {has}, was {had} at capture{fix}"


def _is_same(captured: Any, value: Any) -> bool:
    is_equal = type(value) is type(captured) and isinstance(value, PLAIN) and value == captured
    return value is captured or is_equal


def _shown(value: Any) -> str:
    if value is None or value is MISSING:
        return "left out"
    if isinstance(value, torch.Tensor):
        return f"a tensor ({str(value.dtype).removeprefix('torch.')})"
    text = repr(value)
    return text if len(text) <= 40 and " at 0x" not in text else f"a {type(value).__name__}"
