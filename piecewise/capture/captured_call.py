"""Holds the captured kinds of calls: how each is recognised, and the plan that serves each bucket.

A call does not tell the model's state: which adapter is active, whether one is merged, a flag. So several
signatures may match a call. They are *variants* of one kind of call, each with the check of what its own
trace read. The last one that served is tried first, so that several variants cost a call no more than one:

    call ─match─▶ variant "a" ─check fails─▶ variant "b" ─check holds─▶ replay; "b" is tried first from now on
                                                   └─ none holds ─▶ the model itself
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import nn

from piecewise import torch_api
from piecewise.calls.binder import CallBinder, bound_call
from piecewise.calls.structure import Namespace, build_source
from piecewise.capture.analyse import TracedModel
from piecewise.capture.build_plan import PlanAssembler, state_check_of
from piecewise.capture.call_rules import matcher_of
from piecewise.capture.suspension import TracedState
from piecewise.ir.plan import SegmentPlan
from piecewise.lowering.lowering import LoweredPlan
from piecewise.report.report import BucketReport
from piecewise.report.startup_times import StartupTimes
from runners.state.state_check import StateChange, StateCheck, StateFacts
from runners.stats import FallbackReason
from runners.step_plan import StepPlan

# (token count, leaves) of a call that matched.
Matched = tuple[int, list[Any]]

# For `verify`: the signatures that may serve a call, the call without them, its arguments for their binders.
FoundCall: TypeAlias = "tuple[SignatureList, Callable[[], Any], Sequence[Any], Mapping[str, Any]]"

_NO_FACTS = StateFacts()
# Refusals after which another capture of the same trace may succeed.
_WORTH_ANOTHER_TRY = (
    FallbackReason.CAPTURE_FAILED, FallbackReason.OUT_OF_MEMORY,
    FallbackReason.MOVED_ADDRESS, FallbackReason.MODULE_STATE_CHANGED,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class ServedBucket:
    """Holds a bucket's step plan and the segment plan that it was made from."""

    steps: StepPlan
    plan: SegmentPlan
    _valid: dict[int, bool] = dataclasses.field(default_factory=dict)

    def is_valid(self, num_tokens: int, leaves: Sequence[Any]) -> bool:
        """Whether eager would take the traced branches at this real count, with these other sizes."""
        if self.plan.symbols:
            return self.plan.holds_at(num_tokens, leaves)
        known = self._valid.get(num_tokens)
        if known is None:
            known = self._valid[num_tokens] = self.plan.is_valid(num_tokens)
        return known


@dataclasses.dataclass(slots=True)
class Cut:
    """Holds a trace, the plan cut from it and, once captured, the functions of its segments."""

    traced: TracedModel
    plan: SegmentPlan
    lowered: LoweredPlan | None = None
    assembler: PlanAssembler | None = None

    def reset(self) -> None:
        if self.assembler is not None:
            self.assembler.reset()
        self.assembler = self.lowered = None


@dataclasses.dataclass(eq=False, slots=True)
class CapturedSignature:
    """Holds one signature, its traces and the buckets that it serves.

    Attributes:
        cuts: the first trace's cut, and those of traces at other sizes, for buckets that the first excludes.
        trace_one_token: traces at one token; returns as `one_token_refusal` of `analyse.py` does.
        retrace: traces the example resized, for a bucket that the first trace excludes.
        times: seconds spent on all this.
        adapters: names of the model's adapters active at the trace; empty if it has none.
        one_token, one_token_facts: the result of `trace_one_token`; `one_token` is None until it was called.
        global_state: settings at the trace; `check()` is false if grad mode, autocast or the like differ now.
        match: bound values → (token count, leaves) or None.
        rebuild: result leaves → the result.
        check: compares what the trace read of the model; None while no graph can be made from the trace: an
            address moved, or the signature is suspended.
        state: the model's tensors and objects that the traces hold for.
        served: bucket → plan; `refused`: bucket → why it runs eagerly.
        waiting: bucket → calls that a lazy capture has seen.
        bucket_reports: the outcome of each requested bucket.
        suspended: the buckets to capture again, largest first; None if not suspended.
        number: how many signatures were captured before it.
    """

    cuts: list[Cut]
    trace_one_token: Callable[[], tuple[str, StateFacts]]
    retrace: Callable[[int], TracedModel]
    times: StartupTimes
    adapters: str = ""
    one_token: str | None = None
    one_token_facts: StateFacts = _NO_FACTS
    global_state: torch_api.GlobalState = dataclasses.field(default_factory=torch_api.GlobalState)
    binder: CallBinder = dataclasses.field(init=False)
    match: Callable[[tuple], Matched | None] = dataclasses.field(init=False)
    rebuild: Callable[[list[Any]], Any] = dataclasses.field(init=False)
    check: StateCheck | None = dataclasses.field(init=False)
    state: TracedState = dataclasses.field(init=False)
    served: dict[int, ServedBucket] = dataclasses.field(default_factory=dict)
    refused: dict[int, FallbackReason] = dataclasses.field(default_factory=dict)
    bucket_reports: dict[int, BucketReport] = dataclasses.field(default_factory=dict)
    waiting: Counter[int] = dataclasses.field(default_factory=Counter)
    suspended: tuple[int, ...] | None = None
    number: int = 0
    _one_token_check: StateCheck | None = None

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

    @property
    def buckets(self) -> tuple[int, ...]:
        """Lists the requested buckets, largest first."""
        return tuple(sorted(self.bucket_reports, reverse=True))

    def one_token_refusal(self) -> str:
        """Returns why one token runs eagerly, empty if it may replay; the first call takes a trace."""
        if self.one_token is None:
            self.one_token, self.one_token_facts = self.trace_one_token()
        return self.one_token

    def find_one_token_change(self) -> StateChange | None:
        """Finds a change since the trace at one token, in state that the first trace did not read."""
        if self.one_token_facts == _NO_FACTS:
            return None
        if self._one_token_check is None:
            versions = torch_api.dict_versions if torch_api.dict_versions_tell() else None
            self._one_token_check = StateCheck(facts=self.one_token_facts, dict_versions=versions)
        check = self._one_token_check
        return None if check.is_unchanged() else check.find_change()

    def take_addresses(self) -> None:
        """Records the model's tensors as they are now, for calls to compare."""
        self.check = state_check_of(self.plan)
        # The matcher holds the addresses that graphs write.
        self.match = matcher_of(self.traced, self.plan)
        self.take_state()

    def take_state(self) -> None:
        fixed = [place for cut in self.cuts for _, places in cut.traced.step_metadata for place in places]
        targets = [node.target for cut in self.cuts for node in cut.traced.trace.graph.graph.nodes]
        ops = [target for target in targets if isinstance(target, torch_api.OpOverload)]
        self.state = TracedState([cut.plan for cut in self.cuts], fixed, ops)

    def may_serve(self, num_tokens: int, leaves: Sequence[Any]) -> bool:
        """Whether the global state is the trace's, and some count allows the sizes that do not follow it: one
        sequence is another kind of call where the trace asks for several."""
        if not self.global_state.check():
            return False
        if not self.plan.symbols:
            return True
        counts = (num_tokens, *self.buckets)
        return any(cut.plan.holds_at(count, leaves) for count in counts for cut in self.cuts)

    def find_change(self) -> StateChange | None:
        """Finds what differs from the trace now, which would make its graphs, and captures from it, wrong."""
        if self.check is None:
            return StateChange("moved_address", "the graphs were given up over a moved address")
        return self.check.find_change()

    def is_current(self) -> bool:
        return self.holds() if self.suspended is not None else self.find_change() is None

    def is_of_this_state(self) -> bool:
        """Whether autocast, default dtype and the like are now what they were for the trace."""
        with torch.no_grad():
            return self.global_state.check()

    def is_whole(self) -> bool:
        """Whether graphs can be captured from the traces now."""
        return self.is_of_this_state() and self.holds()

    def holds(self) -> bool:
        """Whether the traces still match the model; for use while no graph is made from them."""
        return self.state.holds() and all(state_check_of(cut.plan).find_change() is None for cut in self.cuts)

    def give_up(self, change: StateChange) -> None:
        """Drops the graphs and the references to old weights; the buckets run eagerly from now on."""
        for bucket in self.buckets:
            self.refuse(bucket, FallbackReason.MOVED_ADDRESS, change.detail)
        self.reset()
        self.check = None

    def suspend(self, again: Sequence[int] | None = None) -> None:
        """Drops the graphs and all references to the model's tensors; the traces stay. Idempotent.

        `again` are the buckets to capture at the end; by default those that were captured, or may be.
        """
        if self.suspended is not None:
            return
        if again is None:
            again = [b for b in self.buckets if self.refused.get(b) in (None, *_WORTH_ANOTHER_TRY)]
        self.suspended = tuple(again)
        for bucket in again:
            detail = "its memory was given back by suspend(); resume() captures it again"
            code = FallbackReason.SUSPENDED.value
            self.bucket_reports[bucket] = BucketReport(bucket, "suspended", detail, code=code)
        self.reset()
        self.check = None

    def end_suspension(self) -> None:
        """Allows captures again from traces that hold."""
        self.suspended = None
        self.take_addresses()
        if self.find_one_token_change() is not None:
            self.one_token, self.one_token_facts, self._one_token_check = None, _NO_FACTS, None

    def refuse(self, bucket: int, reason: FallbackReason, detail: str, *, state: str = "eager") -> None:
        self.refused[bucket] = reason
        self.bucket_reports[bucket] = BucketReport(bucket, state, detail, code=reason.value)

    def refuse_after(self, error: BaseException, bucket: int) -> None:
        detail = str(error) or f"{type(error).__name__} without a message"
        reason = FallbackReason.OUT_OF_MEMORY if is_out_of_memory(error) else FallbackReason.CAPTURE_FAILED
        self.refuse(bucket, reason, detail, state="failed")

    def take_back(self, bucket: int) -> None:
        """Drops a bucket's graphs and the record that it was requested."""
        for table in (self.served, self.refused, self.bucket_reports):
            table.pop(bucket, None)
        for assembler in self.assemblers:
            assembler.forget(bucket)

    def reset(self) -> None:
        for cut in self.cuts:
            cut.reset()
        self.served.clear()
        self._one_token_check = None  # it holds tensors of the model


class SignatureList(list[CapturedSignature]):
    """Lists the signatures of one callable in the order in which they are tried."""

    def matching(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, current: bool = False
    ) -> tuple[CapturedSignature, Matched] | tuple[None, Any]:
        """Finds the signature of a call, with the call's token count and leaves; gradients must be disabled.

        Prefers one of the present global state whose trace may hold; `current` accepts only such a one,
        traced from the model as it is.
        """
        found: Any = None, ()
        binder = bound = None
        for signature in self:
            if signature.binder is not binder:
                binder = signature.binder
                try:
                    bound = binder.bind(*args, **kwargs)
                except TypeError:  # the call does not fit the signature
                    bound = None
            matched = signature.match(bound) if bound is not None else None
            if matched is not None:
                if signature.may_serve(*matched) and (not current or signature.is_current()):
                    return signature, matched
                found = found if found[0] is not None or current else (signature, matched)
        return found

    def prefer(self, signature: CapturedSignature) -> None:
        if self[0] is not signature:
            self[:] = [signature, *(each for each in self if each is not signature)]

    def captured_order(self) -> list[CapturedSignature]:
        """Lists the signatures for readers, the oldest first."""
        return sorted(self, key=lambda each: each.number)

    def current_variant(self, signature: CapturedSignature) -> CapturedSignature | None:
        """Finds the variant of a signature that matches the model as it is; may be the signature itself."""
        example = signature.traced.trace.example
        with torch.no_grad():
            return self.matching(example.args, example.kwargs, current=True)[0]

    def has_current_variant(self, signature: CapturedSignature) -> bool:
        """Whether another signature serves the same calls and matches the model as it is."""
        return self.current_variant(signature) not in (None, signature)

    def other_state(self, signature: CapturedSignature) -> str:
        """Describes how a signature's model state differs from now, if a variant serves it; else empty."""
        change = signature.find_change() if signature.check is not None else None
        return change.detail if change is not None and self.has_current_variant(signature) else ""

    def to_replace(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, max_kept: int
    ) -> list[CapturedSignature]:
        """Finds the variants of a call that a new one replaces: those that can never serve again, as they
        hold what the model lost, and beyond `max_kept` signatures the one used longest ago."""
        variants = []
        for signature in self:
            bound = bound_call(signature.binder, args, kwargs)
            matched = signature.match(bound) if bound is not None else None
            if matched is not None and signature.may_serve(*matched) and not signature.is_current():
                variants.append(signature)
        if not variants:
            return []
        owned = set(map(id, _owned_by(model)))
        gone = [each for each in variants if not _may_be_current_again(each, owned)]
        return gone or (variants[-1:] if len(self) >= max_kept else [])


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a failed allocation is the cause of one of this package's errors."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        error = error.__cause__
    return False


def _may_be_current_again(signature: CapturedSignature, owned: Set[int]) -> bool:
    """Whether the model may return to the traced state; `owned` has the ids of its tensors and modules."""
    if signature.suspended is not None:  # a suspended signature holds no tensors
        return True
    change, check = signature.find_change(), signature.check
    is_state = change is not None and change.kind == "module_state_changed"
    return is_state and check is not None and check.holds_only(owned)


def _owned_by(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield module
        for table in (module._parameters, module._buffers, vars(module)):
            yield from (value for value in table.values() if isinstance(value, torch.Tensor))


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
