"""Each call is counted once, each fallback for one reason of a closed set that explains itself; modes end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from runners.mode import capture_of, capture_window, capturing, eager_only, in_capture_window, is_eager_only
from runners.stats import CallStats, FallbackReason

CODES = {
    "not_captured",
    "zero_tokens",
    "above_largest_bucket",
    "padding_ratio",
    "unseen_signature",
    "signature_limit",
    "unsupported_input",
    "token_count_mismatch",
    "step_limit",
    "step_mismatch",
    "grad_enabled",
    "eager_only",
    "disabled",
    "no_graph",
    "shape_guard",
    "one_token_branch",
    "moved_address",
    "module_state_changed",
    "global_state_changed",
    "capture_failed",
    "capture_in_progress",
    "out_of_memory",
    "low_coverage",
    "static_token_count",
    "suspended",
    "released",
    "nested_tracing",
    "reentrant_call",
}


def count_replay(stats, bucket):
    """As a router counts a call that it has served."""
    stats.replays += 1
    stats.calls_by_bucket[bucket] += 1


def test_I6_the_codes_are_a_closed_set() -> None:
    assert {reason.value for reason in FallbackReason} == CODES
    with pytest.raises(ValueError):
        FallbackReason("because")
    with pytest.raises(TypeError):

        class More(FallbackReason):
            pass


@pytest.mark.parametrize("reason", FallbackReason)
def test_I6_each_reason_explains_itself_and_has_a_fix(reason: FallbackReason) -> None:
    assert str(reason) == reason == reason.value == reason.name.lower()
    assert FallbackReason(reason.value) is reason
    for sentence in (reason.explanation, reason.fix):
        assert len(sentence) > 10 and sentence.endswith(".") and (sentence[0].isupper() or sentence[0] == "`")
    assert len({other.explanation for other in FallbackReason}) == len(FallbackReason)


def test_I6_one_reason_per_fallback_call() -> None:
    stats = CallStats()
    count_replay(stats, 64)
    count_replay(stats, 64)
    count_replay(stats, 128)
    stats.count_eager(FallbackReason.ZERO_TOKENS)
    stats.count_eager(FallbackReason.NOT_CAPTURED)
    stats.count_eager(FallbackReason.NOT_CAPTURED)
    assert stats.replays == 3 == sum(stats.calls_by_bucket.values())
    assert stats.eager_calls == 3 == sum(stats.reasons.values())
    assert stats.calls_by_bucket == {64: 2, 128: 1}
    assert stats.reasons == {FallbackReason.NOT_CAPTURED: 2, FallbackReason.ZERO_TOKENS: 1}
    assert stats.reasons["not_captured"] == 2 and stats.reasons["moved_address"] == 0


def test_a_snapshot_does_not_move() -> None:
    stats = CallStats(captured=(128, 64))
    count_replay(stats, 64)
    stats.count_eager(FallbackReason.EAGER_ONLY)
    stats.place_eager(64, FallbackReason.EAGER_ONLY)
    before = stats.snapshot()
    assert before == stats
    count_replay(stats, 64)
    stats.place_eager(64, FallbackReason.EAGER_ONLY)
    stats.count_eager(FallbackReason.EAGER_ONLY)
    assert (before.replays, before.eager_calls) == (1, 1)
    assert before.calls_by_bucket == {64: 1} and before.reasons == {"eager_only": 1}
    assert before.captured == (128, 64) and before.eager_by_bucket == {64: {"eager_only": 1}}


def test_reset_keeps_what_is_captured() -> None:
    stats = CallStats(captured=(64,))
    count_replay(stats, 64)
    stats.count_eager(FallbackReason.EAGER_ONLY)
    stats.place_eager(64, FallbackReason.EAGER_ONLY)
    stats.reset()
    assert stats == CallStats(captured=(64,))


def test_asdict_is_plain_json() -> None:
    stats = CallStats(captured=(128, 64))
    count_replay(stats, 128)
    count_replay(stats, 64)
    stats.count_eager(FallbackReason.ZERO_TOKENS)
    stats.place_eager(64, FallbackReason.ZERO_TOKENS)
    plain = stats.asdict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain == {
        "replays": 2,
        "eager_calls": 1,
        "reasons": {"zero_tokens": 1},
        "captured": [128, 64],
        "calls_by_bucket": {"64": 1, "128": 1},
        "eager_by_bucket": {"64": {"zero_tokens": 1}},
    }
    assert all(type(code) is str for code in plain["reasons"])


MODES: list[tuple[Callable[[], Any], Callable[[], Any], Any, Any]] = [
    (eager_only, is_eager_only, False, True),
    (capture_window, in_capture_window, False, True),
    (lambda: capture_of("segment 1"), capturing, None, "segment 1"),
]


@pytest.mark.parametrize(("opened", "read", "outside", "inside"), MODES)
def test_a_mode_ends_with_its_block(
    opened: Callable[[], Any], read: Callable[[], Any], outside: Any, inside: Any
) -> None:
    assert read() == outside
    with opened():
        assert read() == inside
        with opened():
            assert read() == inside
        assert read() == inside
    assert read() == outside
    with pytest.raises(KeyError), opened():
        raise KeyError
    assert read() == outside


@pytest.mark.parametrize(("opened", "read", "outside", "inside"), MODES)
def test_a_mode_stays_in_its_thread(
    opened: Callable[[], Any], read: Callable[[], Any], outside: Any, inside: Any
) -> None:
    seen: list[Any] = []
    with opened():
        thread = threading.Thread(target=lambda: seen.append(read()))
        thread.start()
        thread.join()
    assert seen == [outside]


def test_the_modes_are_independent() -> None:
    with eager_only():
        assert not in_capture_window() and capturing() is None
    with capture_window():
        assert not is_eager_only() and capturing() is None
    with capture_of("segment 1"):
        assert not is_eager_only() and not in_capture_window()
