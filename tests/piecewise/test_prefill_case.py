"""Specs on the command line: what each wrong one is told."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from piecewise.errors.tools import WrongCase, WrongSpec
from piecewise.prefill_case import PrefillCase, load_case

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
    args, kwargs = case.inputs(3)
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
    with pytest.raises(WrongCase) as caught:
        case.inputs(7)
    assert says in str(caught.value)


def test_a_case_checks_its_parts():
    with pytest.raises(WrongCase, match="PrefillCase.model"):
        PrefillCase(lambda x: x, lambda n: ((), {}))
    with pytest.raises(WrongCase, match="PrefillCase.make_inputs"):
        PrefillCase(nn.Identity(), torch.ones(3))
