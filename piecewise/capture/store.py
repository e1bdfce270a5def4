"""Keeps the graphs of one model and their memory, from capture over suspension to release.

    NOT_CAPTURED ──capture──▶ CAPTURED ──suspend──▶ SUSPENDED ──resume──▶ CAPTURED
         ▲                    │      ▲                  │
         │            refresh │      │ (suspends, traces again what differs, resumes)
         └── RELEASED ◀─release      └──────────────────┘

`GraphedModule` and the `torch.compile` backend differ in how they recognise a call and in who traces it; the
rest is the same for both, and is here.
"""

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch

from boundary_ops.declare.boundary_op import StepMismatch
from piecewise import torch_api
from piecewise.capture.bucket_capture import capture_bucket
from piecewise.capture.build_plan import CaptureContext
from piecewise.capture.captured_call import CapturedSignature, SignatureList
from piecewise.capture.first_fallbacks import FirstFallbacks
from piecewise.capture.limits import capturable, check_boundary_ops, lack_of_memory
from piecewise.capture.traffic_recorder import TrafficRecorder
from piecewise.errors.capture import NotSuspended, StillSuspended
from piecewise.errors.report import CoverageError
from piecewise.lowering.lowering import Lowering
from piecewise.report.coverage import require_buckets, require_graphs, require_plan
from piecewise.report.progress import progress_bar
from piecewise.report.report import BucketReport, CaptureReport, PlanReport, Report
from piecewise.settings.config import PiecewiseConfig
from runners.buffers import StaticBuffers
from runners.collector import paused_collector
from runners.engine import GraphEngine, GraphPool
from runners.engines import engine_for
from runners.mode import in_capture_window
from runners.state.state_check import StateChange
from runners.stats import CallStats, FallbackReason

_log = logging.getLogger(__name__)
_CHANGE_REASONS = {
    "moved_address": FallbackReason.MOVED_ADDRESS,
    "module_state_changed": FallbackReason.MODULE_STATE_CHANGED,
}
MAX_LISTED = 16
# After this many calls, a bucket is worth its capture.
_LAZY_CALLS = 3

# Traces a signature's example again, with the model as it is.
Retrace = Callable[[CapturedSignature], CapturedSignature]


class GraphStore:
    """Keeps signatures and their captured buckets, in one memory pool.

    Attributes:
        config: the settings, without buckets that their own limits put out of reach; `left_out` names those.
        signatures: the traced kinds of calls.
        stats, traffic: counters of calls, and of their token counts; `first` warns of those that run eagerly.
        changes: changes found since capture, in words.
        is_released: whether the graphs were given back for good, and nothing was captured since.
        is_suspended: whether the graphs were given back until `resume`.
        engine, pool, buffers, lowering: made by the first capture; the pool goes with the last graph, while
            compiled code stays.
    """

    def __init__(self, config: PiecewiseConfig) -> None:
        check_boundary_ops(config)
        self.config, self.left_out = capturable(config)
        self._left_out_buckets = {each.size: str(each) for each in config.prefill_sizes().clamped}
        self._advertised = tuple(sorted(config.buckets, reverse=True))
        self.signatures = SignatureList()
        self.stats, self.first = CallStats(), FirstFallbacks()
        self.traffic = TrafficRecorder()
        self.changes: OrderedDict[str, None] = OrderedDict()
        self.is_released = self.is_suspended = False
        self.engine: GraphEngine | None = None
        self.pool: GraphPool | None = None
        self.buffers = StaticBuffers()
        self.lowering: Lowering | None = None
        self._to_refresh: list[CapturedSignature] = []
        self._keeps_no_trace = False  # of those to refresh
        self._num_added = 0

    @property
    def state(self) -> str:
        """Names the graphs' state: "disabled", "suspended", "released", "captured" or "not captured"."""
        if self.config.disable:
            return "disabled"
        if self.is_suspended or self.is_released:
            return "suspended" if self.is_suspended else "released"
        return "captured" if self.stats.captured else "not captured"

    def missing(self, signature: CapturedSignature) -> list[int]:
        """Lists buckets not captured yet, largest first: the largest one's memory serves the rest [I9]."""
        return [size for size in sorted(self.config.buckets, reverse=True) if size not in signature.served]

    def add(
        self, signature: CapturedSignature, *, instead_of: CapturedSignature | None = None
    ) -> CapturedSignature:
        """Adds a traced signature, or replaces another one with it; returns it.

        Raises CoverageError if its plan has less than `min_coverage` of the ops in graphs.
        """
        require_plan(signature.plan, self.config.min_coverage)
        signature.number = instead_of.number if instead_of else self._num_added
        self._num_added += 1
        if instead_of is None or instead_of not in self.signatures:
            self.signatures.append(signature)
        else:
            self.signatures[self.signatures.index(instead_of)] = signature
        return signature

    def remove(self, signature: CapturedSignature) -> None:
        """Drops a signature with its graphs, and the pool with the last of them. Idempotent."""
        signature.reset()
        self.signatures[:] = [each for each in self.signatures if each is not signature]
        self._note_captured()

    @property
    def reason_for_none(self) -> FallbackReason:
        """Says why there is no signature."""
        return FallbackReason[self.state.replace(" ", "_").upper()]

    def capture_listed(self, signature: CapturedSignature) -> CaptureReport:
        """Captures what a signature lacks; warns of buckets that stay without graphs, as `require_graphs`."""
        report = self.capture(signature, self.missing(signature))
        require_graphs(report, allow_eager=self.config.allow_eager)
        return report

    @paused_collector()
    def capture(
        self, signature: CapturedSignature, buckets: Sequence[int], *, doing: str = "capturing"
    ) -> CaptureReport:
        """Captures `buckets` in this order; a bucket that fails is refused, with its reason in the report.

        Raises CoverageError if a bucket has less than `min_coverage` of its ops in graphs; keeps none then.
        """
        context = self._context(signature)
        bar = progress_bar(len(buckets), enabled=self.config.progress)
        try:
            for bucket in buckets:
                bar.set_description(f"{doing} bucket {bucket}")
                _log.info("%s bucket %d", doing, bucket)
                report = capture_bucket(context, signature, bucket)
                outcome = report.reason or f"{report.num_graphs} graphs, {report.num_ops} ops"
                _log.info("bucket %d is %s in %.0f ms: %s", bucket, report.status, report.capture_ms, outcome)
                bar.set_postfix_str(f"{context.pool.allocated_bytes / 2**20:.0f} MiB")
                bar.update(1)
            for assembler in signature.assemblers:
                assembler.check.until_stable()
            reports = [signature.bucket_reports[bucket] for bucket in buckets]
            require_buckets(reports, self.config.min_coverage)
        except CoverageError:
            for bucket in buckets:  # keep no bucket, no empty signature, no memory [I8]
                signature.take_back(bucket)
            if not signature.served:
                self.remove(signature)
            raise
        finally:
            bar.close()
            self._note_captured()
        self.is_released = False
        return self.report_of(signature)

    def refusal(
        self, signature: CapturedSignature, bucket: int, *, may_capture: bool
    ) -> FallbackReason | None:
        """Captures a bucket that is due; returns why it is not served, or None if it is now."""
        if bucket in signature.refused:
            return self._refused(signature, bucket)
        if not may_capture:
            return FallbackReason.NOT_CAPTURED
        if not in_capture_window():
            signature.waiting[bucket] += 1
            if signature.waiting[bucket] < _LAZY_CALLS:
                return FallbackReason.NOT_CAPTURED
        change = signature.find_change()
        if change is not None:  # the trace is out of date; refresh() makes a new one
            return self.note_change(change)
        untried = [size for size in self.missing(signature) if size not in signature.refused]
        if in_capture_window():
            self.capture(signature, untried)
        elif (lack := lack_of_memory(_device_of(signature))) is not None:
            signature.refuse(bucket, FallbackReason.OUT_OF_MEMORY, lack)
        else:
            try:
                self.capture(signature, [bucket])
            except CoverageError as error:  # listed once: nobody called capture()
                if signature not in self.signatures:
                    self.signatures.append(signature)
                signature.refuse(bucket, FallbackReason.LOW_COVERAGE, str(error))
                raise
        return None if bucket in signature.served else self._refused(signature, bucket)

    def _refused(self, signature: CapturedSignature, bucket: int) -> FallbackReason:
        detail = signature.bucket_reports[bucket].reason.splitlines()[0]
        return self.first.because(signature.refused[bucket], detail.rstrip(":"))

    def suspend(self) -> None:
        """Gives all graph memory back and keeps the traces. Idempotent."""
        for signature in self.signatures:
            signature.suspend()
        self.is_suspended = True
        self._note_captured()

    def resume(self, retrace: Retrace | None) -> CaptureReport | None:
        """Captures again what `suspend` gave back.

        A signature whose model changed is traced again first. One traced under another global state is
        captured at its next call; without `retrace`, so is every signature.

        Raises:
            StateError: it is not suspended.
            Whatever `retrace` or a capture raises: all is suspended as before, so this can be called again.
        """
        if not self.is_suspended:
            raise NotSuspended()
        if retrace is None:
            self.is_suspended = False
            return None
        for old in list(self.signatures):
            if old.is_of_this_state() and not old.holds() and not self.signatures.has_current_variant(old):
                self._trace_again(old, retrace)
        signatures = list(self.signatures)
        # A graph is captured under the autocast, default dtype and so on of its trace, and of one state of
        # the model; if these differ now, the signature waits for a call under them.
        due = [each for each in signatures if each.is_whole()]
        for each in reversed(due):
            self.signatures.prefer(each)
        self.is_suspended = False
        report = None
        try:
            for each in due:
                report = self._capture_again(each)
            require_graphs(report, allow_eager=self.config.allow_eager or bool(self.stats.captured))
        except BaseException:
            self.signatures[:] = signatures
            self.suspend()
            raise
        return report

    def refresh(self, retrace: Retrace) -> CaptureReport | None:
        """Captures everything again with the model as it is; forgets captures of the model in another state.

        A trace is made again only if the model differs from the traced one. If calls would find no change,
        all traces are made again: the reason for this refresh must then be a change that no call finds.

        Raises:
            Whatever `retrace` or a capture raises: the next refresh captures what is still missing.
        """
        if not self._to_refresh:  # else an earlier refresh that failed decided it
            self._keeps_no_trace = all(each.is_current() for each in self.signatures)
        self._to_refresh += self.signatures.captured_order()
        for each in self._to_refresh:
            each.suspend()
        self.signatures.clear()
        self.changes.clear()
        self._note_captured()
        kept = {each for each in self._to_refresh if each.is_whole() and not self._keeps_no_trace}
        self._to_refresh.sort(key=lambda each: each not in kept)  # their variants then need no trace either
        report = None
        while self._to_refresh:
            old = self._to_refresh[0]
            variant = self.signatures.current_variant(old)  # variants of one kind of call become one
            if variant is not None:
                buckets = [bucket for bucket in old.buckets if bucket not in variant.served]
                report = self.capture(variant, buckets)
            else:
                new = self.add(old, instead_of=old) if old in kept else self._trace_again(old, retrace)
                try:
                    report = self._capture_again(new)
                except BaseException:
                    self.remove(new)
                    raise
            del self._to_refresh[0]
        require_graphs(report, allow_eager=self.config.allow_eager or bool(self.stats.captured))
        return report

    def resume_at_call(self, signature: CapturedSignature) -> None:
        """Captures a suspended signature's buckets at its first call, if the model has not changed."""
        buckets = signature.suspended or ()
        if not signature.holds():
            detail = "the model changed while it was suspended; refresh() captures again"
            for bucket in buckets:
                signature.refuse(bucket, FallbackReason.MODULE_STATE_CHANGED, detail)
            signature.suspended = None
            return
        signature.end_suspension()
        try:
            self.capture(signature, buckets, doing="capturing again:")
        except BaseException as error:  # raised once, not at each call
            for bucket in buckets:
                if bucket not in signature.served:
                    signature.refuse_after(error, bucket)
            raise

    def _trace_again(self, old: CapturedSignature, retrace: Retrace) -> CapturedSignature:
        new = self.add(retrace(old), instead_of=old)
        new.suspend(old.buckets)
        return new

    def _capture_again(self, signature: CapturedSignature) -> CaptureReport:
        buckets = signature.suspended or ()
        signature.end_suspension()
        try:
            return self.capture(signature, buckets, doing="capturing again:")
        except BaseException:
            signature.suspend(buckets)
            raise

    def drop_graphs(self) -> None:
        """Resets every graph, gives the memory back and forgets the signatures. Ends a suspension."""
        for signature in self.signatures:
            signature.reset()
        for forgotten in (self.signatures, self._to_refresh, self.changes):
            forgotten.clear()
        self.is_suspended = False
        self._note_captured()

    def disabled_report(self) -> CaptureReport | None:
        """Reports that nothing is captured, if graphs are switched off; else returns None."""
        if not self.config.disable and not torch_api.is_forced_eager():
            return None
        why, code = FallbackReason.DISABLED.explanation, FallbackReason.DISABLED.value
        _log.info("capture() captures nothing. %s", why)
        reports = tuple(BucketReport(bucket, "disabled", why, code=code) for bucket in self._advertised)
        return CaptureReport(reports, False, 0, 0, one_token="graphs are switched off")

    def refuse_suspended(self, what: str) -> None:
        """Raises StateError while suspended."""
        if self.is_suspended:
            raise StillSuspended(name=what)

    def note_change(self, change: StateChange) -> FallbackReason:
        """Lists the change; gives up graphs that read moved memory, so that the old weights can be freed."""
        if change.detail in self.changes or len(self.changes) < MAX_LISTED:
            self.changes[change.detail] = None
        if change.kind == "moved_address":
            for signature in self.signatures:
                moved = signature.find_change()
                if moved is not None and moved.kind == "moved_address":
                    signature.give_up(moved)
            self._note_captured()
        return self.first.because(_CHANGE_REASONS[change.kind], change.detail)

    def reason_for(self, signature: CapturedSignature, mismatch: StepMismatch) -> FallbackReason:
        """Returns why the running step cannot be loaded; a replaced cache counts as a change of the model."""
        if mismatch is StepMismatch.TOO_LARGE:
            return FallbackReason.STEP_LIMIT
        change = signature.find_change()
        return self.note_change(change) if change is not None else FallbackReason.STEP_MISMATCH

    def report_of(self, signature: CapturedSignature) -> CaptureReport:
        """Reports the state of each advertised bucket of one signature, largest first."""
        pool = self.pool
        pool_bytes, device_bytes = (pool.allocated_bytes, pool.device_bytes) if pool is not None else (0, 0)
        streams = (assembler.streams.report() for assembler in signature.assemblers)
        one_token = signature.one_token
        if one_token is None:
            one_token = "the first such call finds out whether it may replay"
        return CaptureReport(
            tuple(self._bucket_report(signature, bucket) for bucket in self._advertised),
            not one_token, pool_bytes, self.buffers.allocated_bytes, device_bytes,
            tuple(lowered.report() for lowered in signature.lowerings), dataclasses.replace(signature.times),
            signature.plan.fusions, one_token,
            tuple(report for report in streams if report is not None),
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
        """Reports plans, captures and calls so far; `unseen` lists kinds of calls without a signature."""
        signatures = self.signatures.captured_order()
        return Report(
            tuple(PlanReport.of(s.plan, s.traced.trace.example.names) for s in signatures),
            tuple(map(self.report_of, signatures)), self.stats.snapshot(), dict(unseen), tuple(self.changes),
            self.engine.name if self.engine is not None else "none yet", self.left_out, self.state,
        )  # fmt: skip

    def _note_captured(self) -> None:
        """Notes which buckets have graphs; releases the pool once nothing could capture more into it."""
        self.stats.captured = tuple(sorted({b for s in self.signatures for b in s.served}))
        if self.pool is not None and not any(each.assemblers for each in self.signatures):
            self.pool.release()
            self.pool, self.buffers = None, StaticBuffers()

    def _context(self, signature: CapturedSignature) -> CaptureContext:
        device = _device_of(signature)
        if self.engine is None:
            self.engine = engine_for(self.config.engine, device)
        if self.pool is None:
            self.pool = self.engine.new_pool(device)
        if self.lowering is None:
            self.lowering = Lowering(self.config)
        return CaptureContext(self.config, self.engine, self.pool, self.buffers, self.lowering)


def _device_of(signature: CapturedSignature) -> torch.device:
    device: torch.device = signature.traced.trace.example.leaves[signature.plan.token_dim.leaf].device
    return device
