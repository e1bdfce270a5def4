"""`compile`, `enable`, `explain` and `GraphedModule`: an existing model in, a drop-in replacement out.

A call takes one of two ways, and the results are the same on both [I6]:

    bind · match signature · bucket ──▶ StepPlan.replay          (a replay)
                │
                └── any doubt ──▶ the model itself, eagerly       (a fallback, counted with its reason)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from piecewise.calls.binder import CallBinder, bound_call, describe_call, is_plain_leaf
from piecewise.calls.form import Binders
from piecewise.calls.structure import flatten_structure
from piecewise.calls.unseen import UnseenCalls
from piecewise.capture.call_router import CallRouter
from piecewise.capture.store import GraphStore
from piecewise.errors.report import CoverageError
from piecewise.report.report import CaptureReport, PlanReport, Report
from piecewise.settings.config import PiecewiseConfig
from runners.collector import paused_collector
from runners.errors import ConfigError, PiecewiseError, StateError
from runners.mode import in_capture_window
from runners.stats import FallbackReason

if TYPE_CHECKING:
    from piecewise.capture.address_check import AddressReport
    from piecewise.capture.captured_call import CapturedSignature
    from piecewise.trace.trace import ExampleCall
    from piecewise.verify.report import VerifyReport


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
        graphs = GraphStore(config)
        self.model = model
        self.piecewise_config = graphs.config
        self.stats, self.traffic = graphs.stats, graphs.traffic
        self._forward: Callable[..., Any] = forward if forward is not None else model
        self._in_place = forward is not None
        self._to_refresh: list[tuple[ExampleCall, tuple[int, ...]]] = []
        self._unseen = UnseenCalls(graphs.config.max_signatures)
        self._router = CallRouter(graphs)
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
        return self._router.serve(self._find_plan, self._forward, args, kwargs, self._find_variant)

    def _find_plan(self, args: Any, kwargs: Any) -> Any:
        """(signature, step plan, token count, leaves) where a plan serves this call, else the reason why
        not."""
        graphs = self._graphs
        if graphs.is_suspended:
            return FallbackReason.SUSPENDED
        is_lazy = self.piecewise_config.capture == "lazy" and not graphs.is_released
        may_capture = is_lazy or in_capture_window()
        if not graphs.signatures and not may_capture:
            return FallbackReason.RELEASED if graphs.is_released else FallbackReason.NOT_CAPTURED
        signature, matched = graphs.signatures.matching(args, kwargs, current=in_capture_window())
        if signature is None or (may_capture and not signature.may_serve(*matched)):
            if bound_call(self._binder, args, kwargs) is None:
                return FallbackReason.UNSEEN_SIGNATURE  # the model says what is wrong with the call
            added = self._unseen_signature(args, kwargs, may_capture)
            if isinstance(added, FallbackReason):
                return added
            signature, matched = added, added.match(added.binder.bind(*args, **kwargs))
            if matched is None:
                return FallbackReason.UNSEEN_SIGNATURE
        if not graphs.has_bucket(signature, matched[0]) and not signature.is_current():
            # No replay would tell that it is of another state of the model than now.
            other, matched_by_it = graphs.signatures.matching(args, kwargs, current=True)
            if other is not None:
                graphs.signatures.prefer(other)
                signature, matched = other, matched_by_it
        return graphs.plan_for(signature, *matched, may_capture=may_capture)

    def _find_variant(self, args: Any, kwargs: Any) -> Any:
        """As `_find_plan`, of another signature for the call, that was captured of the model as it is; None
        where there is none."""
        signatures = self._graphs.signatures
        if len(signatures) < 2:
            return None
        signature, matched = signatures.matching(args, kwargs, current=True)
        if signature is None:
            return None
        signatures.prefer(signature)
        return self._graphs.plan_for(signature, *matched, may_capture=in_capture_window(), is_new=False)

    @property
    def _binder(self) -> CallBinder:
        """What binds calls that are traced now: hooks may have come or gone."""
        return self._binders.for_now()

    @cached_property
    def _binders(self) -> Binders:
        return Binders(self.model, self._forward)

    def _unseen_signature(
        self, args: Any, kwargs: Any, may_capture: bool
    ) -> CapturedSignature | FallbackReason:
        """A new signature for the call, captured inside a capture window, or why there is none."""
        graphs, config = self._graphs, self.piecewise_config
        outdated = self._to_replace(args, kwargs) if may_capture else []
        is_full = not outdated and len(graphs.signatures) >= config.max_signatures
        text = describe_call(args, kwargs)
        self._unseen.note(text, f"beyond max_signatures = {config.max_signatures}" if is_full else "")
        if not all(map(is_plain_leaf, flatten_structure((args, kwargs))[1])):
            return FallbackReason.UNSUPPORTED_INPUT
        if not may_capture:
            return FallbackReason.UNSEEN_SIGNATURE if graphs.signatures else FallbackReason.NOT_CAPTURED
        refused = FallbackReason.SIGNATURE_LIMIT if is_full else self._unseen.refusal_for(text)
        if refused is not None:
            return refused
        try:
            signature = self._added(args, kwargs, instead_of=outdated)
        except CoverageError as error:
            self._unseen.refuse(text, FallbackReason.LOW_COVERAGE, error)
            raise
        except PiecewiseError as error:
            if config.strict:
                raise
            self._unseen.refuse(text, FallbackReason.CAPTURE_FAILED, error)
            return FallbackReason.CAPTURE_FAILED
        if in_capture_window():
            graphs.capture(signature, graphs.missing(signature))
        return signature

    @paused_collector()
    def capture(self, *args: Any, **kwargs: Any) -> CaptureReport:
        """Captures every bucket for calls like this example: same structure, dtypes and options, any token
        count, with the model in the state that it is in.

        What was captured in another state, such as with another adapter active, is kept for its return, up to
        `max_signatures` of all kinds; then the one used longest ago gives way.

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
            CaptureError: with `strict`, an op lets padding reach real rows, or a bucket fails; with
                `min_coverage`, too few ops are in graphs. Then nothing of this capture is kept.
            StateError: `max_signatures` are captured already, a call is in progress, or it is suspended.
        """
        with self._router.exclusive("capture"):
            self._graphs.refuse_suspended("capture")
            with torch.no_grad():
                signature, _ = self._graphs.signatures.matching(args, kwargs, current=True)
                outdated = self._to_replace(args, kwargs) if signature is None else []
            if signature is None:
                if not outdated and len(self._graphs.signatures) >= self.piecewise_config.max_signatures:
                    raise StateError(
                        f"capture() of signature {len(self._graphs.signatures) + 1}",
                        expected=f"at most {self.piecewise_config.max_signatures} signatures",
                        got="one more kind of call",
                        rule="graphs are bounded in number [I10]",
                        fix="raise max_signatures, or make the calls alike",
                    )
                signature = self._added(args, kwargs, instead_of=outdated)
            elif signature.suspended is not None:  # it waited for this state of the model
                signature.resume()
            self._graphs.signatures.prefer(signature)
            return self._graphs.capture(signature, self._graphs.missing(signature))

    def refresh(self) -> CaptureReport | None:
        """Captures again what was captured, after weights moved or the model changed; None where nothing was.

        All is captured with the model in the state that it is in; what was captured in others is forgotten.
        The old graphs and their memory go first, so two pools never exist at once.
        """
        with self._router.exclusive("refresh"):
            self._graphs.refuse_suspended("refresh")
            # Kept until done: a model that fails now can be refreshed again when it is whole.
            signatures = self._graphs.signatures.captured_order()
            self._to_refresh += [(s.traced.trace.example, s.buckets) for s in signatures]
            self._drop_graphs()
            report = None
            while self._to_refresh:
                example, buckets = self._to_refresh[0]
                with torch.no_grad():  # variants of one kind of call are one now
                    signature, _ = self._graphs.signatures.matching(
                        example.args, example.kwargs, current=True
                    )
                if signature is None:
                    signature = self._graphs.add(self._traced(example))
                try:
                    report = self._graphs.capture(
                        signature, [bucket for bucket in buckets if bucket not in signature.served]
                    )
                except BaseException:
                    self._graphs.remove(signature)
                    raise
                del self._to_refresh[0]
            return report

    def suspend(self) -> None:
        """Gives all graph memory back, for a trainer that needs it, until `resume()`; calls run eagerly.

        `release()` forgets what was captured; this keeps the traces, which are what takes long, and the list
        of buckets. Nothing of the model's tensors is held meanwhile, so they may be moved away and back, or
        be bound anew. Calling it again changes nothing.

        Raises:
            StateError: from inside a call of the same thread. A call in another thread is waited for.
        """
        with self._router.exclusive("suspend"):
            self._graphs.suspend()

    def resume(self) -> CaptureReport | None:
        """Captures the buckets again that `suspend()` gave back; None where nothing was captured.

        A trace is made again only where the model changed meanwhile: tensors of another kind or device, or
        Python state that the trace read. What was captured under another autocast, default dtype or the like
        than those of now comes back at the next call under them.

        Raises:
            StateError: it is not suspended.
            TraceError, TokenDimError, CaptureError: as for `capture`; everything is suspended as before then.
        """
        with self._router.exclusive("resume"):
            self.__dict__.pop("_binders", None)  # forward's defaults may be others now
            return self._graphs.resume(lambda old: self._traced(old.traced.trace.example))

    def release(self) -> None:
        """Gives all graph memory back and forgets what was captured, traces included; calls run eagerly until
        `capture()` is called again. Ends a suspension, too."""
        with self._router.exclusive("release"):
            self._drop_graphs()
            self._to_refresh.clear()
            self._graphs.is_released = True

    def check_addresses(self) -> AddressReport:
        """Compares the model with what was captured, deeper than calls do: the model is traced again.

        Each call compares the tensors that graphs read (which object, address, dtype, geometry), and the
        Python state that Dynamo guards. This finds also what no guard names: state that is read by functions
        which Dynamo was told to take for constant. It takes as long as a trace does.
        Neither sees Python state that a custom op reads inside its kernel: `verify()` does.

        Raises:
            StateError: it is suspended, or a call of the same thread is in progress.
        """
        from piecewise.capture.address_check import check_signatures
        from piecewise.capture.analyse import trace_model

        with self._router.exclusive("check_addresses"):
            self._graphs.refuse_suspended("check_addresses")
            retrace = partial(trace_model, self.model, forward=self._forward, config=self.piecewise_config)
            return check_signatures(self._graphs.signatures, retrace)

    def _traced(self, example: ExampleCall) -> CapturedSignature:
        from piecewise.capture.captured_call import trace_signature
        from piecewise.trace.trace import ExampleCall

        if example.binder is not self._binder:  # hooks came or went since it was made
            example = ExampleCall.from_call(self._binder, example.args, example.kwargs)
        return trace_signature(self.model, example, forward=self._forward, config=self.piecewise_config)

    def _to_replace(self, args: Any, kwargs: Any) -> list[CapturedSignature]:
        limit = self.piecewise_config.max_signatures
        return self._graphs.signatures.to_replace(self.model, args, kwargs, max_kept=limit)

    def _added(self, args: Any, kwargs: Any, *, instead_of: list[CapturedSignature]) -> CapturedSignature:
        """A new signature for the call; graphs that it replaces go first."""
        self.__dict__.pop("_binders", None)  # forward's defaults may be others now
        example = self._example(args, kwargs)
        for old in instead_of:
            old.reset()
            old.check = None  # it holds the weights, which may be laid out anew
        try:
            return self._graphs.add(self._traced(example))
        finally:
            for old in instead_of:
                self._graphs.remove(old)

    def _example(self, args: Any, kwargs: Any) -> ExampleCall:
        from piecewise.trace.trace import ExampleCall

        return ExampleCall.from_call(self._binder, args, kwargs)

    def _drop_graphs(self) -> None:
        self._graphs.drop_graphs()
        self.__dict__.pop("_binders", None)  # forward's defaults may be others now
        self._unseen.forget_refusals()

    def explain(self, *args: Any, **kwargs: Any) -> PlanReport:
        """The plan for calls like this one: segments, reasons, coverage. Nothing is captured and no state
        changes.

        Raises:
            TraceError, TokenDimError: as for `capture`.
        """
        with self._router.exclusive("explain"):
            from piecewise.capture.analyse import trace_model
            from piecewise.lowering.lowering import Lowering
            from piecewise.report.startup_times import StartupTimes
            from piecewise.streams.streams import StreamSchedules

            example = self._example(args, kwargs)
            traced = trace_model(self.model, example, forward=self._forward, config=self.piecewise_config)
            plan = traced.planned(self.piecewise_config, StartupTimes(), move_weights=False)
            lowering = Lowering(self.piecewise_config).preview(plan, self.piecewise_config.buckets)
            streams = StreamSchedules(
                plan, lowering, num_rows=traced.token.example_num_tokens,
                num_streams=self.piecewise_config.num_streams,
            )  # fmt: skip
            return PlanReport.of(plan, example.names, lowering, streams.report())

    def verify(
        self, *args: Any, make_inputs: Callable[..., Any] | None = None, **kwargs: Any
    ) -> VerifyReport:
        """Compares replays of this call with the model: results and all that it writes; see `verify.py`.

        Nothing is captured, counted or left changed, but for the memory of `outputs="view"` results.

        Args:
            make_inputs: `make_inputs(num_tokens)` returns `(args, kwargs)`, as in `PrefillCase`: then each
                bucket is compared at the sizes around its edge, too.
        """
        from piecewise.verify.verify import verify

        with self._router.exclusive("verify"):
            return verify(self.model, self._forward, self._graphs, args, kwargs, make_inputs)

    def report(self) -> Report:
        """Plans, captures and calls so far."""
        return self._graphs.report(self._unseen.listed())


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
