"""One kind of call that was captured: how to recognise it, and the plan that serves each bucket."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from piecewise import torch_api
from piecewise.calls.binder import CallBinder
from piecewise.calls.structure import Namespace, build_source
from piecewise.capture.analyse import TracedModel, example_of_size, one_token_refusal, trace_model
from piecewise.capture.build_plan import CaptureContext as CaptureContext
from piecewise.capture.build_plan import PlanAssembler, state_check_of
from piecewise.capture.call_rules import is_alike, matcher_of
from piecewise.capture.faults import SegmentFault
from piecewise.capture.suspension import Suspended
from piecewise.ir.plan import SegmentPlan
from piecewise.lowering.lowering import LoweredPlan
from piecewise.report.progress import steps_bar
from piecewise.report.report import BucketReport
from piecewise.report.startup_times import StartupTimes
from piecewise.settings.config import PiecewiseConfig
from piecewise.streams.streams import StreamSchedules
from piecewise.trace.state.adapters import adapters_in_use
from piecewise.trace.trace import ExampleCall
from runners.collector import paused_collector
from runners.state.state_check import StateChange, StateCheck
from runners.stats import FallbackReason
from runners.step_plan import StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
class ServedBucket:
    """A bucket's plan, with the range check of the trace that it was made from."""

    steps: StepPlan
    plan: SegmentPlan


@dataclasses.dataclass(slots=True)
class Cut:
    """A trace, the plan cut from it, and from the first capture on what runs in the segments."""

    traced: TracedModel
    plan: SegmentPlan
    lowered: LoweredPlan | None = None
    assembler: PlanAssembler | None = None

    def reset(self) -> None:
        """Drops the graphs."""
        if self.assembler is not None:
            self.assembler.reset()
        self.assembler = self.lowered = None


@dataclasses.dataclass(slots=True)
class CapturedSignature:
    """One signature, its traces and the buckets that it serves.

    Attributes:
        cuts: of the first trace, and of traces at other sizes, for buckets that the first trace excludes.
        one_token: why one token runs eagerly; empty where it may replay.
        retrace: traces again with the example resized, for a bucket that the first trace excludes.
        times: seconds spent on all this.
        global_state: of now; false from `check()` where grad mode, autocast or the like differ.
        binder: what binds the calls that it may serve.
        match: bound values → (token count, leaves) or None.
        rebuild: result leaves → the result.
        served: bucket → plan; `refused`: bucket → why it runs eagerly.
        waiting: bucket → calls that a lazy capture has seen.
        check: what the trace saw of the model, None once the graphs were given up over a moved address, and
            while suspended.
        suspended: what `resume` captures again; None where it is not suspended.
        adapters: which ones of the model were active at the trace, in words; empty where it has none.
        number: how many were captured before it.
    """

    cuts: list[Cut]
    one_token: str
    retrace: Callable[[int], TracedModel]
    times: StartupTimes
    global_state: torch_api.GlobalState = dataclasses.field(default_factory=torch_api.GlobalState)
    binder: CallBinder = dataclasses.field(init=False)
    match: Callable[[tuple], tuple[int, list[Any]] | None] = dataclasses.field(init=False)
    rebuild: Callable[[list[Any]], Any] = dataclasses.field(init=False)
    check: StateCheck | None = dataclasses.field(init=False)
    served: dict[int, ServedBucket] = dataclasses.field(default_factory=dict)
    refused: dict[int, tuple[FallbackReason, str]] = dataclasses.field(default_factory=dict)
    bucket_reports: dict[int, BucketReport] = dataclasses.field(default_factory=dict)
    waiting: Counter[int] = dataclasses.field(default_factory=Counter)
    suspended: Suspended | None = None
    adapters: str = ""
    number: int = 0
    _valid: dict[tuple[int, int], bool] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rebuild = _rebuilder(self.traced)
        self.binder = self.traced.trace.example.binder
        self.take_addresses()

    @property
    def traced(self) -> TracedModel:
        return self.cuts[0].traced

    @property
    def plan(self) -> SegmentPlan:
        return self.cuts[0].plan

    @property
    def assemblers(self) -> list[PlanAssembler]:
        return [cut.assembler for cut in self.cuts if cut.assembler is not None]

    @property
    def lowerings(self) -> list[LoweredPlan]:
        return [cut.lowered for cut in self.cuts if cut.lowered is not None]

    def take_addresses(self) -> None:
        """Lets calls be compared with the model's tensors as they are now."""
        self.check = state_check_of(self.plan)
        # It knows the addresses that graphs write.
        self.match = matcher_of(self.traced, self.plan)

    def is_valid(self, served: ServedBucket, num_tokens: int, leaves: Sequence[Any]) -> bool:
        """Whether eager would take the traced branches at this real count, with these other sizes."""
        plan = served.plan
        if plan.symbols:
            return plan.holds_at(num_tokens, leaves)
        key = (served.steps.padded_num_tokens, num_tokens)
        known = self._valid.get(key)
        if known is None:
            known = self._valid[key] = plan.is_valid(num_tokens)
        return known

    def may_serve(self, num_tokens: int, leaves: Sequence[Any]) -> bool:
        """Whether the global state is that of the trace, and sizes that do not follow the token count are not
        excluded at every count: one sequence is another kind of call where the trace asks for several."""
        if not self.global_state.check():
            return False
        if not self.plan.symbols:
            return True
        counts = (num_tokens, *self.buckets)
        return any(cut.plan.holds_at(count, leaves) for count in counts for cut in self.cuts)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The buckets that were asked for, served or refused, largest first."""
        return tuple(sorted({*self.served, *self.refused}, reverse=True))

    def find_change(self) -> StateChange | None:
        """What differs from the trace now, so that its graphs, and a capture from it, would be wrong."""
        if self.check is None:
            return StateChange("moved_address", "the graphs were given up over a moved address")
        return self.check.find_change()

    def is_current(self) -> bool:
        """Whether its traces are of the model as it is."""
        return self.holds() if self.suspended is not None else self.find_change() is None

    def give_up(self, change: StateChange) -> None:
        """Drops the graphs, and with them what holds the old weights; the buckets run eagerly from now on."""
        reason = FallbackReason.MOVED_ADDRESS
        for bucket in self.buckets:
            self.refuse(bucket, reason, change.detail)
        self.reset()
        self.check = None

    def suspend(self) -> None:
        """Drops the graphs and all that holds the model's tensors; the traces stay. Idempotent."""
        if self.suspended is not None:
            return
        again = [b for b in self.buckets if b in self.served or self.refused[b][0] in _WORTH_ANOTHER_TRY]
        # Where nothing moved, Python state alone may say that the trace is of another state of the model.
        is_whole = self.check is not None and self.check.find_moved() is None
        self.suspend_for(again if is_whole else self.buckets)

    def suspend_for(self, again: Sequence[int]) -> None:
        """As `suspend`, and these are the buckets that `resume` is to capture."""
        plans = [cut.plan for cut in self.cuts]
        fixed = [place for cut in self.cuts for made in cut.traced.step_metadata for place in made.places]
        is_valid = self.check is not None and self.check.find_moved() is None
        self.suspended = Suspended.of(again, plans, fixed, is_valid=is_valid)
        for bucket in again:
            detail = "its memory was given back by suspend(); resume() captures it again"
            self.bucket_reports[bucket] = BucketReport(
                bucket, "suspended", detail, code=FallbackReason.SUSPENDED.value
            )
        self.reset()
        self.check = None

    def is_of_this_state(self) -> bool:
        """Whether autocast, default dtype and the like are now what they were for the trace."""
        with torch.no_grad():
            return self.global_state.check()

    def holds(self) -> bool:
        """Whether the traces of a suspended signature are of the model as it is."""
        assert self.suspended is not None
        return self.suspended.holds() and all(
            state_check_of(cut.plan).find_change() is None for cut in self.cuts
        )

    def resume(self) -> list[int]:
        """Ends the suspension of traces that hold; returns the buckets to capture, largest first."""
        assert self.suspended is not None
        again, self.suspended = list(self.suspended.buckets), None
        self.take_addresses()
        return again

    def refuse(self, bucket: int, reason: FallbackReason, detail: str, *, state: str = "eager") -> None:
        """Serves a bucket eagerly from now on."""
        self.refused[bucket] = (reason, detail)
        self.bucket_reports[bucket] = BucketReport(bucket, state, detail, code=reason.value)

    def refuse_after(self, error: BaseException, bucket: int) -> None:
        """Serves a bucket eagerly whose capture failed."""
        detail = str(error) or f"{type(error).__name__} without a message"
        reason = FallbackReason.OUT_OF_MEMORY if _is_out_of_memory(error) else FallbackReason.CAPTURE_FAILED
        self.refuse(bucket, reason, detail, state="failed")

    def take_back(self, bucket: int) -> None:
        """Drops a bucket's graphs, and that it was ever asked for."""
        self.served.pop(bucket, None)
        self.refused.pop(bucket, None)
        self.bucket_reports.pop(bucket, None)
        for assembler in self.assemblers:
            assembler.forget(bucket)

    def reset(self) -> None:
        """Drops all graphs; the traces stay."""
        for cut in self.cuts:
            cut.reset()
        self.served.clear()


# Refusals that are not the model's own: another capture may do better.
_WORTH_ANOTHER_TRY = (FallbackReason.CAPTURE_FAILED, FallbackReason.OUT_OF_MEMORY)


@paused_collector()
def trace_signature(
    model: nn.Module, example: ExampleCall, *, forward: Any, config: PiecewiseConfig
) -> CapturedSignature:
    """Traces and cuts the example's kind of call; captures nothing yet.

    Raises:
        TraceError, TokenDimError: the model cannot be traced, or its token count not found.
        CaptureError: with `strict`, an op lets padding reach real rows.
    """
    times = StartupTimes()
    if config.lowering == "inductor":
        with times.timed("lowering"):
            torch_api.start_compile_workers(example.leaves)
    with steps_bar(("tracing", "tracing one token"), enabled=config.progress) as begin:
        begin()
        with times.timed("trace"):
            traced = trace_model(model, example, forward=forward, config=config)
        begin()
        with times.timed("trace"):
            one_token = one_token_refusal(traced, model, forward=forward, config=config)

    def retrace(bucket: int) -> TracedModel:
        return trace_model(model, example_of_size(traced, bucket), forward=forward, config=config)

    cut = Cut(traced, traced.planned(config, times, move_weights=True))
    return CapturedSignature([cut], one_token, retrace, times, adapters=adapters_in_use(model))


def capture_bucket(context: CaptureContext, signature: CapturedSignature, bucket: int) -> BucketReport:
    """Captures one bucket, from the signature's trace or, where that excludes the bucket, from one at its
    size."""
    began = time.perf_counter()
    if bucket == 1 and signature.one_token:  # no call could reach its graphs
        signature.refuse(bucket, FallbackReason.ONE_TOKEN_BRANCH, signature.one_token)
        return signature.bucket_reports[bucket]
    before = context.pool.allocated_bytes, context.pool.device_bytes
    cut: Cut | None = None
    try:
        cut, plan = _cut_for(context, signature, bucket), signature.plan
        if cut is None:
            detail = "the model branches on the token count, and no trace at this size holds"
            if plan.max_rows is not None and bucket > plan.max_rows:
                detail = f"an index of its padded rows would reach beyond a table of {plan.max_rows} rows"
            signature.refuse(bucket, FallbackReason.SHAPE_GUARD, detail)
        elif not (assembler := _assembler_of(context, signature, cut)).runners:
            detail = "no op can be in a graph; explain() has the reason for each"
            signature.refuse(bucket, FallbackReason.DISABLED, detail)
        else:
            plan = cut.plan
            steps = _captured(cut, assembler, bucket)
            steps.check.until_stable()
            signature.served[bucket] = ServedBucket(steps, plan)
            signature.refused.pop(bucket, None)
            graphs = [runner.graph_for(bucket) for runner in assembler.runners.values()]
            signature.bucket_reports[bucket] = BucketReport(
                bucket, "captured", "", num_graphs=len(assembler.runners),
                num_ops=sum(graph.num_ops for graph in graphs if graph is not None),
                grown_bytes=max(context.pool.allocated_bytes - before[0], 0),
                device_bytes=max(context.pool.device_bytes - before[1], 0),
                coverage=plan.coverage,
            )  # fmt: skip
    except Exception as error:
        if context.config.strict:
            raise
        lost = None
        try:
            lost = _cut_again(context, signature, cut, error) if cut is not None else None
        except Exception as second:
            error = second
        if lost is not None:
            for size in sorted({*lost, bucket}, reverse=True):
                capture_bucket(context, signature, size)
            return signature.bucket_reports[bucket]
        signature.refuse_after(error, bucket)
    taken_ms = (time.perf_counter() - began) * 1e3
    report = dataclasses.replace(signature.bucket_reports[bucket], capture_ms=taken_ms)
    signature.bucket_reports[bucket] = report
    return report


def _captured(cut: Cut, assembler: PlanAssembler, bucket: int) -> StepPlan:
    """The bucket, warmed up on made-up rows; where these break what the model asks of its inputs, on the
    example's own."""
    real, own = _warm_up_rows(cut.plan, bucket, assembler.leaves), cut.traced.token.example_num_tokens
    try:
        return assembler.capture(bucket, real)
    except SegmentFault as fault:
        may_help = 1 < own <= bucket and own != real and not _is_out_of_memory(fault)
        if not may_help or not cut.traced.is_the_models(fault, cut.plan):
            raise
    return assembler.capture(bucket, own)


def _cut_again(
    context: CaptureContext, signature: CapturedSignature, cut: Cut, error: Exception
) -> list[int] | None:
    """Cuts the trace again without what was wrong; the buckets that lost their graphs by that, or None where
    nothing is to be done about it."""
    if not isinstance(error, SegmentFault) or cut.assembler is None or _is_out_of_memory(error):
        return None
    if not cut.traced.heed(error, cut.plan):
        return None
    plan = cut.traced.planned(context.config, signature.times, move_weights=True)
    lost = [bucket for bucket, served in signature.served.items() if served.plan is cut.plan]
    for bucket in lost:
        del signature.served[bucket]
    cut.reset()
    cut.plan = plan
    if cut is signature.cuts[0]:
        signature.take_addresses()
    return lost


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation that failed is behind an error of ours."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        error = error.__cause__
    return False


def _cut_for(context: CaptureContext, signature: CapturedSignature, bucket: int) -> Cut | None:
    """A cut that holds for a bucket: a known one, else of a trace made at its size; None where none holds."""
    leaves = signature.traced.trace.example.leaves
    for cut in signature.cuts:
        if cut.plan.holds_at(bucket, leaves):
            return cut
    if bucket <= 1:  # a trace at one token has no symbol for the count
        return None
    with signature.times.timed("trace"):
        traced = signature.retrace(bucket)
    cut = Cut(traced, traced.planned(context.config, signature.times, move_weights=True))
    if not cut.plan.holds_at(bucket, leaves) or not is_alike(signature.traced, traced):
        return None
    signature.cuts.append(cut)
    return cut


def _assembler_of(context: CaptureContext, signature: CapturedSignature, cut: Cut) -> PlanAssembler:
    """What captures the buckets of a cut; made for the first of them."""
    if cut.assembler is not None:
        return cut.assembler
    traced, plan = cut.traced, cut.plan
    leaves = traced.trace.example.leaves
    check = signature.check if cut is signature.cuts[0] else state_check_of(plan)
    assert check is not None, "captures follow a trace of the model as it is"
    served = [size for size in context.config.buckets if plan.holds_at(size, leaves)]
    with signature.times.timed("lowering"):
        lowered = cut.lowered = context.lowering.lower(plan, served, traced.graphs)
        streams = StreamSchedules(
            plan, lowered.report(), num_rows=max(served, default=0),
            num_streams=context.config.num_streams,
        )  # fmt: skip
    metadata = [made.metadata for made in traced.step_metadata]
    cut.assembler = PlanAssembler(
        plan, context, functions=lowered.functions, streams=streams, leaves=leaves, check=check,
        step_metadata=metadata, times=signature.times,
    )  # fmt: skip
    return cut.assembler


def _warm_up_rows(plan: SegmentPlan, bucket: int, leaves: Sequence[Any]) -> int:
    """How many rows of a warm-up are real: about half, where the trace allows that count."""
    for rows in (bucket // 2 + 1, bucket - 1, bucket):
        if 1 < rows <= bucket and plan.holds_at(rows, leaves):
            return rows
    return bucket


def _rebuilder(traced: TracedModel) -> Callable[[list[Any]], Any]:
    namespace = Namespace()
    names = [f"leaves[{index}]" for index in range(len(traced.trace.result_leaves))]
    source = build_source(traced.trace.result, names, namespace)
    build: Callable[[list[Any]], Any] = eval(f"lambda leaves: {source}", namespace.globals)
    wrapped = traced.trace.wrapped

    def rebuild(leaves: list[Any]) -> Any:
        for place, parts, make in wrapped:
            leaves[place] = make([leaves[part] for part in parts])
        return build(leaves)

    return rebuild if wrapped else build
