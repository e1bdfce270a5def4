"""Makes drop-in replacements of models: `compile`, `enable`, `disable`, `explain` and `GraphedModule`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piecewise.capture.address_check import AddressReport, check_signatures
from piecewise.capture.analyse import plan_report
from piecewise.capture.call_router import CallRouter
from piecewise.capture.dynamo_calls import DynamoCalls
from piecewise.capture.model_calls import ModelCalls
from piecewise.capture.store import GraphStore
from piecewise.errors.api import AlreadyEnabled, NoModule, NotEnabled
from piecewise.report.report import CaptureReport, PlanReport, Report
from piecewise.settings.config import PiecewiseConfig
from piecewise.verify.report import VerifyReport
from piecewise.verify.verify import verify
from runners.collector import paused_collector


class GraphControls:
    """Captures, checks and reports on the graphs of one callable, however its calls are found.

    Attributes:
        piecewise_config: the settings.
        stats: counters of calls; see `CallStats`.
        traffic: the token counts of calls, for `piecewise buckets plan`; see `TrafficRecorder`.
    """

    def __init__(self, graphs: GraphStore, calls: ModelCalls | DynamoCalls, router: CallRouter) -> None:
        self.piecewise_config = graphs.config
        self.stats, self.traffic = graphs.stats, graphs.traffic
        self._calls, self._router = calls, router
        self._graphs = graphs

    @paused_collector()
    def capture(self, *args: Any, **kwargs: Any) -> CaptureReport:
        """Captures every bucket for calls like this example, with the model in its present state.

        The captures serve calls of the same structure, dtypes and options, at any token count. Captures from
        another state of the model, such as another active adapter, are kept for when that state returns. At
        most `max_signatures` of all kinds are kept; beyond that, the one used longest ago is dropped.

        The model is traced, not run. Boundary ops are not called (captured ones run on a step of zero
        sequences), and no attention metadata is needed.

        Args:
            args, kwargs: the model's own arguments, with two or more tokens.
        Returns:
            The outcome of each bucket; a bucket that could not be captured runs eagerly, with a warning and
            the reason. If graphs are switched off (`disable`, the stance "force_eager"), nothing is captured.
        Raises:
            TraceError: the model cannot be one graph, or tensors are on two devices.
            TokenDimError: the token count cannot be found in the example.
            ConfigError: `boundary="captured"` without a limit that an op needs.
            CaptureError: no bucket could be captured, unless `allow_eager` is set; with `strict`, an op lets
                padding reach real rows, or a bucket fails; with `min_coverage`, too few ops are in graphs.
                Then nothing of this capture is kept. The model itself serves calls as before.
            StateError: `max_signatures` are captured already, a call is in progress, or it is suspended.
        """
        with self._router.exclusive("capture"):
            self._graphs.refuse_suspended("capture")
            return self._graphs.disabled_report() or self._calls.capture(args, kwargs)

    def suspend(self) -> None:
        """Gives all graph memory back, for a trainer that needs it, until `resume()`; calls run eagerly.

        Unlike `release()`, this keeps the traces, which take long to make, and the list of buckets. No tensor
        of the model is held meanwhile, so they may be moved away and back, or rebound. Calling it again
        changes nothing.

        Raises:
            StateError: called inside a call of the same thread. A call in another thread is waited for.
        """
        with self._router.exclusive("suspend"):
            self._graphs.suspend()
            self._calls.let_go()

    def resume(self) -> CaptureReport | None:
        """Captures the buckets again that `suspend()` gave back; None if nothing was captured.

        The model is traced again only if it changed meanwhile: tensors of another kind or device, or Python
        state that the trace read. What was captured under another autocast, default dtype or similar setting
        is captured at the next call under that setting.

        Raises:
            StateError: it is not suspended.
            TraceError, TokenDimError, CaptureError: as for `capture`; everything is then suspended as before.
        """
        with self._router.exclusive("resume"):
            return self._calls.resume()

    def release(self) -> None:
        """Gives all graph memory back and forgets all captures, traces included; also ends a suspension.

        Calls run eagerly until `capture()` is called again.
        """
        with self._router.exclusive("release"):
            self._graphs.drop_graphs()
            self._calls.release()

    def explain(self, *args: Any, **kwargs: Any) -> PlanReport:
        """Returns the plan for calls like this one: segments, reasons, coverage.

        Nothing is captured and no state changes.

        Raises:
            TraceError, TokenDimError: as for `capture`.
        """
        with self._router.exclusive("explain"):
            return plan_report(self._calls.traced(args, kwargs), self.piecewise_config)

    def verify(
        self, *args: Any, make_inputs: Callable[..., Any] | None = None, **kwargs: Any
    ) -> VerifyReport:
        """Compares replays of this call with the model: results and all that it writes; see `verify.py`.

        Captures, counts and changes nothing, except the memory of `outputs="view"` results.

        Args:
            make_inputs: `make_inputs(num_tokens)` returns `(args, kwargs)`, as in `PrefillCase`: then each
                bucket is also compared at the sizes around its edge.
        """
        with self._router.exclusive("verify"):
            return verify(self._calls.model, self._calls.found, self._graphs, args, kwargs, make_inputs)

    def report(self) -> Report:
        """Reports plans, captures and calls so far."""
        return self._graphs.report(self._calls.refused())


# Methods of nn.Module that return the module, so that `piecewise.compile(model).to(device)` stays graphed.
_CHAINED = frozenset(
    "apply bfloat16 cpu cuda double eval float half ipu mtia requires_grad_ share_memory to to_empty"
    " train type xpu".split()
)


class GraphedModule(GraphControls):
    """Replays graphs of a model where that is proven equal, and runs the model itself everywhere else.

    Attributes:
        model: the user's module, unchanged; other attributes of this object are the model's, and so is its
            class for `isinstance`, so that it stands in for the model wherever a module may stand.
    """

    _calls: ModelCalls  # type: ignore[assignment]

    def __init__(
        self, model: nn.Module, config: PiecewiseConfig, *, forward: Callable[..., Any] | None = None
    ) -> None:
        if type(model) is GraphedModule:
            raise NoModule(
                expected="a model without graphs",
                kind="a GraphedModule",
                fix="use it as it is, or pass its attribute 'model'",
            )
        if not isinstance(model, nn.Module):
            raise NoModule(kind=type(model).__name__)
        graphs = GraphStore(PiecewiseConfig.from_any(config))
        self.model = model
        self._forward: Callable[..., Any] = forward if forward is not None else model
        self._in_place = forward is not None
        router = CallRouter(graphs, captures_calls=graphs.config.capture == "lazy")
        super().__init__(graphs, ModelCalls(model, self._forward, graphs), router)

    @property  # type: ignore[misc]
    def __class__(self) -> type[nn.Module]:  # type: ignore[override]
        """Returns the model's class, so that `isinstance` takes this object for the model."""
        return type(vars(self).get("model", self))

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not set yet: a failed __init__
            raise AttributeError(name)
        value = getattr(self.model, name)
        return partial(self._chained, value) if name in _CHAINED else value

    def _chained(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return self if result is self.model else result

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the model's attribute, matching `__getattr__`, except for this object's own few."""
        if name in self.__dict__ or "_graphs" not in self.__dict__:  # the last that __init__ sets
            object.__setattr__(self, name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.model, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(GraphedModule), *vars(self), *dir(self.model)})

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """Copies or pickles only the model and the settings: a graph is valid only at its own addresses."""
        forward = self._forward if self._in_place else None
        return _copied, (self.model, self.piecewise_config, forward)

    def __repr__(self) -> str:
        return f"GraphedModule({type(self.model).__name__}, captured={list(self.stats.captured)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `model(*args, **kwargs)`, as a replay where a captured bucket serves the call."""
        compiler = torch.compiler
        # is_compiling() is also true while another thread traces; such a trace is waited for.
        if compiler.is_dynamo_compiling() or (compiler.is_compiling() and self._router.owner is None):
            return self._forward(*args, **kwargs)
        return self._router.serve(self._calls, self._forward, args, kwargs)

    def refresh(self) -> CaptureReport | None:
        """Captures everything again, after weights moved or the model changed; None if nothing was captured.

        The model is captured in its present state; captures from other states are forgotten. The old graphs
        and their memory are freed first, so two pools never exist at once. The model is traced again if its
        tensors are of other kinds or Python state that calls compare has changed; and if calls find no change
        at all, since the change must then be one that no call can find. `release()` and `capture()` trace in
        every case.

        Raises:
            PiecewiseError: as for `capture`; the next `refresh()` captures what is still missing.
        """
        with self._router.exclusive("refresh"):
            self._graphs.refuse_suspended("refresh")
            return self._calls.refresh()

    def check_addresses(self) -> AddressReport:
        """Compares the model with its captures more deeply than calls do, by tracing it again.

        Each call compares the tensors that graphs read (which object, address, dtype, geometry), and the
        Python state that Dynamo guards. This check also finds changes that no guard names: of state read by
        functions which Dynamo was told to treat as constant. It takes as long as a trace does.
        Neither sees Python state that a custom op reads inside its kernel; `verify()` does.

        Raises:
            StateError: it is suspended, or a call of the same thread is in progress.
        """
        with self._router.exclusive("check_addresses"):
            self._graphs.refuse_suspended("check_addresses")
            return check_signatures(self._graphs.signatures, self._calls.trace)


def graphs_of(graphed: GraphControls) -> GraphStore:
    """Returns the store of a model's graphs, for tools that take a call apart."""
    return graphed._graphs


def compile(
    model: nn.Module, config: PiecewiseConfig | str | Path | None = None, /, **overrides: Any
) -> GraphedModule:
    """Returns a drop-in replacement of `model` that replays graphs; the model itself is not changed.

    Args:
        config: a `PiecewiseConfig`, or the path of a TOML bucket file.
        overrides: fields of `PiecewiseConfig` by name.
    Raises:
        ConfigError: any setting is wrong; the message lists every problem.
    """
    return GraphedModule(model, PiecewiseConfig.from_any(config, **overrides))


def explain(model: nn.Module, *args: Any, config: PiecewiseConfig | None = None, **kwargs: Any) -> PlanReport:
    """Returns the plan for `model(*args, **kwargs)`, without capture."""
    return GraphedModule(model, PiecewiseConfig.from_any(config)).explain(*args, **kwargs)


def enable(
    model: nn.Module, config: PiecewiseConfig | str | Path | None = None, /, **overrides: Any
) -> GraphedModule:
    """Swaps `model.forward` for one that replays graphs, so callers that hold `model` replay graphs, too.

    Returns:
        The `GraphedModule`, for `capture`, `report` and the rest; `disable(model)` undoes it.
    Raises:
        StateError: the model is enabled already.
    """
    if isinstance(model.__dict__.get("forward"), _SwappedForward):
        raise AlreadyEnabled(model=type(model).__name__)
    original = model.__dict__.get("forward")
    graphed = GraphedModule(model, PiecewiseConfig.from_any(config, **overrides), forward=model.forward)
    model.forward = _SwappedForward(graphed, original)
    return graphed


def disable(model: nn.Module) -> nn.Module:
    """Undoes `enable` and gives the graph memory back; returns the model."""
    swapped = model.__dict__.get("forward")
    if not isinstance(swapped, _SwappedForward):
        raise NotEnabled(model=type(model).__name__)
    swapped.graphed.release()
    if swapped.original is None:
        del model.forward
    else:
        model.forward = swapped.original
    return model


class _SwappedForward:
    def __init__(self, graphed: GraphedModule, original: Any) -> None:
        self.graphed, self.original = graphed, original
        self.__wrapped__ = graphed._forward  # so that inspect.signature(model.forward) is unchanged

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.graphed(*args, **kwargs)


def _copied(model: nn.Module, config: PiecewiseConfig, forward: Callable[..., Any] | None) -> GraphedModule:
    return GraphedModule(model, config, forward=forward)
