"""Knows the kinds of calls of one model: binds calls, and traces new kinds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from piecewise import torch_api
from piecewise.calls.binder import Binders, CallBinder, bound_call, describe_call, is_plain_leaf
from piecewise.calls.structure import flatten_structure
from piecewise.calls.unseen import UnseenCalls
from piecewise.capture.analyse import TracedModel, example_of_size, trace_model
from piecewise.capture.captured_call import CapturedSignature, Cut, FoundCall, Matched
from piecewise.capture.new_kinds import nearest_difference
from piecewise.capture.one_token import one_token_refusal
from piecewise.capture.store import GraphStore
from piecewise.errors.capture import TooManySignatures
from piecewise.errors.report import CoverageError
from piecewise.report.progress import steps_bar
from piecewise.report.report import CaptureReport
from piecewise.report.startup_times import StartupTimes
from piecewise.trace.state.state import adapters_in_use
from piecewise.trace.trace import ExampleCall
from runners.collector import paused_collector
from runners.errors import PiecewiseError
from runners.mode import in_capture_window
from runners.state.state_check import StateFacts
from runners.stats import FallbackReason


class ModelCalls:
    """Traces the calls of a model, within the limits of its settings; `unseen` lists those not traced."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], store: GraphStore) -> None:
        self.model, self._forward, self._store = model, forward, store
        self._config = store.config
        self.signatures = store.signatures
        self.unseen = UnseenCalls(self._config.max_signatures)
        self._binders: Binders | None = None

    @property
    def _binder(self) -> CallBinder:
        """Returns the binder for calls that are traced now: hooks may have come or gone."""
        if self._binders is None:
            self._binders = Binders(self.model, self._forward)
        return self._binders.for_now()

    def example(self, args: Any, kwargs: Any) -> ExampleCall:
        """Binds a call and flattens its arguments."""
        return ExampleCall.from_call(self._binder, args, kwargs)

    def traced(self, args: Any, kwargs: Any) -> TracedModel:
        return self.trace(self.example(args, kwargs))

    def found(self, args: Any, kwargs: Any) -> FoundCall:
        return self.signatures, lambda: self._forward(*args, **kwargs), args, kwargs

    def trace(self, example: ExampleCall) -> TracedModel:
        return trace_model(self.model, example, forward=self._forward, config=self._config)

    def new_kind(
        self, args: Any, kwargs: Any, *, may_capture: bool
    ) -> tuple[CapturedSignature, Matched] | FallbackReason:
        """Adds a signature for the call and captures it inside a capture window, or returns why not."""
        because = self._store.first.because
        if bound_call(self._binder, args, kwargs) is None:
            return because(FallbackReason.UNSEEN_SIGNATURE, "")  # the model itself raises the error
        limit = self._config.max_signatures
        outdated = self._outdated(args, kwargs) if may_capture else []
        is_full = not outdated and len(self.signatures) >= limit
        text = describe_call(args, kwargs)

        def why() -> str:
            full = f"beyond max_signatures = {limit}" if is_full else ""
            return "; ".join(filter(None, (full, nearest_difference(self.signatures, args, kwargs))))

        detail = self.unseen.note(text, why)
        if not all(map(is_plain_leaf, flatten_structure((args, kwargs))[1])):
            return FallbackReason.UNSUPPORTED_INPUT
        if not may_capture:
            reason = FallbackReason.UNSEEN_SIGNATURE if self.signatures else FallbackReason.NOT_CAPTURED
            return because(reason, detail)
        refused = FallbackReason.SIGNATURE_LIMIT if is_full else self.unseen.refusal_for(text)
        if refused is not None:
            return because(refused, detail)
        try:
            signature = self._added(args, kwargs, instead_of=outdated)
        except CoverageError as error:
            self.unseen.refuse(text, FallbackReason.LOW_COVERAGE, error)
            raise
        except PiecewiseError as error:
            if self._config.strict:
                raise
            self.unseen.refuse(text, FallbackReason.CAPTURE_FAILED, error)
            return because(FallbackReason.CAPTURE_FAILED, str(error).splitlines()[0])
        if in_capture_window():
            self._store.capture(signature, self._store.missing(signature))
        matched = signature.match(signature.binder.bind(*args, **kwargs))
        return (signature, matched) if matched is not None else FallbackReason.UNSEEN_SIGNATURE

    def capture(self, args: Any, kwargs: Any) -> CaptureReport:
        """Captures every bucket that the call's signature lacks; traces the signature now if it is new."""
        with torch.no_grad():
            signature, _ = self.signatures.matching(args, kwargs, current=True)
            outdated = self._outdated(args, kwargs) if signature is None else []
        if signature is None:
            limit = self._config.max_signatures
            if not outdated and len(self.signatures) >= limit:
                raise TooManySignatures(number=len(self.signatures) + 1, limit=limit)
            signature = self._added(args, kwargs, instead_of=outdated)
        elif signature.suspended is not None:  # suspended until this model state
            signature.end_suspension()
        self.signatures.prefer(signature)
        return self._store.capture_listed(signature)

    def refresh(self) -> CaptureReport | None:
        """Refreshes the store, and lets refused kinds of calls be tried again."""
        self.forget()
        return self._store.refresh(self._retraced)

    def resume(self) -> CaptureReport | None:
        self._binders = None  # forward's defaults may have changed
        return self._store.resume(self._retraced)

    def release(self) -> None:
        self._store.is_released = True
        self.forget()

    def let_go(self) -> None:
        """Holds no tensors beside the store's signatures."""

    def refused(self) -> Mapping[str, int]:
        return self.unseen.listed()

    def forget(self) -> None:
        """Lets every kind of call be tried again, with forward as it is by then."""
        self._binders = None
        self.unseen.forget_refusals()

    def _retraced(self, old: CapturedSignature) -> CapturedSignature:
        example = old.traced.trace.example
        if example.binder is not self._binder:  # hooks came or went since the binder was made
            example = self.example(example.args, example.kwargs)
        return self._signature(example)

    def _outdated(self, args: Any, kwargs: Any) -> list[CapturedSignature]:
        limit = self._config.max_signatures
        return self.signatures.to_replace(self.model, args, kwargs, max_kept=limit)

    def _added(self, args: Any, kwargs: Any, *, instead_of: list[CapturedSignature]) -> CapturedSignature:
        self._binders = None  # forward's defaults may have changed
        example = self.example(args, kwargs)
        for old in instead_of:
            old.reset()
            old.check = None  # the check holds the weights, which may be packed anew
        try:
            return self._store.add(self._signature(example))
        finally:
            for old in instead_of:
                self._store.remove(old)

    @paused_collector()
    def _signature(self, example: ExampleCall) -> CapturedSignature:
        """Traces and cuts the example's kind of call; captures nothing yet."""
        config, times = self._config, StartupTimes()
        if config.lowering == "inductor":
            with times.timed("lowering"):
                torch_api.start_compile_workers(example.leaves)
        ratio = config.max_padding_ratio
        is_asked = config.buckets[0] == 1 or (ratio is not None and config.buckets[0] > ratio)
        steps = ("tracing", "tracing one token") if is_asked else ("tracing",)
        with steps_bar(steps, enabled=config.progress) as begin:
            begin()
            with times.timed("trace"):
                traced = self.trace(example)

            def trace_one_token() -> tuple[str, StateFacts]:
                with times.timed("trace"):
                    return one_token_refusal(traced, self.model, forward=self._forward, config=config)

            if is_asked:
                begin()
            one_token = trace_one_token() if is_asked else None

        def retrace(bucket: int) -> TracedModel:
            return self.trace(example_of_size(traced, bucket))

        cut = Cut(traced, traced.planned(config, times, move_weights=True))
        adapters = adapters_in_use(self.model)
        return CapturedSignature([cut], trace_one_token, retrace, times, adapters, *(one_token or ()))
