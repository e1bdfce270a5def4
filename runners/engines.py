"""Lists the graph engines, and finds the one that serves a device.

Another engine is a folder beside `cuda/` and an entry in `_HOMES`. Engines are imported when first used, so
that settings can name them without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from runners.errors import EngineOfAnotherDevice, UnknownEngine

if TYPE_CHECKING:
    import torch

    from runners.engine import GraphEngine


# Per engine its module, its class, and the kind of device whose work it records; None for any.
_HOMES = {
    "tape": ("runners.tape.tape", "TapeEngine", None),
    "cuda": ("runners.cuda.graph", "CudaEngine", "cuda"),
}
# What a configuration may say: "auto" is the engine of the model's device.
ENGINE_NAMES = ("auto", *_HOMES)


def native_engine(device: torch.device | str) -> GraphEngine:
    """Finds the engine of a device's own kind, which knows the device; the tape where there is none."""
    kind = _kind_of(device)
    return _engine(next((name for name, (*_, served) in _HOMES.items() if served == kind), "tape"))


def engine_for(name: str, device: torch.device | str) -> GraphEngine:
    """Finds the engine of that name for a device; raises `UnknownEngine` or `EngineOfAnotherDevice`."""
    if name == "auto":
        return native_engine(device)
    if name not in _HOMES:
        raise UnknownEngine(name=name, names=_either(ENGINE_NAMES))
    kind, (*_, needed) = _kind_of(device), _HOMES[name]
    if needed not in (None, kind):
        fitting = [each for each, (*_, served) in _HOMES.items() if served in (None, kind)]
        names = _either(["auto", *fitting])
        raise EngineOfAnotherDevice(name=name, names=names, device=device, device_type=needed)
    return _engine(name)


def _kind_of(device: torch.device | str) -> str:
    return str(device).partition(":")[0]


def _either(names: Sequence[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


@cache
def _engine(name: str) -> GraphEngine:
    module, class_name, device_type = _HOMES[name]
    engine: GraphEngine = getattr(import_module(module), class_name)()
    assert (engine.name, engine.device_type) == (name, device_type)
    return engine
