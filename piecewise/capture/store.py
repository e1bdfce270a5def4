"""The graphs of one model, their memory, and the decision which plan serves a call.

Both ways in, `GraphedModule` and the `torch.compile` backend, differ in how a call becomes leaves and in who
traces; from there on they are the same, and that is here.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from boundary_ops.declare.boundary_op import StepMismatch
from piecewise.capture.limits import capturable, check_boundary_ops, lack_of_memory
from piecewise.capture.signature_list import SignatureList
from piecewise.capture.traffic_recorder import TrafficRecorder
from piecewise.errors.report import CoverageError
from piecewise.report.coverage import require_buckets, require_plan
from piecewise.report.progress import progress_bar
from piecewise.report.report import BucketReport, CaptureReport, PlanReport, Report
from piecewise.settings.config import PiecewiseConfig
from runners.buckets import TokenBuckets
from runners.buffers import StaticBuffers
from runners.collector import paused_collector
from runners.engine import GraphEngine, GraphPool
from runners.engines import engine_for
from runners.errors import StateError
from runners.mode import in_capture_window
from runners.state.state_check import StateChange
from runners.stats import CallStats, FallbackReason

if TYPE_CHECKING:
    import torch

    from piecewise.capture.captured_call import CaptureContext, CapturedSignature
    from piecewise.lowering.lowering import Lowering

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
        is_released: whether the graphs were given back for good, and nothing was captured since.
        is_suspended: whether they were given back until `resume`.
        engine, pool, buffers, lowering: made by the first capture; the pool goes with the last graph, what
            was compiled stays.
    """

    def __init__(self, config: PiecewiseConfig) -> None:
        check_boundary_ops(config)
        self.config, self.left_out = capturable(config)
        self._left_out_buckets = {each.size: str(each) for each in config.prefill_sizes().clamped}
        self._advertised = tuple(sorted(config.buckets, reverse=True))
        self.signatures = SignatureList()
        self.stats = CallStats()
        self.traffic = TrafficRecorder()
        self.changes: OrderedDict[str, None] = OrderedDict()
        self.is_released = self.is_suspended = False
        self.engine: GraphEngine | None = None
        self.pool: GraphPool | None = None
        self.buffers = StaticBuffers()
        self.lowering: Lowering | None = None
        self._buckets = TokenBuckets(self.config.buckets)
        self._num_added = 0

    @property
    def engine_name(self) -> str:
        return self.engine.name if self.engine is not None else "none yet"

    def plan_for(
        self,
        signature: CapturedSignature,
        num_tokens: int,
        leaves: list[Any],
        *,
        may_capture: bool,
        is_new: bool = True,
    ) -> Any:
        """(signature, step plan, token count, leaves) where a plan serves the call, else the reason why not.

        Args:
            is_new: whether the call was not counted as traffic yet.
        """
        if is_new:
            self.traffic.record(num_tokens)
        if signature.suspended is not None and not self.is_suspended and signature.global_state.check():
            self._resume_at_call(signature)
        found = self.choose_plan(signature, num_tokens, leaves, may_capture=may_capture)
        if isinstance(found, FallbackReason) and is_new:
            bucket = self._buckets.bucket_for(max(num_tokens, 0))
            if bucket is not None:
                self.stats.place_eager(bucket, found)
        return found

    def has_bucket(self, signature: CapturedSignature, num_tokens: int) -> bool:
        """Whether a signature has graphs for a count; true where no bucket is for it, which is no lack."""
        bucket = self._buckets.bucket_for(max(num_tokens, 0))
        return bucket is None or bucket in signature.served

    def choose_plan(
        self, signature: CapturedSignature, num_tokens: int, leaves: list[Any], *, may_capture: bool
    ) -> Any:
        """As `plan_for`, for a call that is not counted as traffic."""
        if self.is_suspended:
            return FallbackReason.SUSPENDED
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
        if num_tokens == 1 and signature.one_token:
            return FallbackReason.ONE_TOKEN_BRANCH
        if not signature.is_valid(served, num_tokens, leaves):
            return FallbackReason.SHAPE_GUARD
        for metadata in served.steps.step_metadata:
            mismatch = metadata.mismatch(num_tokens)
            if mismatch is not None:
                return self._mismatch_reason(signature, mismatch)
        return signature, served.steps, num_tokens, leaves

    def _mismatch_reason(self, signature: CapturedSignature, mismatch: StepMismatch) -> FallbackReason:
        """Why the running step cannot be loaded; a cache that was replaced is a change of the model."""
        if mismatch is StepMismatch.TOO_LARGE:
            return FallbackReason.STEP_LIMIT
        change = signature.find_change()
        return self.note_change(change) if change is not None else FallbackReason.STEP_MISMATCH

    def _refusal(
        self, signature: CapturedSignature, bucket: int, *, may_capture: bool
    ) -> FallbackReason | None:
        """Captures a bucket that is due; why it is not served, or None where it is now."""
        if bucket in signature.refused:
            return signature.refused[bucket][0]
        if not may_capture:
            return FallbackReason.NOT_CAPTURED
        if not in_capture_window():
            signature.waiting[bucket] += 1
            if signature.waiting[bucket] < _LAZY_CALLS:
                return FallbackReason.NOT_CAPTURED
        change = signature.find_change()
        if change is not None:  # the trace is out of date: a refresh makes a new one
            return self.note_change(change)
        untried = [size for size in self.missing(signature) if size not in signature.refused]
        if in_capture_window():
            self.capture(signature, untried)
        elif (lack := lack_of_memory(_device_of(signature))) is not None:
            signature.refuse(bucket, FallbackReason.OUT_OF_MEMORY, lack)
        else:
            try:
                self.capture(signature, [bucket])
            except CoverageError as error:  # told once: a call is no capture() that somebody waits for
                if signature not in self.signatures:
                    self.signatures.append(signature)
                signature.refuse(bucket, FallbackReason.LOW_COVERAGE, str(error))
                raise
        return None if bucket in signature.served else signature.refused[bucket][0]

    def missing(self, signature: CapturedSignature) -> list[int]:
        """Buckets that are not captured, largest first: its memory serves the rest [I9]."""
        return [size for size in sorted(self._buckets.sizes, reverse=True) if size not in signature.served]

    def add(
        self, signature: CapturedSignature, *, instead_of: CapturedSignature | None = None
    ) -> CapturedSignature:
        """Adds a traced signature, or puts it in the place of one; returns it.

        Raises:
            CoverageError: its plan has less than `min_coverage` of the ops in graphs.
        """
        require_plan(signature.plan, self.config.min_coverage)
        signature.number = instead_of.number if instead_of else self._num_added
        self._num_added += 1
        if instead_of is None:
            self.signatures.append(signature)
        else:
            self.signatures[:] = [signature if each is instead_of else each for each in self.signatures]
        return signature

    @paused_collector()
    def capture(
        self, signature: CapturedSignature, buckets: list[int], *, doing: str = "capturing"
    ) -> CaptureReport:
        """Captures `buckets` in this order; one that fails is refused, with its reason in the report.

        Raises:
            CoverageError: a bucket has less than `min_coverage` of its ops in graphs; none of these is kept.
        """
        from piecewise.capture.captured_call import capture_bucket

        context = self._context(signature)
        bar = progress_bar(len(buckets), enabled=self.config.progress)
        try:
            for bucket in buckets:
                bar.set_description(f"{doing} bucket {bucket}")
                capture_bucket(context, signature, bucket)
                bar.set_postfix_str(f"{context.pool.allocated_bytes / 2**20:.0f} MiB")
                bar.update(1)
            reports = [signature.bucket_reports[bucket] for bucket in buckets]
            require_buckets(reports, self.config.min_coverage)
        except CoverageError:
            for bucket in buckets:  # nothing is left: no bucket, no signature without one, no memory [I8]
                signature.take_back(bucket)
            if not signature.served:
                self.remove(signature)
            raise
        finally:
            bar.close()
            self._note_captured()
        self.is_released = False
        return self.report_of(signature)

    def remove(self, signature: CapturedSignature) -> None:
        """Drops a signature with its graphs, and the pool with the last of them. Idempotent."""
        signature.reset()
        self.signatures[:] = [each for each in self.signatures if each is not signature]
        if not any(each.served for each in self.signatures):
            self._release_pool()
        self._note_captured()

    def suspend(self) -> None:
        """Gives all graph memory back and keeps the traces. Idempotent."""
        for signature in self.signatures:
            signature.suspend()
        self._release_pool()
        self._note_captured()
        self.is_suspended = True

    def resume(
        self, retrace: Callable[[CapturedSignature], CapturedSignature] | None
    ) -> CaptureReport | None:
        """Captures again what `suspend` gave back; a signature whose model changed is traced again first, and
        one that was traced under another global state is captured at its next call. So is each one where
        `retrace` is None.

        Raises:
            StateError: it is not suspended.
            Whatever `retrace` or a capture raises: then everything is suspended as before, and this can be
            called again.
        """
        if not self.is_suspended:
            raise StateError(
                "resume()",
                expected="a model that suspend() was called on",
                got="one that is not suspended",
                rule="resume() undoes suspend()",
                fix="call capture() to capture, or refresh() to capture again",
            )
        if retrace is None:
            self.is_suspended = False
            return None
        # A graph is captured under the autocast, default dtype and so on of its trace; where those differ, it
        # has to wait for a call under them.
        for old in list(self.signatures):
            assert old.suspended is not None
            if old.is_of_this_state() and not old.holds() and not self.signatures.has_current_variant(old):
                self.add(retrace(old), instead_of=old).suspend_for(old.suspended.buckets)
        signatures = list(self.signatures)
        # Variants of another state of the model than now wait for its return.
        due = [each for each in signatures if each.is_of_this_state() and each.holds()]
        resumed = [(each, each.resume()) for each in due]
        for each in reversed(due):
            self.signatures.prefer(each)
        self.is_suspended = False
        report = None
        try:
            for signature, buckets in resumed:
                report = self.capture(signature, buckets, doing="capturing again:")
        except BaseException:
            self.signatures[:] = signatures
            for signature, buckets in resumed:
                signature.suspend_for(buckets)
            self.suspend()
            raise
        return report

    def _resume_at_call(self, signature: CapturedSignature) -> None:
        assert signature.suspended is not None
        if not signature.holds():
            detail = "the model changed while it was suspended; refresh() captures again"
            for bucket in signature.suspended.buckets:
                signature.refuse(bucket, FallbackReason.MODULE_STATE_CHANGED, detail)
            signature.suspended = None
            return
        buckets = signature.resume()
        try:
            self.capture(signature, buckets, doing="capturing again:")
        except BaseException as error:  # told once, not at each call
            for bucket in buckets:
                if bucket not in signature.served:
                    signature.refuse_after(error, bucket)
            raise

    def refuse_suspended(self, what: str) -> None:
        """Raises StateError while suspended."""
        if self.is_suspended:
            raise StateError(
                f"{what}() while suspended",
                expected="graphs, or none asked for",
                got="a model whose graphs wait for resume()",
                rule="suspend() promised the memory to somebody else until resume()",
                fix="call resume() first, or release() to give the graphs up for good",
            )

    def report_of(self, signature: CapturedSignature) -> CaptureReport:
        """How each advertised bucket of one signature stands, largest first."""
        pool = self.pool
        pool_bytes, device_bytes = (pool.allocated_bytes, pool.device_bytes) if pool is not None else (0, 0)
        buckets = tuple(self._bucket_report(signature, b) for b in self._advertised)
        return CaptureReport(
            buckets, not signature.one_token, pool_bytes, self.buffers.allocated_bytes, device_bytes,
            tuple(lowered.report() for lowered in signature.lowerings), dataclasses.replace(signature.times),
            signature.plan.fusions, signature.one_token,
            tuple(
                report
                for assembler in signature.assemblers
                if (report := assembler.streams.report()) is not None
            ),
            layers=signature.traced.trace.layers,
            adapters=signature.adapters,
            other_state=self.signatures.other_state(signature),
        )  # fmt: skip

    def _bucket_report(self, signature: CapturedSignature, bucket: int) -> BucketReport:
        known = signature.bucket_reports.get(bucket)
        if known is not None:
            return known
        if bucket in self._left_out_buckets:
            return BucketReport(bucket, "left out", self._left_out_buckets[bucket], code="left_out")
        detail = "capture() was not asked for it"
        if self.config.capture == "lazy":
            detail = f"{signature.waiting[bucket]} of the {_LAZY_CALLS} calls that a lazy capture waits for"
        return BucketReport(bucket, "waiting", detail, code=FallbackReason.NOT_CAPTURED.value)

    def report(self, unseen: Mapping[str, int]) -> Report:
        """Plans, captures and calls so far; `unseen` are the kinds of call that no signature serves."""
        signatures = self.signatures.captured_order()
        return Report(
            tuple(PlanReport.of(s.plan, s.traced.trace.example.names) for s in signatures),
            tuple(map(self.report_of, signatures)),
            self.stats.snapshot(),
            dict(unseen),
            tuple(self.changes),
            self.engine_name,
            self.left_out,
            self.state,
        )

    @property
    def state(self) -> str:
        """Where the graphs are: "suspended", "released", "captured" or "not captured"."""
        if self.is_suspended or self.is_released:
            return "suspended" if self.is_suspended else "released"
        return "captured" if self.stats.captured else "not captured"

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
        """Resets every graph, gives the memory back and forgets the signatures. Ends a suspension."""
        for signature in self.signatures:
            signature.reset()
        self.signatures.clear()
        self.changes.clear()
        self.is_suspended = False
        self._release_pool()
        self._note_captured()

    def _note_captured(self) -> None:
        self.stats.captured = tuple(sorted({b for s in self.signatures for b in s.served}))

    def _context(self, signature: CapturedSignature) -> CaptureContext:
        from piecewise.capture.captured_call import CaptureContext
        from piecewise.lowering.lowering import Lowering

        device = _device_of(signature)
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


def _device_of(signature: CapturedSignature) -> torch.device:
    device: torch.device = signature.traced.trace.example.leaves[signature.plan.token_dim.leaf].device
    return device
