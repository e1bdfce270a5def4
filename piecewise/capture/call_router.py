"""Serves each call: replays a plan where one is proven to give the model's results, else runs the model [I6].

    bind · match signature · bucket ──▶ StepPlan.replay          (a replay)
                │
                └── any doubt ──▶ the model itself, eagerly       (a fallback, counted with its reason)

`GraphedModule` and the `torch.compile` handle both hold one. Calls are served one at a time, as they share
static memory. Changes of the graphs wait for a running call, and calls of other threads for them.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from piecewise import torch_api
from piecewise.capture.captured_call import CapturedSignature, Matched, SignatureList
from piecewise.capture.store import GraphStore
from piecewise.capture.traffic_recorder import EXACT_UP_TO
from piecewise.errors.capture import ChangeInsideCall
from runners.bound_steps import StateChanged
from runners.mode import in_capture_window, is_eager_only
from runners.state.state_check import StateChange
from runners.stats import FallbackReason


class Caller(Protocol):
    """Knows the kinds of calls of one callable."""

    signatures: SignatureList

    def new_kind(
        self, args: Any, kwargs: Any, *, may_capture: bool
    ) -> tuple[CapturedSignature, Matched] | FallbackReason:
        """Makes a signature for a call that none of `signatures` serves, or returns the reason why not."""


class CallRouter:
    """Finds the plan that serves a call, and keeps calls and changes of the graphs apart.

    Args:
        captures_calls: whether any call may capture its bucket, until a release.
    Attributes:
        owner: the thread whose call, or change of the graphs, is in progress; else None.
        is_capturing: whether a change of the graphs is in progress.
    """

    def __init__(self, store: GraphStore, *, captures_calls: bool) -> None:
        self._store, self._stats, self._traffic = store, store.stats, store.traffic
        self._captures_calls = captures_calls
        self._lock = threading.Lock()
        self.owner: int | None = None
        self.is_capturing = False

    def serve(self, caller: Caller, eager: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the result of `eager(*args, **kwargs)`, replayed where a plan serves the call."""
        if self.owner == threading.get_ident():
            codes = FallbackReason.REENTRANT_CALL, FallbackReason.CAPTURE_IN_PROGRESS
            self._count_eager(codes[self.is_capturing])
            return eager(*args, **kwargs)
        with self._lock:
            self.owner = threading.get_ident()
            try:
                found = self._find_plan(caller, args, kwargs)
                may_vary = True
                while not isinstance(found, FallbackReason):
                    signature, steps, num_tokens, leaves = found
                    try:
                        result = signature.rebuild(steps.replay(leaves, num_tokens))
                    except StateChanged as changed:
                        # Nothing lasting was written. A second plan was compared with the model just now.
                        found = self._after_change(changed.change, caller, args, kwargs, may_vary=may_vary)
                        may_vary = False
                        if isinstance(found, FallbackReason):
                            self._stats.place_eager(steps.padded_num_tokens, found)
                    else:
                        self._stats.replays += 1
                        self._stats.calls_by_bucket[steps.padded_num_tokens] += 1
                        return result
                self._count_eager(found)
            finally:
                self.owner = None
        return eager(*args, **kwargs)

    def _count_eager(self, reason: FallbackReason) -> None:
        reason = FallbackReason.DISABLED if self._store.config.disable else reason
        self._stats.count_eager(reason)
        # A call that waits for its bucket's capture is no surprise.
        if reason is not FallbackReason.NOT_CAPTURED or not self._captures_calls:
            self._store.first.note(reason)

    def _find_plan(self, caller: Caller, args: Any, kwargs: Any) -> Any:
        """Finds (signature, step plan, token count, leaves) for a call, or why no plan serves it."""
        store, signatures = self._store, caller.signatures
        if is_eager_only():
            return FallbackReason.EAGER_ONLY
        if torch_api.forbids_replay():
            is_asked_for = torch_api.is_forced_eager()
            return FallbackReason.DISABLED if is_asked_for else FallbackReason.NESTED_TRACING
        if torch.is_grad_enabled():
            return FallbackReason.GRAD_ENABLED
        if store.is_suspended:
            return FallbackReason.SUSPENDED
        in_window = in_capture_window()
        may_capture = in_window or (self._captures_calls and not store.is_released)
        if not signatures and (store.config.disable or not may_capture):
            return store.reason_for_none
        signature, matched = signatures.matching(args, kwargs, current=in_window)
        if signature is None or (may_capture and not signature.may_serve(*matched)):
            found = caller.new_kind(args, kwargs, may_capture=may_capture)
            if isinstance(found, FallbackReason):
                return found
            signature, matched = found
        elif len(signatures) > 1 and not self._has_bucket(signature, matched[0]):
            if not signature.is_current():  # without a plan, no replay would find the change
                signature, matched = self._current(signatures, args, kwargs) or (signature, matched)
        num_tokens = matched[0]
        if 0 < num_tokens <= EXACT_UP_TO:
            self._traffic.by_count[num_tokens] += 1
        else:
            self._traffic.record(num_tokens)
        plan = self._plan_for(signature, *matched, may_capture=may_capture)
        if isinstance(plan, FallbackReason) and (bucket := _bucket_for(self._store, num_tokens)) is not None:
            self._stats.place_eager(bucket, plan)
        return plan

    def _after_change(
        self, change: StateChange, caller: Caller, args: Any, kwargs: Any, *, may_vary: bool
    ) -> Any:
        """Finds the plan of a variant captured from the model as it is, or why the call runs eagerly."""
        found: Any = None
        if may_vary and len(caller.signatures) > 1:
            variant = self._current(caller.signatures, args, kwargs)
            if variant is not None:
                signature, matched = variant
                found = self._plan_for(signature, *matched, may_capture=in_capture_window())
        if found is None or change.kind == "moved_address":  # graphs must not read moved memory
            reason = self._store.note_change(change)
            found = found if found is not None else reason
        return found

    def _current(
        self, signatures: SignatureList, args: Any, kwargs: Any
    ) -> tuple[CapturedSignature, Matched] | None:
        """Finds the signature of a call captured from the model as it is, and tries it first from now on."""
        signature, matched = signatures.matching(args, kwargs, current=True)
        if signature is None:
            return None
        signatures.prefer(signature)
        return signature, matched

    def _has_bucket(self, signature: CapturedSignature, num_tokens: int) -> bool:
        """Whether a signature has graphs for a count, or no bucket is meant for that count."""
        bucket = _bucket_for(self._store, num_tokens)
        return bucket is None or bucket in signature.served

    def _plan_for(
        self, signature: CapturedSignature, num_tokens: int, leaves: list[Any], *, may_capture: bool
    ) -> Any:
        """Chooses a plan; first captures what a suspension left for a call to capture."""
        if signature.suspended is not None and signature.global_state.check():
            self._store.resume_at_call(signature)
        return choose_plan(self._store, signature, num_tokens, leaves, may_capture=may_capture)

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Holds the lock while the graphs change; raises StateError inside a call of the same thread."""
        if self.owner == threading.get_ident():
            raise ChangeInsideCall(name=what)
        with self._lock:
            self.owner, self.is_capturing = threading.get_ident(), True
            try:
                yield
            finally:
                self.owner, self.is_capturing = None, False


def choose_plan(
    store: GraphStore, signature: CapturedSignature, num_tokens: int, leaves: list[Any], *, may_capture: bool
) -> Any:
    """Finds (signature, step plan, token count, leaves) for a call, or why no plan serves it."""
    bucket, because = _bucket_for(store, num_tokens), store.first.because
    if bucket is None:
        if num_tokens > 0:
            detail = f"{num_tokens} tokens, largest bucket {store.config.buckets[-1]}"
            return because(FallbackReason.ABOVE_LARGEST_BUCKET, detail)
        return FallbackReason.ZERO_TOKENS if num_tokens == 0 else FallbackReason.TOKEN_COUNT_MISMATCH
    max_ratio = store.config.max_padding_ratio
    if max_ratio is not None and bucket > max_ratio * num_tokens:
        return because(FallbackReason.PADDING_RATIO, f"{num_tokens} of {bucket} rows")
    if not signature.global_state.check():
        return FallbackReason.GLOBAL_STATE_CHANGED
    served = signature.served.get(bucket)
    if served is None:
        refused = store.refusal(signature, bucket, may_capture=may_capture)
        if refused is not None:
            return refused
        served = signature.served[bucket]
    if num_tokens == 1:
        if signature.one_token is None and (change := signature.find_change()) is not None:
            return store.note_change(change)  # a new trace would be of a changed model
        if signature.one_token_refusal():
            return because(FallbackReason.ONE_TOKEN_BRANCH, signature.one_token_refusal())
        if (change := signature.find_one_token_change()) is not None:
            return store.note_change(change)
    if not served.is_valid(num_tokens, leaves):
        names, others = (
            signature.traced.trace.example.names,
            map(served.plan.values.__getitem__, served.plan.symbols),
        )
        sizes = [f"size {each.number_in(leaves)} of {names[each.leaf]}" for each in others]
        return because(
            FallbackReason.SHAPE_GUARD, ", ".join([f"{num_tokens} tokens in bucket {bucket}", *sizes])
        )
    for metadata in served.steps.step_metadata:
        mismatch = metadata.mismatch(num_tokens)
        if mismatch is not None:
            return store.reason_for(signature, mismatch)
    return signature, served.steps, num_tokens, leaves


def preview(store: GraphStore, signatures: SignatureList, args: Any, kwargs: Any) -> tuple[int, Any]:
    """Returns a call's token count (0 if unknown) and the choice for it; counts and captures nothing."""
    if store.is_suspended:
        return 0, FallbackReason.SUSPENDED
    if not signatures:
        return 0, store.reason_for_none
    signature, matched = signatures.matching(args, kwargs, current=True)
    if signature is None:
        signature, matched = signatures.matching(args, kwargs)
    if signature is None:
        return 0, FallbackReason.UNSEEN_SIGNATURE
    return matched[0], choose_plan(store, signature, *matched, may_capture=False)


def _bucket_for(store: GraphStore, num_tokens: int) -> int | None:
    buckets = store.config.buckets
    at = bisect_left(buckets, num_tokens)
    return buckets[at] if num_tokens > 0 and at < len(buckets) else None
