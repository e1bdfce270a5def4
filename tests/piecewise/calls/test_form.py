"""The form of a call, positional or by keyword, where something of the model sees it: hooks of the root, a
wrapper of forward, a `__call__` of its own [I10]."""

from __future__ import annotations

import functools

import pytest
import state_models
import torch
from inspection import inspect
from state_models import VOCAB, graph, new_model, serve, tokens
from torch import nn
from torch.nn.modules import module as module_hooks

import piecewise
from piecewise.errors.trace import BackwardHook, NotOneGraph

FORMS = {"positional": lambda ids: ((ids,), {}), "keyword": lambda ids: ((), {"ids": ids})}


def of_root(hook):
    """A global hook that does something at the root alone."""

    def for_all(module, *given):
        return hook(module, *given) if isinstance(module, state_models.Model) else None

    return for_all


def double_positional(module, args):
    return tuple((ids * 2) % VOCAB for ids in args)


def rewrite_both(module, args, kwargs):
    changed = {name: (value + 3) % VOCAB for name, value in kwargs.items()}
    return double_positional(module, args), changed


def scale_positional(module, args, result):
    return result * (2 if args else 3)


def scale_keyword(module, args, kwargs, result):
    return result * (2 if kwargs else 3)


HOOKS = {
    "pre": lambda model: model.register_forward_pre_hook(double_positional),
    "pre, kwargs": lambda model: model.register_forward_pre_hook(rewrite_both, with_kwargs=True),
    "forward": lambda model: model.register_forward_hook(scale_positional),
    "forward, kwargs": lambda model: model.register_forward_hook(scale_keyword, with_kwargs=True),
    "forward, always": lambda model: model.register_forward_hook(scale_positional, always_call=True),
    "backward, not full": lambda model: model.register_backward_hook(lambda module, given, out: None),
    "global pre": lambda _: module_hooks.register_module_forward_pre_hook(of_root(double_positional)),
    "global forward": lambda _: module_hooks.register_module_forward_hook(of_root(scale_positional)),
    "global forward, kwargs": lambda _: module_hooks.register_module_forward_hook(
        of_root(scale_keyword), with_kwargs=True
    ),
    "global forward, always": lambda _: module_hooks.register_module_forward_hook(
        of_root(scale_positional), always_call=True
    ),
}  # fmt: skip


@pytest.fixture
def hooked():
    """`hooked(kind)`: a model with a hook of that kind, and its handle; global ones go with the test."""
    handles = []

    def make(kind, model=None):
        model = model if model is not None else new_model()
        handles.append(HOOKS[kind](model))
        return model, handles[-1]

    yield make
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", HOOKS)
def test_I10_with_hooks_of_the_root_each_form_of_a_call_is_a_kind_of_its_own(kind, hooked):
    model, _ = hooked(kind)
    graphed = graph(model, captured=False, buckets=(8,))
    for name, make in FORMS.items():
        args, kwargs = make(tokens(5))
        assert serve(graphed, *args, **kwargs) in ("not_captured", "unseen_signature")
        args, kwargs = make(tokens(7))
        assert graphed.capture(*args, **kwargs).ok
        args, kwargs = make(tokens(5))
        assert serve(graphed, *args, **kwargs) == "replay", name
        with torch.no_grad():
            assert graphed.verify(*args, **kwargs).ok
    assert len(graphed.report().plans) == 2
    assert [serve(graphed, tokens(3)), serve(graphed, ids=tokens(3))] == ["replay", "replay"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [kind for kind in HOOKS if "backward" not in kind])
def test_I10_a_hook_added_or_removed_after_capture_is_noticed(kind, form, hooked):
    def call(num_tokens):
        return FORMS[form](tokens(num_tokens))

    (args, kwargs), (example, named) = call(5), call(7)
    model = new_model()
    graphed = graph(model, captured=False, buckets=(8,))
    graphed.capture(*example, **named)
    assert serve(graphed, *args, **kwargs) == "replay"
    _, handle = hooked(kind, model)
    assert serve(graphed, *args, **kwargs) == "module_state_changed"
    graphed.refresh()
    assert serve(graphed, *args, **kwargs) == "replay"
    handle.remove()
    assert serve(graphed, *args, **kwargs) == "module_state_changed"
    assert graphed.capture(*example, **named).ok
    assert serve(graphed, *args, **kwargs) == "replay"
    assert serve(graphed, *FORMS["positional"](tokens(4))[0]) == "replay", "without hooks one form is as good"


@pytest.mark.parametrize("table", ["_forward_pre_hooks", "_forward_hooks"])
def test_I10_a_hook_replaced_in_its_place_is_noticed(table):
    model = new_model()
    pre = model.register_forward_pre_hook(double_positional)
    handles = pre, model.register_forward_hook(scale_positional)
    graphed = graph(model, buckets=(8,))
    hooks = getattr(model, table)
    (key,) = hooks
    seen, hooks[key] = hooks[key], lambda module, args, *result: None
    assert serve(graphed, tokens(5)) == "module_state_changed"
    hooks[key] = seen
    assert serve(graphed, tokens(5)) == "replay"
    # The same hook, given other arguments from now on.
    model.__dict__[f"{table}_with_kwargs"][key] = True
    hooks[key] = rewrite_both if "pre" in table else scale_keyword
    assert serve(graphed, tokens(5)) == "module_state_changed"
    for handle in handles:
        handle.remove()


def test_I10_hooks_may_take_and_add_arguments():
    class Two(state_models.Model):
        def forward(self, ids, scale):
            return super().forward(ids) * scale

    torch.manual_seed(1)
    model = Two().eval()
    model.register_forward_pre_hook(lambda module, args: (args[0], torch.full((1,), 2.0)) if args else None)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "unknown"}),
        with_kwargs=True,
    )
    graphed = graph(model, captured=False, buckets=(8,))
    assert graphed.capture(tokens(7), unknown=3.0).ok
    assert serve(graphed, tokens(5), unknown=3.0) == "replay"
    assert serve(graphed, tokens(5)) == "unseen_signature", "what was left out is part of the form"


def count_calls(calls):
    def hook(module, args):
        calls.append(len(args))

    return hook


def test_I10_a_hook_with_a_side_effect_is_refused_and_the_call_stays_eager():
    model, calls = new_model(), []
    model.register_forward_pre_hook(count_calls(calls))
    graphed = graph(model, captured=False)
    with pytest.raises(piecewise.TraceError, match=r"(?s)changes.*Rule:.*Fix:"):
        graphed.capture(tokens(7))
    assert calls == []
    assert serve(graphed, tokens(5)) == "not_captured"
    assert calls == [1, 1]


FULL = {
    "full": lambda model: model.block.register_full_backward_hook(lambda module, given, out: None),
    "full, root": lambda model: model.register_full_backward_hook(lambda module, given, out: None),
    "pre": lambda model: model.block.register_full_backward_pre_hook(lambda module, out: None),
    "global": lambda _: module_hooks.register_module_full_backward_hook(lambda module, given, out: None),
    "global pre": lambda _: module_hooks.register_module_full_backward_pre_hook(lambda module, out: None),
}


@pytest.mark.parametrize("kind", FULL)
def test_I10_full_backward_hooks_are_refused_by_name_and_may_come_after_capture(kind):
    model = new_model()
    graphed = graph(model, captured=False)
    handle = FULL[kind](model)
    try:
        owner = "every module" if "global" in kind else "the model" if "root" in kind else "'block'"
        with pytest.raises(BackwardHook, match=rf"(?s)backward hook of {owner}.*Rule:.*Fix:.*after"):
            graphed.capture(tokens(7))
        handle.remove()
        assert graphed.capture(tokens(7)).ok
        handle = FULL[kind](model)
        assert serve(graphed, tokens(5)) == "replay", "what the fix says"
    finally:
        handle.remove()


def test_I10_enabled_in_place_hooks_of_the_root_run_around_the_graphs():
    model = new_model()
    model.register_forward_pre_hook(double_positional)
    model.register_full_backward_hook(lambda module, given, out: None)
    graphed = piecewise.enable(model, buckets=(8,), progress=False)
    assert graphed.capture(tokens(7)).ok
    with torch.no_grad():
        got = model(tokens(5)), model(ids=tokens(5))
        want = graphed._forward((tokens(5) * 2) % VOCAB), graphed._forward(tokens(5))
    state_models.assert_equal(got, want)
    assert graphed.stats.replays == 2


def by_position(forward):
    """Looks at the call's form, as a decorator may."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, *args, **kwargs) * (2 if args else 3)

    return wrapper


class Wrapped(state_models.Model):
    @by_position
    def forward(self, ids):
        return super().forward(ids)


class Called(state_models.Model):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * (2 if args else 3)


class Decorated(state_models.Model):
    @torch.no_grad()
    def forward(self, ids):
        return super().forward(ids)


@pytest.mark.parametrize("in_place", [False, True], ids=["compiled", "enabled"])
@pytest.mark.parametrize("cls", [Wrapped, Called, Decorated])
def test_I10_a_wrapper_of_forward_and_a_call_of_the_models_own_may_see_the_form(cls, in_place):
    torch.manual_seed(1)
    model = cls().eval()
    if in_place:
        graphed = piecewise.enable(model, buckets=(8,), progress=False)
    else:
        graphed = graph(model, captured=False, buckets=(8,))
    assert graphed.capture(tokens(7)).ok
    sees = cls is Wrapped or (cls is Called and not in_place)
    assert serve(graphed, tokens(5)) == "replay"
    assert serve(graphed, ids=tokens(5)) == ("unseen_signature" if sees else "replay")
    assert graphed.capture(ids=tokens(7)).ok
    assert serve(graphed, ids=tokens(5)) == serve(graphed, tokens(5)) == "replay"


class WrappedBlock(state_models.Block):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(state_models.HIDDEN, state_models.HIDDEN))

    @by_position
    def forward(self, x):
        return super().forward(x) + self.inner(x)


def test_I10_a_wrapped_layer_that_is_traced_for_the_others_is_called_as_in_the_model():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCAB, state_models.HIDDEN)
            self.layers = nn.ModuleList([WrappedBlock() for _ in range(4)])

        def forward(self, ids):
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x) / 2
            return x

    torch.manual_seed(1)
    graphed = graph(Deep().eval(), buckets=(8,))
    assert inspect(graphed).layers.num_traced == 1
    assert serve(graphed, tokens(5)) == "replay"


def test_I10_the_order_of_further_keywords_is_part_of_the_call():
    def joined(model, x, **options):
        first, second = options.values()
        return x * first - second

    model = new_model(after=joined)
    graphed = graph(model, captured=False, buckets=(8,))
    a, b = torch.full((1,), 2.0), torch.full((1,), 3.0)
    graphed.capture(tokens(7), b=b, a=a)
    assert serve(graphed, tokens(5), b=b, a=a) == "replay"
    assert serve(graphed, tokens(5), a=a, b=b) == "unseen_signature"
    graphed.capture(tokens(7), a=a, b=b)
    assert serve(graphed, tokens(5), b=b, a=a) == serve(graphed, tokens(5), a=a, b=b) == "replay"


@pytest.mark.parametrize("again", ["capture", "refresh"])
def test_I10_another_default_of_forward_is_another_call_once_it_is_captured(again):
    class Scaled(state_models.Model):
        def forward(self, ids, factor=2.0):
            return super().forward(ids) * factor

    torch.manual_seed(1)
    graphed = graph(Scaled().eval(), buckets=(8,))
    Scaled.forward.__defaults__ = (3.0,)
    assert serve(graphed, tokens(5)) == "module_state_changed"
    graphed.capture(tokens(7)) if again == "capture" else graphed.refresh()
    assert serve(graphed, tokens(5)) == serve(graphed, tokens(5), factor=3.0) == "replay"


def print_call(module, args):
    print("called")


def test_I10_a_hook_that_breaks_the_graph_is_refused():
    model = new_model()
    model.register_forward_pre_hook(print_call)
    graphed = graph(model, captured=False)
    with pytest.raises(NotOneGraph, match=r"(?s)print.*Rule:.*Fix:"):
        graphed.capture(tokens(7))
