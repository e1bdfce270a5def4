"""One kind of call that was captured: how to recognise it, and the plan that serves each bucket."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from piecewise import torch_internals as internals
from piecewise.assemble import PlanAssembler, state_check_of
from piecewise.compiler import TracedModel, example_of_size, serves_one_token, trace_model
from piecewise.config import PiecewiseConfig
from piecewise.lowering import Lowering
from piecewise.lowering_report import LoweringReport
from piecewise.plan import SegmentPlan
from piecewise.progress import steps_bar
from piecewise.report import BucketReport
from piecewise.signature import LeafRule, same_count, write_matcher
from piecewise.startup_times import StartupTimes
from piecewise.structure import Namespace, build_source
from piecewise.trace import ExampleCall
from runners.buffers import StaticBuffers
from runners.engine import GraphEngine, GraphPool
from runners.errors import TraceError
from runners.state_check import StateChange, StateCheck, StateRef
from runners.stats import FallbackReason
from runners.step_plan import StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureContext:
    """What all captures of one graphed model share."""

    config: PiecewiseConfig
    engine: GraphEngine
    pool: GraphPool
    buffers: StaticBuffers
    lowering: Lowering
    on_segment: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True, slots=True)
class ServedBucket:
    """A bucket's plan, with the range check of the trace that it was made from."""

    steps: StepPlan
    plan: SegmentPlan


@dataclasses.dataclass(slots=True)
class CapturedSignature:
    """One signature, its traces and the buckets that it serves.

    Attributes:
        match: bound values → (token count, leaves) or None.
        rebuild: result leaves → the result.
        served: bucket → plan; `refused`: bucket → why it runs eagerly.
        serves_one: whether one token may replay.
        retrace: traces again with the example resized, for a bucket that the first trace excludes.
        global_state: false from `check()` where grad mode, autocast or the like differ from the trace.
        waiting: bucket → calls that a lazy capture has seen.
        check: what the trace saw of the model, None once the graphs were given up over a moved address.
        lowerings: how the segments of each plan were lowered; `times`: seconds spent on all this.
    """

    traced: TracedModel
    plan: SegmentPlan
    match: Callable[[tuple], tuple[int, list[Any]] | None]
    rebuild: Callable[[list[Any]], Any]
    global_state: internals.GlobalState
    check: StateCheck | None
    serves_one: bool
    retrace: Callable[[int], TracedModel]
    served: dict[int, ServedBucket] = dataclasses.field(default_factory=dict)
    refused: dict[int, tuple[FallbackReason, str]] = dataclasses.field(default_factory=dict)
    assemblers: list[PlanAssembler] = dataclasses.field(default_factory=list)
    bucket_reports: dict[int, BucketReport] = dataclasses.field(default_factory=dict)
    waiting: Counter[int] = dataclasses.field(default_factory=Counter)
    lowerings: list[LoweringReport] = dataclasses.field(default_factory=list)
    times: StartupTimes = dataclasses.field(default_factory=StartupTimes)
    _valid: dict[tuple[int, int], bool] = dataclasses.field(default_factory=dict)

    @property
    def num_segments(self) -> int:
        return len(self.plan.segments)

    def is_valid(self, served: ServedBucket, num_tokens: int, leaves: Sequence[Any]) -> bool:
        """Whether eager would take the traced branches at this real count, with these other sizes."""
        plan = served.plan
        if plan.symbols:
            return plan.is_valid(num_tokens, *other_sizes(plan, leaves))
        key = (served.steps.padded_num_tokens, num_tokens)
        known = self._valid.get(key)
        if known is None:
            known = self._valid[key] = plan.is_valid(num_tokens)
        return known

    @property
    def buckets(self) -> tuple[int, ...]:
        """The buckets that were asked for, served or refused, largest first."""
        return tuple(sorted({*self.served, *self.refused}, reverse=True))

    def find_change(self) -> StateChange | None:
        """What differs from the trace now, so that its graphs, and a capture from it, would be wrong."""
        if self.check is None:
            return StateChange("moved_address", "the graphs were given up over a moved address")
        return self.check.find_change()

    def give_up(self, change: StateChange) -> None:
        """Drops the graphs, and with them what holds the old weights; the buckets run eagerly from now on."""
        reason = FallbackReason.MOVED_ADDRESS
        for bucket in self.buckets:
            self.refused[bucket] = (reason, change.detail)
            self.bucket_reports[bucket] = BucketReport(bucket, "eager", change.detail)
        self.reset()
        self.check = None

    def reset(self) -> None:
        for assembler in self.assemblers:
            assembler.reset()
        self.served.clear()
        self.assemblers.clear()


def other_sizes(plan: SegmentPlan, leaves: Sequence[Any]) -> list[int]:
    """Values of the symbols that are not the token count, for one call."""
    sizes = []
    for index in plan.symbols:
        value = plan.values[index]
        sizes.append(leaves[value.leaf] if value.dim < 0 else leaves[value.leaf].shape[value.dim])
    return sizes


def trace_signature(
    model: nn.Module, example: ExampleCall, *, forward: Any, config: PiecewiseConfig
) -> CapturedSignature:
    """Traces and cuts the example's kind of call; captures nothing yet.

    Raises:
        TraceError, TokenDimError: the model cannot be traced, or its token count not found.
        CaptureError: with `strict`, an op lets padding reach real rows.
    """
    times = StartupTimes()
    with steps_bar(("tracing", "probing", "tracing one token"), enabled=config.progress) as begin:
        begin()
        with times.timed("trace"):
            traced = trace_model(model, example, forward=forward, config=config)
        begin()
        with times.timed("probe"):
            traced.probe(config.buckets, strict=config.strict)
        begin()
        ratio = config.max_padding_ratio
        one_is_in_range = ratio is None or config.buckets[0] <= ratio
        with times.timed("trace"):
            serves_one = one_is_in_range and serves_one_token(traced, model, forward=forward, config=config)

    def retrace(bucket: int) -> TracedModel:
        return trace_model(model, example_of_size(traced, bucket), forward=forward, config=config)

    return signature_of(traced, serves_one=serves_one, retrace=retrace, config=config, times=times)


def signature_of(
    traced: TracedModel,
    *,
    serves_one: bool,
    retrace: Callable[[int], TracedModel],
    config: PiecewiseConfig,
    times: StartupTimes,
) -> CapturedSignature:
    """The signature that a probed trace serves, under the global state (grad mode off) of now."""
    plan = traced.planned(config, times, move_weights=True)
    matcher = _matcher(traced, plan, traced.trace.example)
    return CapturedSignature(
        traced, plan, matcher, _rebuilder(traced), internals.GlobalState(), state_check_of(plan), serves_one,
        retrace, times=times,
    )  # fmt: skip


def capture_bucket(context: CaptureContext, signature: CapturedSignature, bucket: int) -> BucketReport:
    """Captures one bucket, from the signature's trace or, where that excludes the bucket, from one at its
    size."""
    began = time.perf_counter()
    before = context.pool.allocated_bytes, context.pool.device_bytes
    try:
        plan, assembler = _plan_for(context, signature, bucket)
        if assembler is None:
            detail = "the model branches on the token count, and no trace at this size holds"
            signature.refused[bucket] = (FallbackReason.SHAPE_GUARD, detail)
            report = BucketReport(bucket, "eager", detail)
        elif not assembler.runners:
            detail = "no op can be in a graph; explain() has the reason for each"
            signature.refused[bucket] = (FallbackReason.DISABLED, detail)
            report = BucketReport(bucket, "eager", detail)
        else:
            real = _warm_up_rows(plan, bucket, assembler.leaves)
            steps = assembler.capture(bucket, real, on_segment=context.on_segment)
            steps.check.settle()
            signature.served[bucket] = ServedBucket(steps, plan)
            signature.refused.pop(bucket, None)
            num_ops = sum(
                graph.num_ops
                for runner in assembler.runners.values()
                if (graph := runner.graph_for(bucket)) is not None
            )
            report = BucketReport(
                bucket, "captured", "", num_graphs=len(assembler.runners), num_ops=num_ops,
                grown_bytes=max(context.pool.allocated_bytes - before[0], 0),
                device_bytes=max(context.pool.device_bytes - before[1], 0),
                coverage=plan.coverage,
            )  # fmt: skip
    except Exception as error:
        if context.config.strict:
            raise
        detail = str(error) or f"{type(error).__name__} without a message"
        signature.refused[bucket] = (FallbackReason.CAPTURE_FAILED, detail)
        report = BucketReport(bucket, "failed", detail)
    report = dataclasses.replace(report, capture_ms=(time.perf_counter() - began) * 1e3)
    signature.bucket_reports[bucket] = report
    return report


def _plan_for(
    context: CaptureContext, signature: CapturedSignature, bucket: int
) -> tuple[SegmentPlan, PlanAssembler | None]:
    leaves = signature.traced.trace.example.leaves
    for assembler in signature.assemblers:
        if assembler.plan.is_valid(bucket, *other_sizes(assembler.plan, leaves)):
            return assembler.plan, assembler
    traced, plan, check = signature.traced, signature.plan, signature.check
    if not plan.is_valid(bucket, *other_sizes(plan, leaves)):
        with signature.times.timed("trace"):
            traced = signature.retrace(bucket)
        with signature.times.timed("probe"):
            traced.probe([bucket], strict=context.config.strict)
        plan = traced.planned(context.config, signature.times, move_weights=True)
        if not plan.is_valid(bucket, *other_sizes(plan, leaves)) or not _is_alike(signature.traced, traced):
            return plan, None
        check = state_check_of(plan)
    assert check is not None, "captures follow a trace of the model as it is"
    served = [size for size in context.config.buckets if plan.is_valid(size, *other_sizes(plan, leaves))]
    with signature.times.timed("lowering"):
        lowered = context.lowering.lower(plan, served)
    signature.lowerings.append(lowered.report)
    assembler = PlanAssembler(
        plan,
        functions=lowered.functions,
        leaves=traced.trace.example.leaves,
        engine=context.engine,
        pool=context.pool,
        buffers=context.buffers,
        check=check,
        step_metadata=traced.step_metadata,
        warmup_steps=context.config.warmup_steps,
        outputs=context.config.outputs,
        times=signature.times,
    )
    signature.assemblers.append(assembler)
    return plan, assembler


def _warm_up_rows(plan: SegmentPlan, bucket: int, leaves: Sequence[Any]) -> int:
    """How many rows of a warm-up are real: about half, where the trace allows that count."""
    others = other_sizes(plan, leaves)
    for rows in (bucket // 2 + 1, bucket - 1, bucket):
        if 1 < rows <= bucket and plan.is_valid(rows, *others):
            return rows
    return bucket


def _is_alike(first: TracedModel, other: TracedModel) -> bool:
    """Whether calls are recognised and results rebuilt for both traces in the same way."""
    rules, others = _leaf_rules(first), _leaf_rules(other)
    return first.trace.result == other.trace.result and all(
        rule.static == others[leaf].static and rule.exact == others[leaf].exact
        for leaf, rule in rules.items()
    )


def _leaf_rules(traced: TracedModel) -> dict[int, LeafRule]:
    """Leaf index → what it must be in a call that the trace is valid for."""
    trace, example = traced.trace, traced.trace.example
    symbolic = internals.symbolic_sizes(trace.shape_env)
    for placeholder in trace.placeholders:
        expr = internals.expression(placeholder.node.meta.get("example_value"), trace.shape_env)
        if placeholder.kind == "input" and expr is not None:
            symbolic[placeholder.leaf, -1] = expr
    read = {placeholder.leaf for placeholder in trace.placeholders if placeholder.kind == "input"}
    rules: dict[int, LeafRule] = {}
    for index, leaf in enumerate(example.leaves):
        if isinstance(leaf, torch.Tensor):
            sizes = trace.symbols_of_leaf(index) if index in read else ()
            static = {dim: int(expr) for dim, expr in enumerate(sizes) if expr.is_number}
            if index in trace.leaves_seen and index not in read:  # Python read it, and no op
                sized = {dim for (at, dim), expr in symbolic.items() if at == index and not expr.is_number}
                static = {dim: size for dim, size in enumerate(leaf.shape) if dim not in sized}
            rules[index] = LeafRule(leaf, static=static, exact=None)
        else:
            expr = symbolic.get((index, -1))
            rules[index] = LeafRule(leaf, static={}, exact=leaf if expr is None or expr.is_number else None)
    return rules


def _matcher(traced: TracedModel, plan: SegmentPlan, example: ExampleCall) -> Callable[[tuple], Any]:
    rules = _leaf_rules(traced)
    token = plan.token_dim
    dims = []
    for rule in token.inputs:
        for dim, size in rule.dims.items():
            if (rule.leaf, dim) != (token.leaf, token.dim):
                dims.append((rule.leaf, dim, same_count if dim == rule.anchor_dim else size))
    tensors = [index for index, leaf in enumerate(example.leaves) if isinstance(leaf, torch.Tensor)]
    # A tensor passed twice is two inputs of equal content; only a call that writes one must keep them apart.
    distinct = [(written, other) for written in plan.written_leaves for other in tensors if other != written]
    _refuse_shared_memory(example, distinct)
    in_graphs = {memory for segment in plan.graph_segments() for memory in segment.writes}
    # At the addresses of now: a call finds a moved one, and runs eagerly, before it writes.
    written = {_address_of(v.state) for v in plan.values if v.state is not None and v.memory in in_graphs}
    return write_matcher(
        example.values, rules, anchor=(token.leaf, token.dim), token_dims=dims, distinct=distinct,
        apart_from=frozenset(written),
    )  # fmt: skip


def _address_of(place: StateRef) -> int:
    return int(place.get().untyped_storage().data_ptr())


def _refuse_shared_memory(example: ExampleCall, pairs: Sequence[tuple[int, int]]) -> None:
    for pair in pairs:
        one, other = (example.leaves[index].untyped_storage().data_ptr() for index in pair)
        if one == other:
            written, read = (f"'{example.names[index]}'" for index in pair)
            raise TraceError(
                f"inputs {written} and {read} share memory, and forward writes {written}",
                rule="what a graph reads was written for this call [I2]",
                fix="pass tensors of their own, or let forward write a copy",
            )


def _rebuilder(traced: TracedModel) -> Callable[[list[Any]], Any]:
    namespace = Namespace()
    names = [f"leaves[{index}]" for index in range(len(traced.trace.result_leaves))]
    source = build_source(traced.trace.result, names, namespace)
    return eval(f"lambda leaves: {source}", namespace.globals)
