"""The first call that runs eagerly for a reason warns, at the user's line, with what happened and the fix."""

from __future__ import annotations

import warnings

import pytest
import torch
from state_models import graph, new_model, tokens
from torch import nn

import piecewise
from runners.stats import FallbackReason, FallbackWarning


def warned(call):
    """The texts of the warnings of a call, each of which points at this file."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    found = [each for each in found if issubclass(each.category, FallbackWarning)]
    assert all(each.filename == __file__ for each in found), [each.filename for each in found]
    return [str(each.message) for each in found]


@torch.no_grad()
def serve(graphed, num_tokens=5, dtype=torch.int64):
    return graphed(tokens(num_tokens).to(dtype))


def rebound(graphed):
    weight = graphed.model.projection.weight
    graphed.model.projection.weight = nn.Parameter(weight.detach().clone())
    serve(graphed)


def with_grad(graphed):
    graphed(tokens(5))


def in_training(graphed):
    graphed.model.projection.train()
    serve(graphed)


def plain():
    return graph(new_model())


# Reason → a model, a call of it, and what the warning says of this call.
FIRST = {
    FallbackReason.NOT_CAPTURED: (lambda: graph(new_model(), captured=False), serve, "capture() at start-up"),
    FallbackReason.ABOVE_LARGEST_BUCKET: (plain, lambda it: serve(it, 17), "17 tokens, largest bucket 16"),
    FallbackReason.PADDING_RATIO: (
        lambda: graph(new_model(), max_padding_ratio=1.5),
        lambda it: serve(it, 9),
        "9 of 16 rows",
    ),
    FallbackReason.GRAD_ENABLED: (plain, with_grad, "torch.no_grad()"),
    FallbackReason.MOVED_ADDRESS: (plain, rebound, "model.projection.weight was bound to another tensor"),
    FallbackReason.MODULE_STATE_CHANGED: (plain, in_training, "model.projection.training was False, is True"),
    FallbackReason.UNSEEN_SIGNATURE: (
        plain,
        lambda it: serve(it, dtype=torch.int32),
        "ids is int32[n], was int64[n] at capture (pass ids.to(torch.int64))",
    ),
    FallbackReason.ONE_TOKEN_BRANCH: (
        lambda: graph(new_model(before=lambda model, x: x if x.shape[0] > 1 else x * 2)),
        lambda it: serve(it, 1),
        "the model runs another program with one token",
    ),
}


@pytest.mark.parametrize("reason", FIRST, ids=str)
def test_the_first_call_of_a_reason_warns_with_the_reports_sentence(reason):
    make, call, said = FIRST[reason]
    graphed = make()
    (text,) = warned(lambda: [call(graphed) for _ in range(3)])
    assert f"({reason})" in text and said in text
    assert reason.explanation[:-1] in text and text.endswith(reason.fix)
    assert graphed.stats.reasons == {reason: 3}
    graphed.stats.reset()
    assert not warned(lambda: call(graphed)), "once per model, whatever the counters say"
    (again,) = warned(lambda: call(make()))
    assert again == text, "another model's user has not been told"


def in_an_eager_block(graphed):
    with piecewise.eager_only():
        serve(graphed)


def suspended(graphed):
    graphed.suspend()
    serve(graphed)


def released(graphed):
    graphed.release()
    serve(graphed)


@pytest.mark.parametrize(
    "call", [in_an_eager_block, suspended, released, lambda graphed: serve(graphed, 0), serve]
)
def test_what_the_user_asked_for_does_not_warn(call):
    graphed = plain()
    assert not warned(lambda: call(graphed))
    assert graphed.stats.replays + graphed.stats.eager_calls == 1


def test_what_is_no_call_does_not_warn():
    graphed = plain()
    with torch.no_grad():
        assert not warned(lambda: (graphed.verify(tokens(5).int()), graphed.explain(tokens(5))))
        assert warned(lambda: serve(graphed, dtype=torch.int32)), "the first call is still the first one"


def test_a_lazy_capture_that_waits_does_not_warn():
    graphed = graph(new_model(), captured=False, capture="lazy")
    assert not warned(lambda: [serve(graphed) for _ in range(4)])
    assert graphed.stats.reasons == {"not_captured": 2} and graphed.stats.replays == 2


def test_each_kind_of_call_warns_and_no_flood_of_them_does():
    graphed = graph(new_model(after=lambda model, x, **options: x), captured=False)
    graphed.capture(tokens(7))

    @torch.no_grad()
    def call(number):
        graphed(tokens(3 + number % 5), note=f"kind {number}")

    texts = warned(lambda: [call(number) for number in range(3) for _ in range(2)])
    assert [f"note is 'kind {number}', was left out at capture" in texts[number] for number in range(3)]
    assert len(texts) == 3
    assert 10 < len(warned(lambda: [call(number) for number in range(100)])) < 40


def test_a_warning_that_is_an_error_leaves_the_model_usable():
    graphed = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("error", piecewise.FallbackWarning)
        with pytest.raises(FallbackWarning, match="above_largest_bucket"):
            serve(graphed, 17)
        serve(graphed, 17)
    serve(graphed)
    assert graphed.stats.replays == 1 and graphed.stats.reasons == {"above_largest_bucket": 2}


def test_a_model_in_place_warns_at_the_users_line():
    model = new_model()
    piecewise.enable(model, buckets=[8], progress=False)
    try:
        (text,) = warned(lambda: serve(model))
    finally:
        piecewise.disable(model)
    assert "(not_captured)" in text


def test_a_branch_on_another_size_names_it_and_its_capture_helps():
    class LastRows(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = new_model()

        def forward(self, ids, starts):
            return self.model(ids)[starts[1:] - 1]  # one row is another program than several

    graphed = graph(LastRows().eval(), tokens(7), torch.tensor([0, 3, 7]))

    @torch.no_grad()
    def one_sequence():
        graphed(tokens(5), torch.tensor([0, 5]))

    (text,) = warned(one_sequence)
    assert "5 tokens in bucket 8, size 2 of starts" in text and "call capture() with it" in text
    graphed.capture(tokens(5), torch.tensor([0, 5]))
    one_sequence()
    assert graphed.stats.replays == 1 and graphed.stats.reasons == {"shape_guard": 1}
