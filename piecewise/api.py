"""`compile`, `enable`, `explain` and `GraphedModule`: an existing model in, a drop-in replacement out.

A call takes one of two ways, and the results are the same on both [I6]:

    bind · match signature · bucket ──▶ StepPlan.replay          (a replay)
                │
                └── any doubt ──▶ the model itself, eagerly       (a fallback, counted with its reason)
"""

from __future__ import annotations

import difflib
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import boundary_ops
from piecewise.config import PiecewiseConfig
from piecewise.report import CaptureReport, PlanReport, Report
from piecewise.signature import CallBinder
from runners.bound_steps import StateChanged
from runners.buckets import TokenBuckets
from runners.buffers import StaticBuffers
from runners.engine import GraphEngine, GraphPool, engine_for
from runners.errors import ConfigError, StateError
from runners.mode import in_capture_window, is_eager_only
from runners.stats import CallStats, FallbackReason

if TYPE_CHECKING:
    from piecewise.signatures import CaptureContext, CapturedSignature
    from piecewise.trace import ExampleCall

_CHANGE_REASONS = {
    "moved_address": FallbackReason.MOVED_ADDRESS,
    "module_state_changed": FallbackReason.MODULE_STATE_CHANGED,
}
_MAX_LISTED = 16
# A bucket seen this often is worth its capture.
_LAZY_CALLS = 3


class GraphedModule:
    """A model whose calls replay graphs where that is proven equal, and run the model itself everywhere else.

    Attributes:
        model: the user's module, unchanged; other attributes of this object are the model's.
        piecewise_config: the settings.
        stats: counters of calls; see `CallStats`.
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
        self.model = model
        self.piecewise_config = config
        self.stats = CallStats()
        self._forward: Callable[..., Any] = forward if forward is not None else model
        self._in_place = forward is not None
        self._buckets = TokenBuckets(config.buckets)
        self._binder: CallBinder | None = None
        self._signatures: list[CapturedSignature] = []
        self._reports: list[CaptureReport] = []
        self._released = False
        self._unseen: OrderedDict[str, int] = OrderedDict()
        self._changes: OrderedDict[str, None] = OrderedDict()
        self._waiting: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._engine: GraphEngine | None = None
        self._pool: GraphPool | None = None
        self._buffers = StaticBuffers()

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not set yet: unpickling or a failed __init__
            raise AttributeError(name)
        return getattr(self.model, name)

    def __repr__(self) -> str:
        return f"GraphedModule({type(self.model).__name__}, captured={list(self.stats.captured)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own call: `model(*args, **kwargs)`, replayed where a captured bucket serves it."""
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        if self._owner == threading.get_ident():
            return self._eager(FallbackReason.REENTRANT_CALL, args, kwargs)
        with self._lock:
            self._owner = threading.get_ident()
            try:
                found = self._find_plan(args, kwargs)
                if not isinstance(found, FallbackReason):
                    signature, steps, num_tokens, leaves = found
                    try:
                        result = signature.rebuild(steps.replay(leaves, num_tokens))
                    except StateChanged as changed:
                        found = self._note_change(changed)
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
        may_capture = self.piecewise_config.capture == "lazy" or in_capture_window()
        if not self._signatures and not may_capture:
            return FallbackReason.RELEASED if self._released else FallbackReason.NOT_CAPTURED
        try:
            bound = self._bind(args, kwargs)
        except TypeError:
            return FallbackReason.UNSEEN_SIGNATURE  # the model says what is wrong with the call
        for position, signature in enumerate(self._signatures):
            matched = signature.match(bound)
            if matched is not None:
                return self._plan_for(
                    position, signature, *matched, may_capture=may_capture, call=(args, kwargs)
                )
        return self._unseen_signature(args, kwargs, may_capture)

    def _bind(self, args: Any, kwargs: Any) -> tuple:
        if self._binder is None:
            forward = self._forward if self._in_place else self.model.forward
            self._binder = CallBinder(forward)
        return self._binder.bind(*args, **kwargs)

    def _plan_for(
        self,
        position: int,
        signature: CapturedSignature,
        num_tokens: int,
        leaves: list[Any],
        *,
        may_capture: bool,
        call: Any,
    ) -> Any:
        if num_tokens <= 0:
            return FallbackReason.ZERO_TOKENS if num_tokens == 0 else FallbackReason.TOKEN_COUNT_MISMATCH
        bucket = self._buckets.bucket_for(num_tokens)
        if bucket is None:
            return FallbackReason.ABOVE_LARGEST_BUCKET
        ratio = self.piecewise_config.max_padding_ratio
        if ratio is not None and bucket > ratio * num_tokens:
            return FallbackReason.PADDING_RATIO
        if not signature.global_state.check():
            return FallbackReason.GLOBAL_STATE_CHANGED
        served = signature.served.get(bucket)
        if served is None:
            if bucket in signature.refused:
                return signature.refused[bucket][0]
            if not may_capture or not self._is_due(position, bucket):
                return FallbackReason.NOT_CAPTURED
            self._capture_buckets(position, [bucket])
            served = signature.served.get(bucket)
            if served is None:
                return signature.refused[bucket][0]
        if num_tokens == 1 and not signature.serves_one:
            return FallbackReason.ONE_TOKEN_BRANCH
        if not signature.is_valid(served, num_tokens, leaves):
            return FallbackReason.SHAPE_GUARD
        return signature, served.steps, num_tokens, leaves

    def _is_due(self, position: int, bucket: int) -> bool:
        if in_capture_window():
            return True
        self._waiting[position, bucket] += 1
        return self._waiting[position, bucket] >= _LAZY_CALLS

    def _unseen_signature(self, args: Any, kwargs: Any, may_capture: bool) -> Any:
        text = _describe_call(args, kwargs)
        if text in self._unseen or len(self._unseen) < _MAX_LISTED:
            self._unseen[text] = self._unseen.get(text, 0) + 1
        if not may_capture:
            return FallbackReason.UNSEEN_SIGNATURE if self._signatures else FallbackReason.NOT_CAPTURED
        if len(self._signatures) >= self.piecewise_config.max_signatures:
            return FallbackReason.SIGNATURE_LIMIT
        self._add_signature(args, kwargs)
        if in_capture_window():
            self._capture_buckets(len(self._signatures) - 1, self._largest_first())
        matched = self._signatures[-1].match(self._bind(args, kwargs))
        if matched is None:
            return FallbackReason.UNSEEN_SIGNATURE
        return self._plan_for(
            len(self._signatures) - 1, self._signatures[-1], *matched, may_capture=True, call=(args, kwargs)
        )

    def _note_change(self, changed: StateChanged) -> FallbackReason:
        assert changed.change is not None
        if changed.change.detail in self._changes or len(self._changes) < _MAX_LISTED:
            self._changes[changed.change.detail] = None
        return _CHANGE_REASONS[changed.change.kind]

    def capture(self, *args: Any, **kwargs: Any) -> CaptureReport:
        """Captures every bucket for calls like this example: same structure, dtypes and options, any token
        count.

        The model is traced, not run; boundary ops are not called, and no attention metadata is needed.

        Args:
            args, kwargs: the model's own arguments, with two or more tokens.
        Returns:
            How each bucket went; a bucket that could not be captured runs eagerly, with the reason in here.
        Raises:
            TraceError: the model cannot be one graph, or tensors are on two devices.
            TokenDimError: the token count cannot be found in the example.
            CaptureError: with `strict`, an op lets padding reach real rows, or a bucket fails.
            StateError: `max_signatures` are captured already, or a call is in progress.
        """
        with self._exclusive("capture"):
            bound = self._bind(args, kwargs)
            known = [i for i, signature in enumerate(self._signatures) if signature.match(bound) is not None]
            if not known:
                if len(self._signatures) >= self.piecewise_config.max_signatures:
                    raise StateError(
                        f"capture() of signature {len(self._signatures) + 1}",
                        expected=f"at most {self.piecewise_config.max_signatures} signatures",
                        got="one more kind of call",
                        rule="graphs are bounded in number [I10]",
                        fix="raise max_signatures, or make the calls alike",
                    )
                self._add_signature(args, kwargs)
            position = known[0] if known else len(self._signatures) - 1
            missing = [b for b in self._largest_first() if b not in self._signatures[position].served]
            return self._capture_buckets(position, missing)

    def refresh(self) -> CaptureReport | None:
        """Captures again what was captured, after weights moved or the model changed; None where nothing was.

        The old graphs and their memory go first, so two pools never exist at once.
        """
        with self._exclusive("refresh"):
            examples = [signature.traced.trace.example for signature in self._signatures]
            self._drop_graphs()
            report = None
            for example in examples:
                self._signatures.append(self._traced(example))
                report = self._capture_buckets(len(self._signatures) - 1, self._largest_first())
            return report

    def release(self) -> None:
        """Gives all graph memory back; calls run eagerly until `capture()` is called again."""
        with self._exclusive("release"):
            self._drop_graphs()
            self._released = True

    def check_addresses(self) -> str | None:
        """What differs now from what was recorded, in words; None where nothing does."""
        for signature in self._signatures:
            for served in signature.served.values():
                change = served.steps.check.find_change()
                if change is not None:
                    return change.detail
        return None

    def _exclusive(self, what: str) -> _Exclusive:
        return _Exclusive(self, what)

    def _context(self) -> CaptureContext:
        device = self._device()
        if self._engine is None:
            self._engine = engine_for(self.piecewise_config.engine, device)
        if self._pool is None:
            self._pool = self._engine.new_pool(device)
        from piecewise.assemble import ModuleFacts
        from piecewise.signatures import CaptureContext
        from piecewise.state import module_facts

        def facts() -> ModuleFacts:
            values, hooks = module_facts(self.model, skip_root_forward=self._in_place)
            return ModuleFacts(tuple(values), tuple(hooks))

        return CaptureContext(
            self.piecewise_config, self._engine, self._pool, self._buffers, facts
        )  # fmt: skip

    def _largest_first(self) -> list[int]:
        """The order of capture: memory of the largest bucket serves the rest [I9]."""
        return sorted(self._buckets.sizes, reverse=True)

    def _device(self) -> torch.device:
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        first: torch.Tensor | None = next(tensors, None)
        return first.device if first is not None else torch.device("cpu")

    def _traced(self, example: ExampleCall) -> CapturedSignature:
        from piecewise.signatures import trace_signature

        return trace_signature(self.model, example, forward=self._forward, config=self.piecewise_config)

    def _add_signature(self, args: Any, kwargs: Any) -> None:
        self._signatures.append(self._traced(self._example(args, kwargs)))
        self._reports.append(CaptureReport((), self._signatures[-1].serves_one, 0, 0))

    def _example(self, args: Any, kwargs: Any) -> ExampleCall:
        from piecewise.trace import ExampleCall

        self._bind(args, kwargs)
        assert self._binder is not None
        return ExampleCall.from_call(self._binder, args, kwargs)

    def _capture_buckets(self, position: int, buckets: list[int]) -> CaptureReport:
        from piecewise.signatures import capture_bucket

        signature, context = self._signatures[position], self._context()
        bar = _progress_bar(len(buckets), enabled=self.piecewise_config.progress)
        made = []
        for bucket in buckets:
            bar.set_description(f"capturing bucket {bucket}")
            made.append(capture_bucket(context, signature, bucket))
            bar.set_postfix_str(f"{context.pool.allocated_bytes / 2**20:.0f} MiB")
            bar.update(1)
        bar.close()
        self._released = False
        self.stats.captured = tuple(sorted({b for s in self._signatures for b in s.served}))
        whole = tuple(signature.bucket_reports[b] for b in sorted(signature.bucket_reports, reverse=True))
        sizes = context.pool.allocated_bytes, self._buffers.allocated_bytes
        report = CaptureReport(whole, signature.serves_one, *sizes)
        del self._reports[position:][1:]
        self._reports[position : position + 1] = [report]
        return report

    def _drop_graphs(self) -> None:
        for signature in self._signatures:
            signature.reset()
        self._signatures.clear()
        self._reports.clear()
        self._waiting.clear()
        self._changes.clear()
        if self._pool is not None:
            self._pool.release()
        self._pool = None
        self._buffers = StaticBuffers()
        self.stats.captured = ()

    def explain(self, *args: Any, **kwargs: Any) -> PlanReport:
        """The plan for calls like this one: segments, reasons, coverage. Nothing is captured and no state
        changes.

        Raises:
            TraceError, TokenDimError: as for `capture`.
        """
        with self._exclusive("explain"):
            from piecewise.compiler import trace_model

            example = self._example(args, kwargs)
            traced = trace_model(self.model, example, forward=self._forward, config=self.piecewise_config)
            traced.probe(self.piecewise_config.buckets, strict=False)
            return PlanReport.of(traced.cut(), example.names)

    def report(self) -> Report:
        """Plans, captures and calls so far."""
        plans = tuple(PlanReport.of(s.plan, s.traced.trace.example.names) for s in self._signatures)
        engine = self._engine.name if self._engine is not None else "none yet"
        return Report(
            plans,
            tuple(self._reports),
            self.stats.snapshot(),
            dict(self._unseen),
            tuple(self._changes),
            engine,
        )


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
        self._graphed._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._graphed._owner = None
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


class _NoBar:
    def set_description(self, text: str) -> None: ...
    def set_postfix_str(self, text: str) -> None: ...
    def update(self, count: int) -> None: ...
    def close(self) -> None: ...


def _progress_bar(total: int, *, enabled: bool) -> Any:
    if not enabled or total < 2:
        return _NoBar()
    from tqdm import tqdm

    return tqdm(total=total, disable=None, leave=False)  # None: silent where the output is no terminal


def _describe_call(args: Any, kwargs: Any) -> str:
    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            kind = "" if type(value) in (torch.Tensor, nn.Parameter) else f"{type(value).__name__} "
            return f"{kind}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(describe, value[:4]))}{', ...' if len(value) > 4 else ''}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in list(value.items())[:4]) + "}"
        text = repr(value)
        return text if len(text) <= 40 else type(value).__name__

    parts = [describe(value) for value in args] + [
        f"{key}={describe(value)}" for key, value in kwargs.items()
    ]
    return f"({', '.join(parts)})"


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
