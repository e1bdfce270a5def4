"""Says in words how a call differs from the captured kind of call that is nearest, and what to pass instead:

    the dtype of input_ids is torch.int32, was torch.int64 at capture (pass input_ids.to(torch.int64))

Texts hold no sizes that follow the token count, so that calls of one kind have one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from piecewise.calls.binder import MISSING, CallBinder, bound_call
from piecewise.calls.structure import PLAIN, Structure, flatten_structure
from piecewise.capture.call_rules import leaf_rules
from piecewise.capture.captured_call import CapturedSignature, SignatureList

_MAX_LISTED = 3
_FIXES = {"dtype": "{name}.to({had})", "device": "{name}.to('{had}')", "contiguity": "{name}.contiguous()"}


def nearest_difference(signatures: SignatureList, args: Any, kwargs: Any) -> str:
    """Describes how a call differs from the nearest signature; empty if no argument alone does."""
    found = [list(_differences(each, args, kwargs)) for each in signatures]
    return "; ".join(min(filter(None, found), key=len, default=[])[:_MAX_LISTED])


def _differences(signature: CapturedSignature, args: Any, kwargs: Any) -> Iterator[str]:
    bound, example = bound_call(signature.binder, args, kwargs), signature.traced.trace.example
    if bound is None:
        return
    rules = leaf_rules(signature.traced)
    captured = _named(signature.binder, example.values, example.leaves)
    given = _named(signature.binder, *flatten_structure(bound))
    for name in dict.fromkeys([*captured, *given]):
        (index, had, facts), (_, has, new) = captured.get(name, _ABSENT), given.get(name, _ABSENT)
        rule = rules.get(index)
        if facts and new:
            sizes = rule.static if rule and new["number of dims"] == facts["number of dims"] else {}
            facts |= {f"size of dim {dim}": size for dim, size in sizes.items()}
            new |= {f"size of dim {dim}": has.shape[dim] for dim in sizes}
            for what in (what for what in facts if new[what] != facts[what]):
                fix = f" (pass {_FIXES[what].format(name=name, had=facts[what])})" if what in _FIXES else ""
                yield f"the {what} of {name} is {new[what]}, was {facts[what]} at capture{fix}"
        elif not _is_same(had, has) and not (rule and rule.exact is None and type(had) is type(has)):
            fix = " (leave it out)" if had is None or had is MISSING else ""
            yield f"{name} is {_shown(has)}, was {_shown(had)} at capture{fix}"


# An argument's leaf index (-1 for a constant), its value, and what calls compare of a tensor.
_Argument = tuple[int, Any, dict[str, Any]]
_ABSENT: _Argument = (-1, MISSING, {})


def _named(binder: CallBinder, values: Structure, leaves: Sequence[Any]) -> dict[str, _Argument]:
    found: dict[str, _Argument] = {}
    firsts: dict[int, str] = {}
    for name, node in binder.leaf_nodes(values):
        value = leaves[node.index] if node.index >= 0 else node.value if node.kind == "const" else node
        facts = {}
        if isinstance(value, torch.Tensor):
            facts = {"dtype": value.dtype, "device": value.device, "number of dims": value.dim()}
            first = firsts.setdefault(id(value), name)
            facts["contiguity"] = value.is_contiguous()
            facts["tensor"] = "its own" if first == name else f"that of {first}"
        found[name] = node.index, value, facts
    return found


def _is_same(had: Any, has: Any) -> bool:
    return has is had or type(has) is type(had) and isinstance(has, (*PLAIN, int, Structure)) and has == had


def _shown(value: Any) -> str:
    if value is None or value is MISSING:
        return "left out"
    if isinstance(value, torch.Tensor):
        return f"a tensor ({str(value.dtype).removeprefix('torch.')})"
    text = repr(value)
    return text if len(text) <= 40 and " at 0x" not in text else f"a {type(value).__name__}"
