"""Captures one bucket of a signature from a trace that holds at its size; cuts again around ops that fail."""

import dataclasses
import logging
import time
from collections.abc import Sequence

from piecewise.capture.build_plan import CaptureContext, PlanAssembler, state_check_of
from piecewise.capture.call_rules import is_alike
from piecewise.capture.captured_call import CapturedSignature, Cut, ServedBucket, is_out_of_memory
from piecewise.capture.faults import SegmentFault
from piecewise.ir.plan import SegmentPlan
from piecewise.report.coverage import eager_ops
from piecewise.report.report import BucketReport
from piecewise.streams.streams import StreamSchedules
from runners.stats import FallbackReason
from runners.step_plan import StepPlan

_log = logging.getLogger(__name__)


def capture_bucket(context: CaptureContext, signature: CapturedSignature, bucket: int) -> BucketReport:
    """Captures one bucket, or refuses it with its reason; with `strict`, raises what the capture raised."""
    began = time.perf_counter()
    if bucket == 1 and (reason := signature.one_token_refusal()):  # no call could reach its graphs
        signature.refuse(bucket, FallbackReason.ONE_TOKEN_BRANCH, reason)
        return signature.bucket_reports[bucket]
    cut: Cut | None = None
    try:
        cut = _cut_for(context, signature, bucket)
        _capture_cut(context, signature, cut, bucket)
    except Exception as error:
        shown = error.error if isinstance(error, SegmentFault) else error
        _log.debug("the capture of bucket %d failed", bucket, exc_info=shown)
        if context.config.strict:
            raise shown from shown.__cause__
        lost = None
        try:
            lost = _cut_again(context, signature, cut, error)
        except Exception as second:
            shown = second
        if lost is not None:
            for size in sorted({*lost, bucket}, reverse=True):
                capture_bucket(context, signature, size)
            return signature.bucket_reports[bucket]
        signature.refuse_after(shown, bucket)
    taken_ms = (time.perf_counter() - began) * 1e3
    report = dataclasses.replace(signature.bucket_reports[bucket], capture_ms=taken_ms)
    signature.bucket_reports[bucket] = report
    return report


def _cut_for(context: CaptureContext, signature: CapturedSignature, bucket: int) -> Cut | None:
    """Finds a known cut that holds for a bucket, else traces one at its size; None if none holds."""
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
    signature.take_state()
    return cut


def _capture_cut(context: CaptureContext, signature: CapturedSignature, cut: Cut | None, bucket: int) -> None:
    if cut is None:
        detail = "the model branches on the token count, and no trace at this size holds"
        most = signature.plan.max_rows
        if most is not None and bucket > most:
            detail = f"an index of its padded rows would reach beyond a table of {most} rows"
        signature.refuse(bucket, FallbackReason.SHAPE_GUARD, detail)
        return
    before = context.pool.allocated_bytes, context.pool.device_bytes
    assembler = _assembler_of(context, signature, cut)
    if not assembler.runners:
        detail = f"no op can be in a graph{eager_ops(cut.plan)}"
        signature.refuse(bucket, FallbackReason.NO_GRAPH, detail)
        return
    steps = _step_plan(cut, assembler, bucket)
    signature.served[bucket] = ServedBucket(steps, cut.plan)
    signature.refused.pop(bucket, None)
    graphs = [runner.graph_for(bucket) for runner in assembler.runners.values()]
    signature.bucket_reports[bucket] = BucketReport(
        bucket, "captured", "", num_graphs=len(assembler.runners),
        num_ops=sum(graph.num_ops for graph in graphs if graph is not None),
        grown_bytes=max(context.pool.allocated_bytes - before[0], 0),
        device_bytes=max(context.pool.device_bytes - before[1], 0),
        coverage=cut.plan.coverage,
    )  # fmt: skip


def _assembler_of(context: CaptureContext, signature: CapturedSignature, cut: Cut) -> PlanAssembler:
    if cut.assembler is not None:
        return cut.assembler
    traced, plan = cut.traced, cut.plan
    leaves = traced.trace.example.leaves
    check = signature.check if cut is signature.cuts[0] else state_check_of(plan)
    assert check is not None, "captures follow a trace of the model as it is"
    served = [size for size in context.config.buckets if plan.holds_at(size, leaves)]
    _log.info("lowering %d graph segments (%s)", len(plan.graph_segments()), context.config.lowering)
    with signature.times.timed("lowering"):
        lowered = cut.lowered = context.lowering.lower(plan, served, traced.graphs)
        streams = StreamSchedules(
            plan, lowered.report(), num_rows=max(served, default=0),
            num_streams=context.config.num_streams,
        )  # fmt: skip
    _log.info("lowered: %s", lowered.report())
    metadata = [metadata for metadata, _ in traced.step_metadata]
    cut.assembler = PlanAssembler(
        plan, context, functions=lowered.functions, streams=streams, leaves=leaves, check=check,
        step_metadata=metadata, times=signature.times,
    )  # fmt: skip
    return cut.assembler


def _step_plan(cut: Cut, assembler: PlanAssembler, bucket: int) -> StepPlan:
    """Captures the bucket, warmed up on repeated example rows or, if the model rejects those, on its own."""
    rows, own = _warm_up_rows(cut.plan, bucket, assembler.leaves), cut.traced.token.example_num_tokens
    try:
        return assembler.capture(bucket, rows)
    except SegmentFault as fault:
        may_help = 1 < own <= bucket and own != rows and not is_out_of_memory(fault)
        if not may_help or not cut.traced.is_the_models(fault, cut.plan):
            raise
    return assembler.capture(bucket, own)


def _warm_up_rows(plan: SegmentPlan, bucket: int, leaves: Sequence[object]) -> int:
    """Chooses how many warm-up rows are real: about half, where the trace allows that count."""
    for rows in (bucket // 2 + 1, bucket - 1, bucket):
        if 1 < rows <= bucket and plan.holds_at(rows, leaves):
            return rows
    return bucket


def _cut_again(
    context: CaptureContext, signature: CapturedSignature, cut: Cut | None, error: Exception
) -> list[int] | None:
    """Cuts the trace again to avoid a fault; returns the buckets that lost their graphs, or None."""
    if cut is None or cut.assembler is None or not isinstance(error, SegmentFault) or is_out_of_memory(error):
        return None
    if not cut.traced.heed(error, cut.plan):
        return None
    plan = cut.traced.planned(context.config, signature.times, move_weights=True)
    lost = [bucket for bucket, served in signature.served.items() if served.plan is cut.plan]
    for bucket in lost:
        del signature.served[bucket]
    _log.info("cut again, since a capture failed: %s", error.error.what)
    cut.reset()
    cut.plan = plan
    if cut is signature.cuts[0]:
        signature.take_addresses()
    return lost
