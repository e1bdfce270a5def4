"""Lists the graph engines, and finds the one that serves a device.

Another engine is a folder beside `cuda/` and an entry in `_HOMES`. Engines are imported when first used, so
that settings can name them without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from runners.errors import EngineOfAnotherDevice, UnknownEngine

if TYPE_CHECKING:
    import torch

    from runners.engine import GraphEngine


class _Home(NamedTuple):
    """Names an engine's class, its module, and the kind of device whose work it records; None for any."""

    module: str
    class_name: str
    device_type: str | None = None


_HOMES = {
    "tape": _Home("runners.tape.tape", "TapeEngine"),
    "cuda": _Home("runners.cuda.graph", "CudaEngine", "cuda"),
}
# What a configuration may say: "auto" is the engine of the model's device.
ENGINE_NAMES = ("auto", *_HOMES)


def native_engine(device: torch.device | str) -> GraphEngine:
    """Finds the engine of a device's own kind, which knows the device; the tape where there is none."""
    kind = _kind_of(device)
    return _engine(next((name for name, home in _HOMES.items() if home.device_type == kind), "tape"))


def engine_for(name: str, device: torch.device | str) -> GraphEngine:
    """Finds the engine of that name for a device; raises `UnknownEngine` or `EngineOfAnotherDevice`."""
    if name == "auto":
        return native_engine(device)
    if name not in _HOMES:
        raise UnknownEngine(name=name, names=_either(ENGINE_NAMES))
    kind, needed = _kind_of(device), _HOMES[name].device_type
    if needed not in (None, kind):
        fitting = [each for each, home in _HOMES.items() if home.device_type in (None, kind)]
        raise EngineOfAnotherDevice(
            name=name, names=_either(["auto", *fitting]), device=device, device_type=needed
        )
    return _engine(name)


def _kind_of(device: torch.device | str) -> str:
    return str(device).partition(":")[0]


def _either(names: Sequence[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


@cache
def _engine(name: str) -> GraphEngine:
    home = _HOMES[name]
    engine: GraphEngine = getattr(import_module(home.module), home.class_name)()
    assert (engine.name, engine.device_type) == (name, home.device_type)
    return engine
