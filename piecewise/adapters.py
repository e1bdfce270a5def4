"""Which adapters of a model are active, in words for a report.

Nothing is decided by it: what a trace read of an adapter is compared like all else. Layers with adapters are
known by what PEFT's have: `active_adapters`, `disable_adapters` and `merged_adapters`.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def adapters_in_use(model: nn.Module) -> str:
    """Such as "adapters a, b", "adapter a (merged)" or "no adapter"; empty for a model without any."""
    active: dict[str, None] = {}
    merged: dict[str, None] = {}
    has_adapters = False
    for module in model.modules():
        layer: Any = module
        names, is_disabled = getattr(layer, "active_adapters", None), getattr(layer, "disable_adapters", None)
        if not isinstance(names, (list, tuple)) or not isinstance(is_disabled, bool):
            continue  # on a model of transformers these are methods
        has_adapters = True
        merged |= dict.fromkeys(map(str, getattr(layer, "merged_adapters", None) or ()))
        active |= {} if is_disabled else dict.fromkeys(map(str, names))
    found = [f"{name} (merged)" for name in merged] + [name for name in active if name not in merged]
    if not found:
        return "no adapter" if has_adapters else ""
    return f"adapter{'s' if len(found) > 1 else ''} {', '.join(found)}"
