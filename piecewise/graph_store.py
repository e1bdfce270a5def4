"""The graphs of one model, their memory, and the decision which plan serves a call.

Both ways in, `GraphedModule` and the `torch.compile` backend, differ in how a call becomes leaves and in who
traces; from there on they are the same, and that is here.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from boundary_ops.capture import Misfit
from piecewise.capture_limits import capturable
from piecewise.config import PiecewiseConfig
from piecewise.progress import progress_bar
from piecewise.report import CaptureReport
from piecewise.traffic_recorder import TrafficRecorder
from runners.buckets import TokenBuckets
from runners.buffers import StaticBuffers
from runners.engine import GraphEngine, GraphPool, engine_for
from runners.mode import in_capture_window
from runners.state_check import StateChange
from runners.stats import CallStats, FallbackReason

if TYPE_CHECKING:
    from piecewise.lowering import Lowering
    from piecewise.signatures import CaptureContext, CapturedSignature

_CHANGE_REASONS = {
    "moved_address": FallbackReason.MOVED_ADDRESS,
    "module_state_changed": FallbackReason.MODULE_STATE_CHANGED,
}
MAX_LISTED = 16
# A bucket seen this often is worth its capture.
_LAZY_CALLS = 3


class GraphStore:
    """Signatures and their captured buckets, in one pool.

    Attributes:
        config: the settings, without buckets that their own limits put out of reach; `left_out` names those.
        signatures: the kinds of calls that were traced.
        stats, traffic: counters of calls, and of their token counts.
        changes: what was found changed since capture, in words.
        is_released: whether the graphs were given back, and nothing was captured since.
        engine, pool, buffers, lowering: made by the first capture; the pool goes with the last graph, what
            was compiled stays.
    """

    def __init__(self, config: PiecewiseConfig) -> None:
        self.config, self.left_out = capturable(config)
        self.signatures: list[CapturedSignature] = []
        self.stats = CallStats()
        self.traffic = TrafficRecorder()
        self.changes: OrderedDict[str, None] = OrderedDict()
        self.is_released = False
        self.engine: GraphEngine | None = None
        self.pool: GraphPool | None = None
        self.buffers = StaticBuffers()
        self.lowering: Lowering | None = None
        self._buckets = TokenBuckets(self.config.buckets)

    @property
    def engine_name(self) -> str:
        return self.engine.name if self.engine is not None else "none yet"

    def plan_for(
        self, signature: CapturedSignature, num_tokens: int, leaves: list[Any], *, may_capture: bool
    ) -> Any:
        """(signature, step plan, token count, leaves) where a plan serves the call, else the reason why
        not."""
        self.traffic.record(num_tokens)
        return self.choose_plan(signature, num_tokens, leaves, may_capture=may_capture)

    def choose_plan(
        self, signature: CapturedSignature, num_tokens: int, leaves: list[Any], *, may_capture: bool
    ) -> Any:
        """As `plan_for`, for a call that is not counted as traffic."""
        if num_tokens <= 0:
            return FallbackReason.ZERO_TOKENS if num_tokens == 0 else FallbackReason.TOKEN_COUNT_MISMATCH
        bucket = self._buckets.bucket_for(num_tokens)
        if bucket is None:
            return FallbackReason.ABOVE_LARGEST_BUCKET
        ratio = self.config.max_padding_ratio
        if ratio is not None and bucket > ratio * num_tokens:
            return FallbackReason.PADDING_RATIO
        if not signature.global_state.check():
            return FallbackReason.GLOBAL_STATE_CHANGED
        served = signature.served.get(bucket)
        if served is None:
            refused = self._refusal(signature, bucket, may_capture=may_capture)
            if refused is not None:
                return refused
            served = signature.served[bucket]
        if num_tokens == 1 and not signature.serves_one:
            return FallbackReason.ONE_TOKEN_BRANCH
        if not signature.is_valid(served, num_tokens, leaves):
            return FallbackReason.SHAPE_GUARD
        for metadata in served.steps.step_metadata:
            misfit = metadata.misfit(num_tokens)
            if misfit is not None:
                return self._misfit_reason(signature, misfit)
        return signature, served.steps, num_tokens, leaves

    def _misfit_reason(self, signature: CapturedSignature, misfit: Misfit) -> FallbackReason:
        """Why the running step cannot be loaded; a cache that was replaced is a change of the model."""
        if misfit is Misfit.TOO_LARGE:
            return FallbackReason.STEP_LIMIT
        change = signature.find_change()
        return self.note_change(change) if change is not None else FallbackReason.STEP_MISMATCH

    def _refusal(
        self, signature: CapturedSignature, bucket: int, *, may_capture: bool
    ) -> FallbackReason | None:
        """Captures a bucket that is due; why it is not served, or None where it is now."""
        if bucket in signature.refused:
            return signature.refused[bucket][0]
        if not may_capture or not self._is_due(signature, bucket):
            return FallbackReason.NOT_CAPTURED
        change = signature.find_change()
        if change is not None:  # the trace is out of date: a refresh makes a new one
            return self.note_change(change)
        untried = [size for size in self.missing(signature) if size not in signature.refused]
        self.capture(signature, untried if in_capture_window() else [bucket])
        return None if bucket in signature.served else signature.refused[bucket][0]

    def _is_due(self, signature: CapturedSignature, bucket: int) -> bool:
        if in_capture_window():
            return True
        signature.waiting[bucket] += 1
        return signature.waiting[bucket] >= _LAZY_CALLS

    def missing(self, signature: CapturedSignature) -> list[int]:
        """Buckets that are not captured, largest first: its memory serves the rest [I9]."""
        return [size for size in sorted(self._buckets.sizes, reverse=True) if size not in signature.served]

    def capture(self, signature: CapturedSignature, buckets: list[int]) -> CaptureReport:
        """Captures `buckets` in this order; one that fails is refused, with its reason in the report."""
        from piecewise.signatures import capture_bucket

        context = self._context(signature)
        bar = progress_bar(len(buckets), enabled=self.config.progress)
        try:
            for bucket in buckets:
                bar.set_description(f"capturing bucket {bucket}")
                capture_bucket(context, signature, bucket)
                bar.set_postfix_str(f"{context.pool.allocated_bytes / 2**20:.0f} MiB")
                bar.update(1)
        finally:
            bar.close()
            self._note_captured()
        self.is_released = False
        return self.report_of(signature)

    def report_of(self, signature: CapturedSignature) -> CaptureReport:
        """How the captures of one signature went."""
        buckets = tuple(signature.bucket_reports[b] for b in sorted(signature.bucket_reports, reverse=True))
        pool = self.pool
        pool_bytes, device_bytes = (pool.allocated_bytes, pool.device_bytes) if pool is not None else (0, 0)
        return CaptureReport(
            buckets, signature.serves_one, pool_bytes, self.buffers.allocated_bytes, device_bytes,
            tuple(signature.lowerings), dataclasses.replace(signature.times),
            signature.plan.fusions,
        )  # fmt: skip

    def note_change(self, change: StateChange) -> FallbackReason:
        """Lists the change; graphs that read moved memory are given up, so that the old weights can go."""
        if change.detail in self.changes or len(self.changes) < MAX_LISTED:
            self.changes[change.detail] = None
        if change.kind == "moved_address":
            for signature in self.signatures:
                moved = signature.find_change()
                if moved is not None and moved.kind == "moved_address":
                    signature.give_up(moved)
            if not any(signature.served for signature in self.signatures):
                self._release_pool()
            self._note_captured()
        return _CHANGE_REASONS[change.kind]

    def drop_graphs(self) -> None:
        """Resets every graph and gives the memory back; the signatures stay."""
        for signature in self.signatures:
            signature.reset()
        self.changes.clear()
        self._release_pool()
        self._note_captured()

    def _note_captured(self) -> None:
        self.stats.captured = tuple(sorted({b for s in self.signatures for b in s.served}))

    def _context(self, signature: CapturedSignature) -> CaptureContext:
        from piecewise.lowering import Lowering
        from piecewise.signatures import CaptureContext

        device = signature.traced.trace.example.leaves[signature.plan.token_dim.leaf].device
        if self.engine is None:
            self.engine = engine_for(self.config.engine, device)
        if self.pool is None:
            self.pool = self.engine.new_pool(device)
        if self.lowering is None:
            self.lowering = Lowering(self.config)
        return CaptureContext(self.config, self.engine, self.pool, self.buffers, self.lowering)

    def _release_pool(self) -> None:
        if self.pool is not None:
            self.pool.release()
        self.pool = None
        self.buffers = StaticBuffers()
