"""`compile`, `enable`, `explain` and `GraphedModule`: an existing model in, a drop-in replacement out.

A call takes one of two ways, and the results are the same on both [I6]:

    bind · match signature · bucket ──▶ StepPlan.replay          (a replay)
                │
                └── any doubt ──▶ the model itself, eagerly       (a fallback, counted with its reason)
"""

from __future__ import annotations

import difflib
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import boundary_ops
from piecewise.config import PiecewiseConfig
from piecewise.graph_store import MAX_LISTED, GraphStore
from piecewise.report import CaptureReport, PlanReport, Report
from piecewise.signature import CallBinder, describe_call, is_plain_leaf
from piecewise.structure import flatten_structure
from runners.bound_steps import StateChanged
from runners.errors import ConfigError, PiecewiseError, StateError
from runners.mode import in_capture_window, is_eager_only, is_transforming
from runners.stats import FallbackReason

if TYPE_CHECKING:
    from piecewise.signatures import CapturedSignature
    from piecewise.trace import ExampleCall
    from piecewise.verify_report import VerifyReport


class GraphedModule:
    """A model whose calls replay graphs where that is proven equal, and run the model itself everywhere else.

    Attributes:
        model: the user's module, unchanged; other attributes of this object are the model's.
        piecewise_config: the settings.
        stats: counters of calls; see `CallStats`.
        traffic: the token counts of calls, for `piecewise buckets plan`; see `TrafficRecorder`.
    """

    def __init__(
        self, model: nn.Module, config: PiecewiseConfig, *, forward: Callable[..., Any] | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "argument 'model'", expected="a torch.nn.Module", got=type(model).__name__,
                rule="graphs read weights through their modules", fix="wrap the function in an nn.Module",
            )  # fmt: skip
        _check_boundary_ops(config)
        graphs = GraphStore(config)
        self.model = model
        self.piecewise_config = graphs.config
        self.stats, self.traffic = graphs.stats, graphs.traffic
        self._forward: Callable[..., Any] = forward if forward is not None else model
        self._in_place = forward is not None
        self._binder: CallBinder | None = None
        self._to_refresh: list[tuple[ExampleCall, tuple[int, ...]]] = []
        self._untraceable: OrderedDict[str, str] = OrderedDict()
        self._unseen: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._is_capturing = False
        self._graphs = graphs

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not set yet: a failed __init__
            raise AttributeError(name)
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the model's attribute, as reading gives the model's, but for the few of this object."""
        if name in self.__dict__ or "_graphs" not in self.__dict__:  # the last one that __init__ makes
            object.__setattr__(self, name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.model, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what is unpickled, has the model and the settings; graphs do not outlive addresses."""
        forward = self._forward if self._in_place else None
        return _copied, (self.model, self.piecewise_config, forward)

    def train(self, mode: bool = True) -> GraphedModule:
        """The model's own `train`; returns this object, so that `piecewise.compile(model).eval()` is
        graphed."""
        self.model.train(mode)
        return self

    def eval(self) -> GraphedModule:
        """As `train(False)`."""
        return self.train(False)

    def __repr__(self) -> str:
        return f"GraphedModule({type(self.model).__name__}, captured={list(self.stats.captured)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own call: `model(*args, **kwargs)`, replayed where a captured bucket serves it."""
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        if self._owner == threading.get_ident():
            codes = FallbackReason.REENTRANT_CALL, FallbackReason.CAPTURE_IN_PROGRESS
            return self._eager(codes[self._is_capturing], args, kwargs)
        with self._lock:
            self._owner = threading.get_ident()
            try:
                found = self._find_plan(args, kwargs)
                if not isinstance(found, FallbackReason):
                    signature, steps, num_tokens, leaves = found
                    try:
                        result = signature.rebuild(steps.replay(leaves, num_tokens))
                    except StateChanged as changed:
                        found = self._graphs.note_change(changed.change)
                    else:
                        self.stats.count_replay(steps.padded_num_tokens)
                        return result
            finally:
                self._owner = None
        return self._eager(found, args, kwargs)

    def _eager(self, reason: FallbackReason, args: Any, kwargs: Any) -> Any:
        self.stats.count_eager(reason)
        return self._forward(*args, **kwargs)

    def _find_plan(self, args: Any, kwargs: Any) -> Any:
        """(signature, step plan, token count, leaves) where a plan serves this call, else the reason why
        not."""
        if is_eager_only():
            return FallbackReason.EAGER_ONLY
        if torch.is_grad_enabled():
            return FallbackReason.GRAD_ENABLED
        if is_transforming():
            return FallbackReason.NESTED_TRACING
        graphs = self._graphs
        is_lazy = self.piecewise_config.capture == "lazy" and not graphs.is_released
        may_capture = is_lazy or in_capture_window()
        if not graphs.signatures and not may_capture:
            return FallbackReason.RELEASED if graphs.is_released else FallbackReason.NOT_CAPTURED
        try:
            bound = self._bind(args, kwargs)
        except TypeError:
            return FallbackReason.UNSEEN_SIGNATURE  # the model says what is wrong with the call
        position, matched = self._matching(bound)
        if matched is None or (may_capture and not graphs.signatures[position].global_state.check()):
            return self._unseen_signature(args, kwargs, may_capture)
        return graphs.plan_for(graphs.signatures[position], *matched, may_capture=may_capture)

    def _matching(self, bound: tuple) -> tuple[int, tuple[int, list[Any]] | None]:
        """The signature of a call, rather one of the present global state; gradients must be disabled."""
        found: tuple[int, tuple[int, list[Any]] | None] = (-1, None)
        for position, signature in enumerate(self._graphs.signatures):
            matched = signature.match(bound)
            if matched is not None:
                if signature.global_state.check():
                    return position, matched
                found = found if found[1] is not None else (position, matched)
        return found

    def _bind(self, args: Any, kwargs: Any) -> tuple:
        if self._binder is None:
            forward = self._forward if self._in_place else self.model.forward
            self._binder = CallBinder(forward)
        return self._binder.bind(*args, **kwargs)

    def _unseen_signature(self, args: Any, kwargs: Any, may_capture: bool) -> Any:
        text = describe_call(args, kwargs)
        if text in self._unseen or len(self._unseen) < MAX_LISTED:
            self._unseen[text] = self._unseen.get(text, 0) + 1
        if not all(map(is_plain_leaf, flatten_structure((args, kwargs))[1])):
            return FallbackReason.UNSUPPORTED_INPUT
        if not may_capture:
            return FallbackReason.UNSEEN_SIGNATURE if self._graphs.signatures else FallbackReason.NOT_CAPTURED
        if len(self._graphs.signatures) >= self.piecewise_config.max_signatures:
            return FallbackReason.SIGNATURE_LIMIT
        if not self._can_trace(text, args, kwargs):
            return FallbackReason.CAPTURE_FAILED
        signature = self._graphs.signatures[-1]
        if in_capture_window():
            self._graphs.capture(signature, self._graphs.missing(signature))
        matched = signature.match(self._bind(args, kwargs))
        if matched is None:
            return FallbackReason.UNSEEN_SIGNATURE
        return self._graphs.plan_for(signature, *matched, may_capture=True)

    def _can_trace(self, text: str, args: Any, kwargs: Any) -> bool:
        """Adds the call's signature; false where it cannot be traced, which is noted and not tried again."""
        if text in self._untraceable or len(self._untraceable) >= self.piecewise_config.max_signatures:
            return False
        try:
            self._add_signature(args, kwargs)
        except PiecewiseError as error:
            if self.piecewise_config.strict:
                raise
            self._untraceable[text] = str(error)
            return False
        return True

    def capture(self, *args: Any, **kwargs: Any) -> CaptureReport:
        """Captures every bucket for calls like this example: same structure, dtypes and options, any token
        count.

        The model is traced, not run; boundary ops are not called (captured ones on a step of zero sequences),
        and no attention metadata is needed.

        Args:
            args, kwargs: the model's own arguments, with two or more tokens.
        Returns:
            How each bucket went; a bucket that could not be captured runs eagerly, with the reason in here.
        Raises:
            TraceError: the model cannot be one graph, or tensors are on two devices.
            TokenDimError: the token count cannot be found in the example.
            ConfigError: `boundary="captured"` without a limit that an op needs.
            CaptureError: with `strict`, an op lets padding reach real rows, or a bucket fails.
            StateError: `max_signatures` are captured already, or a call is in progress.
        """
        with self._exclusive("capture"):
            with torch.no_grad():
                position, matched = self._matching(self._bind(args, kwargs))
                is_known = matched is not None and self._graphs.signatures[position].global_state.check()
            if is_known and self._graphs.signatures[position].find_change() is not None:
                self._renew(position)
            elif not is_known:
                if len(self._graphs.signatures) >= self.piecewise_config.max_signatures:
                    raise StateError(
                        f"capture() of signature {len(self._graphs.signatures) + 1}",
                        expected=f"at most {self.piecewise_config.max_signatures} signatures",
                        got="one more kind of call",
                        rule="graphs are bounded in number [I10]",
                        fix="raise max_signatures, or make the calls alike",
                    )
                self._add_signature(args, kwargs)
                position = len(self._graphs.signatures) - 1
            signature = self._graphs.signatures[position]
            return self._graphs.capture(signature, self._graphs.missing(signature))

    def refresh(self) -> CaptureReport | None:
        """Captures again what was captured, after weights moved or the model changed; None where nothing was.

        The old graphs and their memory go first, so two pools never exist at once.
        """
        with self._exclusive("refresh"):
            # Kept until done: a model that fails now can be refreshed again when it is whole.
            self._to_refresh += [(s.traced.trace.example, s.buckets) for s in self._graphs.signatures]
            self._drop_graphs()
            report = None
            while self._to_refresh:
                example, buckets = self._to_refresh[0]
                self._graphs.signatures.append(self._traced(example))
                del self._to_refresh[0]
                report = self._graphs.capture(self._graphs.signatures[-1], list(buckets))
            return report

    def _renew(self, position: int) -> None:
        """Traces a signature again whose trace is out of date; its graphs go first."""
        old = self._graphs.signatures[position]
        old.reset()
        self._graphs.signatures[position] = self._traced(old.traced.trace.example)

    def release(self) -> None:
        """Gives all graph memory back; calls run eagerly until `capture()` is called again."""
        with self._exclusive("release"):
            self._drop_graphs()
            self._to_refresh.clear()
            self._graphs.is_released = True

    def check_addresses(self) -> str | None:
        """What differs now from what was recorded, in words; None where nothing does."""
        for signature in self._graphs.signatures:
            change = signature.find_change()
            if change is not None:
                return change.detail
        return None

    def _exclusive(self, what: str) -> _Exclusive:
        return _Exclusive(self, what)

    def _traced(self, example: ExampleCall) -> CapturedSignature:
        from piecewise.signatures import trace_signature

        return trace_signature(self.model, example, forward=self._forward, config=self.piecewise_config)

    def _add_signature(self, args: Any, kwargs: Any) -> None:
        self._graphs.signatures.append(self._traced(self._example(args, kwargs)))

    def _example(self, args: Any, kwargs: Any) -> ExampleCall:
        from piecewise.trace import ExampleCall

        self._bind(args, kwargs)
        assert self._binder is not None
        return ExampleCall.from_call(self._binder, args, kwargs)

    def _drop_graphs(self) -> None:
        self._graphs.drop_graphs()
        self._graphs.signatures.clear()
        self._untraceable.clear()

    def explain(self, *args: Any, **kwargs: Any) -> PlanReport:
        """The plan for calls like this one: segments, reasons, coverage. Nothing is captured and no state
        changes.

        Raises:
            TraceError, TokenDimError: as for `capture`.
        """
        with self._exclusive("explain"):
            from piecewise.compiler import trace_model
            from piecewise.startup_times import StartupTimes

            example = self._example(args, kwargs)
            traced = trace_model(self.model, example, forward=self._forward, config=self.piecewise_config)
            traced.probe(self.piecewise_config.buckets, strict=False)
            plan = traced.planned(self.piecewise_config, StartupTimes(), move_weights=False)
            return PlanReport.of(plan, example.names)

    def verify(
        self, *args: Any, make_inputs: Callable[..., Any] | None = None, **kwargs: Any
    ) -> VerifyReport:
        """Compares replays of this call with the model: results and all that it writes; see `verify.py`.

        Nothing is captured, counted or left changed, but for the memory of `outputs="view"` results.

        Args:
            make_inputs: `make_inputs(num_tokens)` returns `(args, kwargs)`, as in `PrefillCase`: then each
                bucket is compared at the sizes around its edge, too.
        """
        from piecewise.verify import verify

        with self._exclusive("verify"):
            return verify(self, args, kwargs, make_inputs)

    def report(self) -> Report:
        """Plans, captures and calls so far."""
        plans = tuple(PlanReport.of(s.plan, s.traced.trace.example.names) for s in self._graphs.signatures)
        graphs = self._graphs
        return Report(
            plans,
            tuple(map(graphs.report_of, graphs.signatures)),
            self.stats.snapshot(),
            {self._describe_unseen(text): count for text, count in self._unseen.items()},
            tuple(graphs.changes),
            graphs.engine_name,
            graphs.left_out,
        )

    def _describe_unseen(self, text: str) -> str:
        error = self._untraceable.get(text)
        return f"{text}, cannot be traced: {error.splitlines()[0]}" if error else text


class _Exclusive:
    """Holds the module's lock for a capture; a call from inside one, or a capture from inside a call, is
    refused."""

    def __init__(self, graphed: GraphedModule, what: str) -> None:
        self._graphed, self._what = graphed, what

    def __enter__(self) -> None:
        if self._graphed._owner == threading.get_ident():
            raise StateError(
                f"{self._what}() inside a call of the same module",
                rule="capture replaces the memory that the running call uses",
                fix="call it between calls",
            )
        self._graphed._lock.acquire()
        self._graphed._owner, self._graphed._is_capturing = threading.get_ident(), True

    def __exit__(self, *_: object) -> None:
        self._graphed._owner, self._graphed._is_capturing = None, False
        self._graphed._lock.release()


def compile(
    model: nn.Module, config: PiecewiseConfig | str | Path | None = None, /, **overrides: Any
) -> GraphedModule:
    """A drop-in replacement of `model` that replays graphs; the model itself is not changed.

    Args:
        config: a `PiecewiseConfig`, or the path of a TOML bucket file.
        overrides: fields of `PiecewiseConfig` by name.
    Raises:
        ConfigError: any setting is wrong; the message lists every problem.
    """
    return GraphedModule(model, PiecewiseConfig.from_any(config, **overrides))


def explain(model: nn.Module, *args: Any, config: PiecewiseConfig | None = None, **kwargs: Any) -> PlanReport:
    """The plan for `model(*args, **kwargs)`, without capture."""
    return GraphedModule(model, config if config is not None else PiecewiseConfig()).explain(*args, **kwargs)


def _copied(model: nn.Module, config: PiecewiseConfig, forward: Callable[..., Any] | None) -> GraphedModule:
    return GraphedModule(model, config, forward=forward)


def _check_boundary_ops(config: PiecewiseConfig) -> None:
    """Refuses names in `boundary_ops` that are not registered, with the ones that are."""
    known = [op.name for op in boundary_ops.registered()]
    for name in config.boundary_ops or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"boundary op '{name}' in 'boundary_ops'",
                expected=f"a registered op ({', '.join(known) or 'none is'})",
                got="an unknown name" + (f"; did you mean '{near[0]}'?" if near else ""),
                rule="graphs are cut at registered ops",
                fix="declare it with boundary_ops.define or boundary_ops.register first",
            )
