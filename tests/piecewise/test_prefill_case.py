"""Cases: what they run around a call, those of attached models, and what each wrong spec is told."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch import nn

import boundary_ops
import piecewise
from boundary_ops import CacheExhaustedError, PagedKVCache, PrefillBatch
from boundary_ops.errors.huggingface import NotAModel
from piecewise.errors.tools import WrongCase, WrongSpec
from piecewise.prefill_case import PrefillCase, load_case
from piecewise.tools import cli

MODULE = """
import torch
from piecewise.prefill_case import PrefillCase

def linear_case():
    return PrefillCase(torch.nn.Linear(4, 4), lambda num_tokens: ((torch.ones(num_tokens, 4),), {}))

def not_a_case():
    return 3

def raising():
    raise RuntimeError("no weights here")

constant = 5
"""


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """A module `case_module` in the working directory, and one that imports something that is missing."""
    (tmp_path / "case_module.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name in ("case_module", "broken_module"):
        sys.modules.pop(name, None)


def test_a_spec_is_found_in_the_working_directory(specs):
    case = load_case("case_module:linear_case")
    with case.inputs(3) as (args, kwargs):
        assert kwargs == {} and args[0].shape == (3, 4)
        assert case.model(*args).shape == (3, 4)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "'package.module:function'"),
        ("case_module", "'package.module:function'"),
        ("case_module:", "'package.module:function'"),
        (":linear_case", "'package.module:function'"),
        ("case module:linear_case", "'package.module:function'"),
        ("case_module.py:linear_case", "no module 'case_module.py'"),
        ("./case_module:linear_case", "'package.module:function'"),
        ("case_module:linear_case:more", "'package.module:function'"),
        ("nowhere_at_all:linear_case", "no module 'nowhere_at_all'"),
        ("nowhere_at_all.deeper:linear_case", "no module 'nowhere_at_all'"),
        ("case_module:linear_cse", "the nearest is linear_case"),
        ("case_module:zzzzzz", "no 'zzzzzz'"),
        ("case_module:constant", "5 (int)"),
        ("case_module:not_a_case", "3 (int)"),
    ],
)
def test_a_wrong_spec_is_told_what_is_wrong(specs, spec, says):
    with pytest.raises(WrongSpec) as caught:
        load_case(spec)
    assert f"spec {spec!r}" in str(caught.value) and says in str(caught.value)


def test_errors_of_the_users_own_code_come_through(specs):
    with pytest.raises(RuntimeError, match="no weights here"):
        load_case("case_module:raising")
    with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
        load_case("broken_module:case")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (torch.ones(2), "a pair (args, kwargs)"),
        ((1, 2, 3), "a pair (args, kwargs)"),
        ((torch.ones(2), {}), "make_inputs(7)[0]"),
        (((), []), "make_inputs(7)[1]"),
        (((), {1: 2}), "make_inputs(7)[1]"),
    ],
)
def test_inputs_must_be_a_pair_of_args_and_kwargs(made, says):
    case = PrefillCase(nn.Identity(), lambda num_tokens: made)
    with pytest.raises(WrongCase) as caught, case.inputs(7):
        pass
    assert says in str(caught.value)


def test_a_case_checks_its_parts():
    with pytest.raises(WrongCase, match="PrefillCase.model"):
        PrefillCase(lambda x: x, lambda n: ((), {}))
    with pytest.raises(WrongCase, match="PrefillCase.make_inputs"):
        PrefillCase(nn.Identity(), torch.ones(3))


# --- inputs that stay open around the call


def test_make_inputs_may_be_a_context_manager_that_is_open_around_each_call():
    events = []

    @contextlib.contextmanager
    def make_inputs(num_tokens, *, seed=0):
        events.append(f"open {num_tokens} {seed}")
        try:
            yield (torch.ones(num_tokens, 4),), {}
        finally:
            events.append("closed")

    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: events.append("called"))
    case = PrefillCase(model, make_inputs)
    case.run(3)
    assert case.takes_seed and events == ["open 3 0", "called", "closed"]
    with pytest.raises(KeyError), case.inputs(5, seed=2) as (args, kwargs):
        assert args[0].shape == (5, 4) and not kwargs
        raise KeyError("of the call")
    assert events[3:] == ["open 5 2", "closed"]


@pytest.fixture
def attached_case():
    """An attached model, its cache, and a request in it that is not the case's."""
    pytest.importorskip("transformers")
    from small_transformers import attached

    model, cache = attached("Llama")
    cache.allocate("another", 5)
    return model, cache


def test_a_case_of_an_attached_model_runs_a_batch_of_requests_of_its_own(attached_case):
    model, cache = attached_case
    case = PrefillCase.for_model(model, cache, num_seqs=3)
    free = cache.num_free_blocks
    with case.inputs(11, seed=1) as (args, kwargs):
        batch = PrefillBatch.current()
        assert batch.query_lens == (4, 4, 3) and batch.context_lens == (0, 0, 0) and args == ()
        assert cache.num_free_blocks < free and len(cache.request_ids) == 4
        assert kwargs["input_ids"].shape == (1, 11) and kwargs["position_ids"] is batch.positions
        assert kwargs["logits_to_keep"].tolist() == [3, 7, 10]
        with torch.no_grad():
            assert model(**kwargs).logits.shape[:2] == (1, 3)
    assert PrefillBatch.peek() is None
    assert cache.request_ids == ("another",) and cache.num_free_blocks == free
    with case.inputs(11, seed=1) as (_, again), case.inputs(2, seed=2) as (_, inner):
        assert torch.equal(again["input_ids"], kwargs["input_ids"])
        assert PrefillBatch.current().query_lens == (1, 1) and inner["input_ids"].shape == (1, 2)
    with case.inputs(11, seed=2) as (_, other), pytest.raises(ZeroDivisionError):
        assert not torch.equal(other["input_ids"], kwargs["input_ids"])
        raise ZeroDivisionError
    with pytest.raises(CacheExhaustedError), case.inputs(1000):
        pass
    assert cache.request_ids == ("another",) and cache.num_free_blocks == free


def test_a_case_leaves_out_logits_to_keep_where_it_is_told_to_or_the_forward_has_none(attached_case):
    model, cache = attached_case
    for each in (
        PrefillCase.for_model(model, cache, logits_to_keep=False),
        PrefillCase.for_model(model.model, cache),
    ):
        with each.inputs(4) as (_, kwargs):
            assert kwargs.keys() == {"input_ids", "position_ids"}


def test_a_case_of_a_model_without_that_cache_is_refused(attached_case):
    model, cache = attached_case
    other = PagedKVCache.for_model(model, num_tokens=16)
    with pytest.raises(
        WrongCase, match="attached to the cache, got LlamaForCausalLM, attached to another"
    ) as error:
        PrefillCase.for_model(model, other)
    assert "attach(model, cache)" in str(error.value)
    boundary_ops.huggingface.detach(model)
    with pytest.raises(WrongCase, match="attached to no cache"):
        PrefillCase.for_model(model, cache)
    with pytest.raises(NotAModel):
        PrefillCase.for_model("Llama", cache)
    for count in (0, -1, True, 2.0):
        with pytest.raises(WrongCase, match="'num_seqs': expected a positive int"):
            PrefillCase.for_model(model, cache, num_seqs=count)


def test_verify_opens_a_batch_around_each_call_and_leaves_none(attached_case):
    model, cache = attached_case
    case = PrefillCase.for_model(model, cache, num_seqs=2)
    graphed = piecewise.compile(model, buckets=[4, 8], progress=False)
    with case.inputs(6) as (_, kwargs), torch.no_grad():
        graphed.capture(**kwargs)
    report = graphed.verify(make_inputs=case.make_inputs)
    assert report.ok and report.num_compared == 8, report
    assert PrefillBatch.peek() is None and cache.request_ids == ("another",)


SPEC = """
import torch, transformers, boundary_ops, piecewise

def case():
    config = transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    cache = boundary_ops.PagedKVCache.for_model(model, num_tokens=64)
    return piecewise.PrefillCase.for_model(boundary_ops.huggingface.attach(model, cache), cache, num_seqs=2)
"""


def test_a_spec_of_an_attached_model_serves_explain_verify_and_bench(specs, capsys):
    pytest.importorskip("transformers")
    (specs / "attached_module.py").write_text(SPEC)
    sys.modules.pop("attached_module", None)
    for command, says in (
        (("explain", "--tokens", "8"), "piecewise::attn_inplace"),
        (("verify", "--buckets", "4,8"), "Graphed equals eager at 8 sizes"),
        (
            ("bench", "--tokens", "4", "--rounds", "1", "--variants", "eager,graphed,graphed-captured"),
            "captured",
        ),
    ):
        assert cli.main([command[0], "attached_module:case", *command[1:]]) == 0
        out = capsys.readouterr().out
        assert says in out, out
    assert PrefillBatch.peek() is None
