"""Names a model's active adapters, for a report.

A trace compares adapters like all state, but accepts an equal new list of names after a switch. Layers with
adapters have PEFT's attributes: `active_adapters`, `disable_adapters` and `merged_adapters`.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def has_adapters(module: nn.Module) -> bool:
    """Whether a module is a layer with adapters; on a transformers model these attributes are methods."""
    names = getattr(module, "active_adapters", None)
    return isinstance(names, (list, tuple)) and isinstance(getattr(module, "disable_adapters", None), bool)


def adapters_in_use(model: nn.Module) -> str:
    """Writes "adapters a, b", "adapter a (merged)" or "no adapter"; empty for a model without any."""
    active: dict[str, None] = {}
    merged: dict[str, None] = {}
    layers: list[Any] = [module for module in model.modules() if has_adapters(module)]
    for layer in layers:
        merged |= dict.fromkeys(map(str, getattr(layer, "merged_adapters", None) or ()))
        active |= {} if layer.disable_adapters else dict.fromkeys(map(str, layer.active_adapters))
    found = [f"{name} (merged)" for name in merged] + [name for name in active if name not in merged]
    if not found:
        return "no adapter" if layers else ""
    return f"adapter{'s' if len(found) > 1 else ''} {', '.join(found)}"
