"""Lists the graph engines, and finds the one that serves a device.

An engine for another kind of device is a folder beside `cuda/` and one entry here.
"""

from __future__ import annotations

import torch

from runners.cuda.graph import CudaEngine
from runners.engine import GraphEngine
from runners.errors import EngineOfAnotherDevice, UnknownEngine
from runners.tape.tape import TapeEngine

ENGINES: dict[str, GraphEngine] = {engine.name: engine for engine in (TapeEngine(), CudaEngine())}
# What a configuration may say: "auto" is the engine of the model's device.
ENGINE_NAMES = ("auto", *ENGINES)


def native_engine(device: torch.device | str) -> GraphEngine:
    """Finds the engine of a device's own kind, which knows the device; the tape where there is none."""
    kind = torch.device(device).type
    return next((each for each in ENGINES.values() if each.device_type == kind), ENGINES["tape"])


def engine_for(name: str, device: torch.device | str) -> GraphEngine:
    """Finds the graph engine of that name, one of `ENGINE_NAMES`, for a model on the device.

    Raises:
        UnknownEngine
        EngineOfAnotherDevice
    """
    if name == "auto":
        return native_engine(device)
    if name not in ENGINES:
        raise UnknownEngine(
            name=name, names=f"{', '.join(map(repr, ENGINE_NAMES[:-1]))} or {ENGINE_NAMES[-1]!r}"
        )
    engine = ENGINES[name]
    if engine.device_type not in (None, torch.device(device).type):
        raise EngineOfAnotherDevice(name=name, device=device, device_type=engine.device_type)
    return engine
