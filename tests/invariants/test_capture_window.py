"""[I5]: capture happens in the capture window only; a shape never captured runs eagerly."""

from __future__ import annotations

import pytest
import torch
from inspection import inspect
from state_models import BUCKETS, graph, new_model, serve, tokens

import piecewise
from piecewise.errors.capture import ChangeInsideCall


def test_I5_nothing_is_captured_by_calls():
    graphed = graph(new_model(), captured=False)
    assert [serve(graphed, tokens(n)) for n in (3, 3, 3, 3, 12)] == ["not_captured"] * 5
    assert graphed.stats.captured == () and graphed.report().plans == ()


def test_I5_capture_captures_each_bucket_and_nothing_after_it_does():
    graphed = graph(new_model(), captured=False)
    report = graphed.capture(tokens(7))
    assert report.captured == BUCKETS == graphed.stats.captured
    assert [bucket.bucket for bucket in report.buckets] == sorted(BUCKETS, reverse=True), "largest first"
    assert graphed.stats.replays == graphed.stats.eager_calls == 0, "capture is no call"
    assert serve(graphed, tokens(5).int()) == "unseen_signature"
    assert len(graphed.report().plans) == 1


def test_I5_capture_again_captures_nothing_new():
    graphed = graph(new_model())
    runners = inspect(graphed).runners
    before = [runner.num_captures for runner in runners]
    assert graphed.capture(tokens(9)).captured == BUCKETS
    assert [runner.num_captures for runner in runners] == before


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9, 16])
def test_I5_each_size_is_served_by_its_bucket(size):
    graphed = graph(new_model())
    assert serve(graphed, tokens(size)) == "replay"
    (bucket,) = graphed.stats.calls_by_bucket
    assert bucket == min(b for b in BUCKETS if b >= size)


def test_I5_a_window_captures_what_is_called_in_it():
    graphed = graph(new_model(), captured=False)
    with piecewise.capture_window():
        assert serve(graphed, tokens(7)) == "replay"
    assert graphed.stats.captured == BUCKETS, "all buckets of that signature"
    assert serve(graphed, tokens(12)) == "replay"
    assert serve(graphed, tokens(7).int()) == "unseen_signature"
    with piecewise.capture_window():
        assert serve(graphed, tokens(7).int()) == "replay"
    assert len(graphed.report().plans) == 2


def test_I5_a_window_that_raises_is_closed():
    graphed = graph(new_model(), captured=False)
    with pytest.raises(ValueError, match="stop"), piecewise.capture_window():
        raise ValueError("stop")
    assert serve(graphed, tokens(7)) == "not_captured"


def test_I5_a_window_captures_under_no_grad_only():
    graphed = graph(new_model(), captured=False)
    with piecewise.capture_window(), torch.enable_grad():
        graphed(tokens(7))
    assert graphed.stats.reasons == {"grad_enabled": 1} and graphed.stats.captured == ()


def test_I5_lazy_captures_a_bucket_at_its_third_call():
    graphed = graph(new_model(), captured=False, capture="lazy")
    outcomes = [serve(graphed, tokens(n)) for n in (3, 7, 3, 7, 2, 8, 4)]
    assert outcomes == ["not_captured"] * 4 + ["replay", "replay", "replay"]
    assert graphed.stats.captured == (4, 8)


def test_I5_lazy_counts_signatures_apart():
    graphed = graph(new_model(), captured=False, capture="lazy")
    kinds = (tokens(3), tokens(3).int())
    outcomes = [serve(graphed, ids) for _ in range(3) for ids in kinds]
    assert outcomes == ["not_captured"] * 4 + ["replay"] * 2


def test_I5_refresh_captures_what_was_captured_and_no_more():
    graphed = graph(new_model(), captured=False, capture="lazy")
    for _ in range(3):
        serve(graphed, tokens(3))
    assert graphed.stats.captured == (4,)
    assert graphed.refresh().captured == (4,)
    assert graphed.stats.captured == (4,)


def test_I5_refresh_of_nothing_does_nothing():
    graphed = graph(new_model(), captured=False)
    assert graphed.refresh() is None
    assert serve(graphed, tokens(3)) == "not_captured"


def test_I5_refresh_captures_each_signature_again():
    graphed = graph(new_model())
    graphed.capture(tokens(7).int())
    graphed.refresh()
    assert [serve(graphed, ids) for ids in (tokens(5), tokens(5).int())] == ["replay", "replay"]
    assert len(graphed.report().plans) == len(graphed.report().captures) == 2


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_I5_after_release_only_capture_brings_graphs_back(capture):
    graphed = graph(new_model(), capture=capture)
    graphed.release()
    assert [serve(graphed, tokens(3)) for _ in range(4)] == ["released"] * 4
    assert graphed.refresh() is None, "release gave up what was captured"
    graphed.capture(tokens(7))
    assert serve(graphed, tokens(3)) == "replay"


def test_I5_release_and_a_window():
    graphed = graph(new_model())
    graphed.release()
    with piecewise.capture_window():
        assert serve(graphed, tokens(3)) == "replay"
    assert serve(graphed, tokens(3)) == "replay"


@pytest.mark.parametrize("method", ["capture", "refresh", "release", "explain"])
def test_I5_no_capture_inside_a_call(method):
    from state_models import before_each_attend

    graphed = graph(new_model())
    errors = []

    def inside():
        arguments = (tokens(7),) if method in ("capture", "explain") else ()
        with pytest.raises(ChangeInsideCall) as caught:
            getattr(graphed, method)(*arguments)
        errors.append(str(caught.value))

    with before_each_attend(inside), torch.no_grad():
        graphed(tokens(5))
    assert len(errors) == 1 and f"{method}()" in errors[0] and "Fix:" in errors[0]
    assert serve(graphed, tokens(5)) == "replay"
