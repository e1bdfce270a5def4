"""Says in words how a call differs from the captured kind of call that is nearest, and what to pass instead:

    input_ids is int32[1, n], was int64[1, n] at capture (pass input_ids.to(torch.int64))

Sizes that may change are `n`, so that calls of one kind have one text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from piecewise.calls.binder import MISSING, LeafRule, bound_call
from piecewise.calls.structure import flatten_structure
from piecewise.capture.call_rules import leaf_rules
from piecewise.capture.captured_call import CapturedSignature, SignatureList

_MAX_LISTED = 3


def nearest_difference(signatures: SignatureList, args: Any, kwargs: Any) -> str:
    """Describes how a call differs from the nearest signature; empty if no argument alone does."""
    found = [list(_differences(each, args, kwargs)) for each in signatures]
    return "; ".join(min(filter(None, found), key=len, default=[])[:_MAX_LISTED])


def _differences(signature: CapturedSignature, args: Any, kwargs: Any) -> Iterator[str]:
    bound, example = bound_call(signature.binder, args, kwargs), signature.traced.trace.example
    if bound is None:
        return
    rules, names = leaf_rules(signature.traced), signature.binder.leaf_nodes
    rule_of = {name: rules.get(node.index) for name, node in names(example.values)}
    told = []
    for values, leaves in ((example.values, example.leaves), flatten_structure(bound)):
        firsts: dict[int, str] = {}
        nodes = [
            (name, leaves[node.index] if node.index >= 0 else node.value) for name, node in names(values)
        ]
        told.append({name: (_told(value, name, rule_of.get(name), firsts), value) for name, value in nodes})
    for name in dict.fromkeys([*told[0], *told[1]]):
        (was, had), (now, has) = (each.get(name, ("left out", None)) for each in told)
        fix = " (leave it out)" if was == "left out" else ""
        if isinstance(had, torch.Tensor) and isinstance(has, torch.Tensor) and had.dtype is not has.dtype:
            fix = f" (pass {name}.to({had.dtype}))"
        if now != was:
            yield f"{name} is {now}, was {was} at capture{fix}"


def _told(value: Any, name: str, rule: LeafRule | None, firsts: dict[int, str]) -> str:
    """Describes an argument; `firsts` has the first name of each tensor that was described."""
    if value is None or value is MISSING:
        return "left out"
    if isinstance(value, torch.Tensor):
        first = firsts.setdefault(id(value), name)
        static = rule.static if rule is not None else [d for d, size in enumerate(value.shape) if size == 1]
        sizes = ", ".join(str(size) if dim in static else "n" for dim, size in enumerate(value.shape))
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        dense, same = "" if value.is_contiguous() else ", not contiguous", f", as {first}" * (first != name)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]{device}{dense}{same}"
    text = "an int" if type(value) is int and rule is not None and rule.exact is None else repr(value)
    return text if len(text) <= 40 and " at 0x" not in text else f"a {type(value).__name__}"
