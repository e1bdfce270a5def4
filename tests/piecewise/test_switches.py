"""PIECEWISE_DISABLE, `disable=True` and the stance "force_eager" switch graphs off; nothing else changes."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from inspection import inspect
from state_models import BUCKETS, graph, new_model, serve, tokens

import piecewise
from piecewise.settings.config import PiecewiseConfig
from piecewise.torch_backend import piecewise_backend
from runners.stats import FallbackReason


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", piecewise.FallbackWarning)
        yield


def way_of(graphed):
    """Takes a switched-off model through all that a server does with one."""
    report = graphed.capture(tokens(7))
    assert report.ok and report.captured == () and not inspect(graphed).signatures
    assert {bucket.status for bucket in report.buckets} == {"disabled"}
    assert FallbackReason.DISABLED.explanation in str(report)
    assert serve(graphed, tokens(5)) == "disabled"
    with piecewise.capture_window():
        assert serve(graphed, tokens(5)) == "disabled"
    assert graphed.refresh() is None
    graphed.suspend()
    assert graphed.resume() is None
    graphed.release()
    assert serve(graphed, tokens(17)) == "disabled"
    assert graphed.check_addresses().ok
    assert graphed.explain(tokens(7)).coverage == 1.0, "a plan can still be looked at"
    graphed(tokens(5))  # with gradients: a switched-off model may be trained
    assert graphed.stats.reasons == {"disabled": 4} and not inspect(graphed).signatures


@pytest.mark.parametrize("source", ["environment", "argument", "file"])
def test_each_source_switches_graphs_off(source, monkeypatch, tmp_path):
    (tmp_path / "off.toml").write_text("[capture]\ndisable = true\nprogress = false\n")
    if source == "environment":
        monkeypatch.setenv("PIECEWISE_DISABLE", "1")
        graphed = graph(new_model(), captured=False, min_coverage=1.0)
    elif source == "argument":
        graphed = graph(new_model(), captured=False, disable=True, strict=True)
    else:
        graphed = piecewise.compile(new_model(), tmp_path / "off.toml")
    way_of(graphed)
    assert graphed.report().state == "disabled" and "switched off by PIECEWISE_DISABLE" in str(
        graphed.report()
    )
    with torch.no_grad():
        assert [check.path for check in graphed.verify(tokens(5)).checks] == ["disabled"]


@pytest.mark.parametrize("on", [True, False])
def test_the_variable_wins_over_every_other_source(on, monkeypatch):
    monkeypatch.setenv("PIECEWISE_DISABLE", "1" if on else "0")
    config = PiecewiseConfig(buckets=BUCKETS, progress=False)
    model = new_model()
    made = [
        piecewise.compile(model, config),
        piecewise.compile(model, config, disable=False),
        piecewise.compile(model, buckets=BUCKETS, progress=False, disable=False),
        piecewise.GraphedModule(model, config),
    ]
    assert [bool(graphed.capture(tokens(7)).captured) for graphed in made] == [not on] * 4


def test_a_variable_of_zero_does_not_undo_an_argument(monkeypatch):
    monkeypatch.setenv("PIECEWISE_DISABLE", "0")
    assert piecewise.compile(new_model(), PiecewiseConfig(disable=True)).piecewise_config.disable
    assert piecewise.compile(new_model(), disable=True).piecewise_config.disable


@pytest.mark.parametrize("value", ["yes", "", "2", "off"])
@pytest.mark.parametrize("config", [None, PiecewiseConfig()], ids=["alone", "with a config"])
def test_a_bad_value_is_an_error(value, config, monkeypatch):
    monkeypatch.setenv("PIECEWISE_DISABLE", value)
    with pytest.raises(piecewise.ConfigError, match="PIECEWISE_DISABLE: expected true or false, got"):
        piecewise.compile(new_model(), config)


def test_a_misspelt_variable_is_told_the_right_name(monkeypatch):
    monkeypatch.setenv("PIECEWISE_DISABLED", "1")
    with pytest.raises(piecewise.ConfigError, match="the nearest is PIECEWISE_DISABLE"):
        piecewise.compile(new_model())


def test_the_stance_switches_calls_off_while_it_lasts():
    graphed = graph(new_model())
    assert serve(graphed, tokens(5)) == "replay"
    with torch.compiler.set_stance("force_eager"):
        assert [serve(graphed, tokens(size)) for size in (5, 17, 1)] == ["disabled"] * 3
        found = []
        thread = threading.Thread(target=lambda: found.append(serve(graphed, tokens(5))))
        thread.start()
        thread.join()
        assert found == ["disabled"], "a stance is one of the process, as torch has it"
    with torch.compiler.set_stance("default"):
        assert serve(graphed, tokens(5)) == "replay"
    assert serve(graphed, tokens(5)) == "replay"


def test_the_stance_as_a_plain_call():
    graphed = graph(new_model())
    torch.compiler.set_stance("force_eager")
    try:
        assert serve(graphed, tokens(5)) == "disabled"
    finally:
        torch.compiler.set_stance("default")
    assert serve(graphed, tokens(5)) == "replay"


def test_a_capture_under_the_stance_captures_nothing_and_can_be_made_later():
    graphed = graph(new_model(), captured=False)
    with torch.compiler.set_stance("force_eager"):
        report = graphed.capture(tokens(7))
        assert report.ok and not report.captured and serve(graphed, tokens(5)) == "disabled"
    with torch.no_grad(), pytest.raises(piecewise.FallbackWarning, match=r"Call capture\(\) at start-up"):
        graphed(tokens(5))
    assert graphed.capture(tokens(7)).captured == BUCKETS
    assert serve(graphed, tokens(5)) == "replay"


@pytest.mark.parametrize("stance", ["eager_on_recompile", "fail_on_recompile"])
def test_a_stance_that_keeps_dynamo_from_tracing_is_named_and_the_model_is_not_run(stance):
    graphed = graph(new_model(), captured=False)
    graphed.model.register_forward_hook(lambda *_: pytest.fail("it was run"))
    with (
        torch.compiler.set_stance(stance),
        pytest.raises(piecewise.TraceError, match=f'"{stance}".* is active'),
    ):
        graphed.capture(tokens(7))


@pytest.mark.parametrize("switch", ["stance", "variable"])
def test_the_back_end_is_switched_off_too(switch, monkeypatch):
    torch._dynamo.reset()
    if switch == "variable":
        monkeypatch.setenv("PIECEWISE_DISABLE", "1")
    model = new_model()
    options = {"buckets": list(BUCKETS)}
    compiled = torch.compile(model, backend=piecewise_backend, options=options, dynamic=True)

    def check(num_tokens):
        with torch.no_grad(), piecewise.capture_window():
            model.block.cache.zero_()
            want = model(tokens(num_tokens))
            model.block.cache.zero_()
            torch.testing.assert_close(compiled(tokens(num_tokens)), want)

    check(5)
    stats = piecewise.handle(compiled).stats
    if switch == "variable":
        check(6)
        assert stats.replays == 0 and stats.captured == () and stats.reasons == {"disabled": 2}
    else:
        before = stats.replays
        with torch.compiler.set_stance("force_eager"):
            check(6)
        assert stats.replays == before
        check(6)
        assert stats.replays == before + 1 > 1
    torch._dynamo.reset()
