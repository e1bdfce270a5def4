"""Counts what happened to each call: replayed, or run eagerly for exactly one reason [I6].

`FallbackReason` is closed: a fallback that fits no code here is a defect, and a report can explain every
code. Warm-up, capture and verification are not calls and are not counted.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class FallbackWarning(UserWarning):
    """Warns of the first call that ran eagerly for a reason that the user did not ask for."""


class FallbackReason(str, Enum):
    """Says why a call ran eagerly, and what makes such a call replay; a member equals its code."""

    explanation: str
    fix: str

    def __new__(cls, code: str, explanation: str, fix: str) -> FallbackReason:
        member = str.__new__(cls, code)
        member._value_, member.explanation, member.fix = code, explanation, fix
        return member

    def __str__(self) -> str:
        return str(self.value)

    def told(self, detail: str = "") -> str:
        """Returns the explanation, with the detail of one call if there is any, and the fix."""
        return (
            f"{self.explanation[:-1]}: {detail}. {self.fix}" if detail else f"{self.explanation} {self.fix}"
        )

    NOT_CAPTURED = (
        "not_captured",
        "No graph exists for this bucket: it was never captured, and no capture window was open.",
        "Call capture() at start-up, open piecewise.capture_window(), or configure capture='lazy'.",
    )
    ZERO_TOKENS = (
        "zero_tokens",
        "The call carries no tokens, so there is nothing to replay.",
        "Nothing to do; skip empty batches to save the call.",
    )
    ABOVE_LARGEST_BUCKET = (
        "above_largest_bucket",
        "The call has more tokens than the largest bucket.",
        "Add a larger bucket, or chunk the prefill; `piecewise buckets plan` derives sizes from traffic.",
    )
    PADDING_RATIO = (
        "padding_ratio",
        "The smallest bucket that holds the call exceeds max_padding_ratio times the real tokens.",
        "Add a bucket near this size, or raise max_padding_ratio.",
    )
    UNSEEN_SIGNATURE = (
        "unseen_signature",
        "No captured call has this structure, dtypes, devices, static dims, strides, aliasing, plain values.",
        "Call as captured, or call capture() with an example of this kind, too; report() lists such kinds.",
    )
    SIGNATURE_LIMIT = (
        "signature_limit",
        "The signature is new and max_signatures are captured already, so none is added.",
        "Raise max_signatures, or make the calls alike.",
    )
    UNSUPPORTED_INPUT = (
        "unsupported_input",
        "An input is of a kind no graph reads: a tensor subclass, a sparse or quantized tensor.",
        "Pass plain strided tensors.",
    )
    TOKEN_COUNT_MISMATCH = (
        "token_count_mismatch",
        "Inputs that carry the token dim disagree about the token count, so there is no bucket for them.",
        "Pass inputs whose token dims agree; the eager call shows what the model makes of these.",
    )
    STEP_LIMIT = (
        "step_limit",
        "The step has more sequences or tokens, or a longer sequence, than captured ops have room for.",
        "Raise max_num_seqs, max_num_tokens or max_seq_len and capture again, or split the step.",
    )
    STEP_MISMATCH = (
        "step_mismatch",
        "Captured boundary ops find no step that is this call's: none, one of another token count or cache.",
        "Call inside `with batch:`, with the batch's own tokens and the cache that was captured.",
    )
    GRAD_ENABLED = (
        "grad_enabled",
        "Gradients are enabled, and graphs serve no_grad and inference_mode only.",
        "Call under torch.no_grad() or torch.inference_mode().",
    )
    EAGER_ONLY = (
        "eager_only",
        "The call was made inside a piecewise.eager_only() block.",
        "Leave the block.",
    )
    DISABLED = (
        "disabled",
        "Graphs are switched off, by PIECEWISE_DISABLE, disable=True or set_stance('force_eager').",
        "Set PIECEWISE_DISABLE=0 and start again, leave out disable=True, or leave the stance.",
    )
    NO_GRAPH = (
        "no_graph",
        "Nothing in the plan can be a graph segment.",
        "`piecewise explain` gives the reason for each node.",
    )
    SHAPE_GUARD = (
        "shape_guard",
        "The model branches on the token count or another size, and the trace excludes it or its bucket.",
        "Choose buckets on one side of the branch; for another size, call capture() with it, too.",
    )
    ONE_TOKEN_BRANCH = (
        "one_token_branch",
        "With one token the model runs another program than with several, so the trace is not valid.",
        "Nothing to do; remove the branch on one token to have such calls replayed.",
    )
    MOVED_ADDRESS = (
        "moved_address",
        "A parameter or buffer that the graphs read lives at another address than at capture.",
        "Call refresh() to capture again, or update in place (copy_, plain load_state_dict).",
    )
    MODULE_STATE_CHANGED = (
        "module_state_changed",
        "A training flag, attribute, hook or submodule that the trace read has another value now.",
        "Restore it, or call capture(), which keeps the graphs of both states, or refresh().",
    )
    GLOBAL_STATE_CHANGED = (
        "global_state_changed",
        "Autocast, default dtype, tf32, determinism or another global setting differs from capture.",
        "Restore the setting, or capture under the one you serve with.",
    )
    CAPTURE_FAILED = (
        "capture_failed",
        "Capturing this bucket failed, so it is served eagerly; the report has the error.",
        "Fix what the error names, then call capture() again.",
    )
    CAPTURE_IN_PROGRESS = (
        "capture_in_progress",
        "The call was made while this module was being captured, by its own capture or another thread.",
        "Serve calls before or after capture, not during it.",
    )
    OUT_OF_MEMORY = (
        "out_of_memory",
        "The device had no memory to capture this bucket, or for a lazy capture too little.",
        "Free memory or leave out large buckets, then call capture() again.",
    )
    LOW_COVERAGE = (
        "low_coverage",
        "Fewer of the model's ops can be in graphs than min_coverage asks for; the error was raised once.",
        "Do what the error says, or lower min_coverage; capture() raises it again.",
    )
    STATIC_TOKEN_COUNT = (
        "static_token_count",
        "Dynamo made a graph for exactly this count, as it does until it saw two counts, or a capture.",
        "Call piecewise.handle(compiled).capture with an example, or pass dynamic=True to torch.compile.",
    )
    SUSPENDED = (
        "suspended",
        "The graphs' memory was given back by suspend(), and the traces wait for resume().",
        "Call resume().",
    )
    RELEASED = (
        "released",
        "The graphs and their memory were given back by release().",
        "Call capture() again.",
    )
    NESTED_TRACING = (
        "nested_tracing",
        "The call was made while torch.compile, export or another tracer was tracing it.",
        "Compile the module alone, or keep the outer tracer away from it.",
    )
    REENTRANT_CALL = (
        "reentrant_call",
        "The module was called from inside its own call, while its static buffers were in use.",
        "Make the inner call on another copy of the module.",
    )


@dataclass(slots=True)
class CallStats:
    """Holds counters of one graphed module; `reasons` sums to `eager_calls`, `calls_by_bucket` to `replays`.

    Attributes:
        captured: the buckets that have graphs, in the order of capture.
        eager_by_bucket: per bucket, one count by reason of each eager call that it would have served. Calls
            whose token count was not looked at (gradients on, an unseen signature) are in `reasons` only.
    """

    replays: int = 0
    eager_calls: int = 0
    reasons: Counter[FallbackReason] = field(default_factory=Counter)
    captured: tuple[int, ...] = ()
    calls_by_bucket: Counter[int] = field(default_factory=Counter)
    eager_by_bucket: dict[int, Counter[FallbackReason]] = field(default_factory=dict)

    def count_eager(self, reason: FallbackReason) -> None:
        """Counts a call that ran eagerly, and why."""
        self.eager_calls += 1
        self.reasons[reason] += 1

    def place_eager(self, padded_num_tokens: int, reason: FallbackReason) -> None:
        """Notes which bucket would have served an eager call; `count_eager` counts the call."""
        self.eager_by_bucket.setdefault(padded_num_tokens, Counter())[reason] += 1

    def reset(self) -> None:
        """Sets the call counters to zero; `captured` says what exists and stays."""
        self.replays = self.eager_calls = 0
        self.reasons.clear()
        self.calls_by_bucket.clear()
        self.eager_by_bucket.clear()

    def snapshot(self) -> CallStats:
        """Returns a copy that later calls do not change."""
        return copy.deepcopy(self)

    def asdict(self) -> dict[str, Any]:
        """Returns plain values for JSON; buckets are strings there, as JSON's keys are."""
        return {
            "replays": self.replays,
            "eager_calls": self.eager_calls,
            "reasons": _plain(self.reasons),
            "captured": list(self.captured),
            "calls_by_bucket": _plain(self.calls_by_bucket),
            "eager_by_bucket": {str(k): _plain(found) for k, found in sorted(self.eager_by_bucket.items())},
        }


def _plain(counts: Counter[Any]) -> dict[str, int]:
    return {str(key): count for key, count in sorted(counts.items())}
