"""Which adapters of a model are active, in words for a report.

Nothing is decided by it: what a trace read of an adapter is compared like all else. Layers with adapters are
known by what PEFT's have: `active_adapters`, `disable_adapters` and `merged_adapters`.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def adapters_in_use(model: nn.Module) -> str:
    """Such as "adapters a, b", "adapter a (merged)" or "no adapter"; empty for a model without any."""
    found: dict[str, None] = {}
    has_adapters = False
    for module in model.modules():
        layer: Any = module
        active, merged = getattr(layer, "active_adapters", None), getattr(layer, "merged_adapters", None)
        disabled = getattr(layer, "disable_adapters", None)
        if not isinstance(active, (list, tuple)) or not isinstance(disabled, bool):
            continue  # on a model of transformers these are methods
        has_adapters = True
        found |= {f"{name} (merged)": None for name in merged or ()}
        if not merged and not disabled:
            found |= dict.fromkeys(map(str, active))
    names = ", ".join(found)
    return f"adapter{'s' if len(found) > 1 else ''} {names}" if found else "no adapter" * has_adapters
