"""`enable` and `disable`: graphed calls for those who hold the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from piecewise.api import GraphedModule
from piecewise.settings.config import PiecewiseConfig
from runners.errors import StateError


def enable(
    model: nn.Module, config: PiecewiseConfig | str | Path | None = None, /, **overrides: Any
) -> GraphedModule:
    """Like `compile`, in place: `model.forward` is swapped, so callers that hold `model` replay graphs too.

    Returns:
        The `GraphedModule`, for `capture`, `report` and the rest; `disable(model)` undoes it.
    Raises:
        StateError: the model is enabled already.
    """
    if isinstance(model.__dict__.get("forward"), _SwappedForward):
        raise StateError(
            f"{type(model).__name__} is enabled already",
            rule="one GraphedModule per model in place",
            fix="call piecewise.disable(model) first",
        )
    original = model.__dict__.get("forward")
    graphed = GraphedModule(model, PiecewiseConfig.from_any(config, **overrides), forward=model.forward)
    model.forward = _SwappedForward(graphed, original)
    return graphed


def disable(model: nn.Module) -> nn.Module:
    """Undoes `enable` and gives the graph memory back; returns the model."""
    swapped = model.__dict__.get("forward")
    if not isinstance(swapped, _SwappedForward):
        raise StateError(
            f"{type(model).__name__} is not enabled",
            rule="disable undoes enable",
            fix="call it with the model that was passed to piecewise.enable",
        )
    swapped.graphed.release()
    if swapped.original is None:
        del model.forward
    else:
        model.forward = swapped.original
    return model


class _SwappedForward:
    """What `enable` puts into `model.forward`."""

    def __init__(self, graphed: GraphedModule, original: Any) -> None:
        self.graphed, self.original = graphed, original
        self.__wrapped__ = graphed._forward  # keeps inspect.signature(model.forward) forward's own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.graphed(*args, **kwargs)
