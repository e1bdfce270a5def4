"""Every refusal has a rule and a fix, is raised by a test, and stands in docs/ERRORS.md."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from functools import cache
from pathlib import Path

import error_table
import house
import pytest

import boundary_ops
import piecewise
import runners
from boundary_ops.errors import BoundaryOpError
from runners.errors import ConfigError

TESTS = Path(__file__).resolve().parents[1]
REFUSALS = [each for module in error_table.modules() for each in error_table.refusals(module)]


@cache
def raised_in_tests() -> set[str]:
    """Names of classes that some test expects: those in ``pytest.raises(...)`` or ``raises=...``."""
    found = set()
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("raises") and node.args:
                expected = [node.args[0]]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parametrize"):
                expected = list(node.args[1:])
            else:
                continue
            for each in expected:
                names = (part for part in ast.walk(each) if isinstance(part, ast.Name | ast.Attribute))
                found |= {ast.unparse(part).rpartition(".")[2] for part in names}
    return found


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: each.__name__)
def test_a_refusal_has_a_rule_a_fix_and_a_test(refusal):
    assert error_table.when(refusal) and refusal.rule and refusal.fix
    assert refusal.__name__ in raised_in_tests()


def test_the_document_is_what_the_generator_writes():
    assert error_table.DOCUMENT.read_text() == error_table.document(), (
        "run python tests/models/error_table.py"
    )


class NoSuchThing(ConfigError):
    """Something does not exist."""

    what = "thing {name!r}"
    got = "{name!r}"
    rule = "a thing is one of {names}"
    fix = "take {names[0]}"


class NoSuchOp(BoundaryOpError):
    """An op does not exist."""

    what = "op {name!r}"
    rule = "an op is registered"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_templates_are_filled_once_and_a_copy_says_the_same(copied):
    error = NoSuchThing(name="{x}", names=("a", "b"), expected="{not a template}")
    assert str(error) == (
        "thing '{x}': expected {not a template}, got '{x}'\n"
        "  Rule: a thing is one of ('a', 'b')\n"
        "  Fix:  take a"
    )
    other = copied(error)
    assert type(other) is NoSuchThing and str(other) == str(error) and other.fix == "take a"
    op = copied(NoSuchOp(name="y", fix="declare it"))
    assert type(op) is NoSuchOp and str(op) == "op 'y'\n  Rule: an op is registered\n  Fix:  declare it"


PUBLIC = dict.fromkeys(
    kind
    for package in (boundary_ops, piecewise, runners)
    for kind in (getattr(package, name) for name in package.__all__)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)
)


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda each: each.__name__)
def test_an_error_with_a_public_name_can_be_raised_with_words_of_the_callers_own(kind):
    assert str(kind("no room for {x}")) == "no room for {x}"
    assert str(kind("no room", got="{x}", fix="wait")) == "no room: got {x}\n  Fix:  wait"


def texts(tree: ast.Module) -> list[str]:
    """The strings of a module but its docstrings: all that messages, reports and commands are made of."""
    documented = [node for node in ast.walk(tree) if hasattr(node, "body") and isinstance(node.body, list)]
    docstrings = {
        id(node.body[0].value) for node in documented if node.body and isinstance(node.body[0], ast.Expr)
    }
    strings = [
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [node.value for node in strings if id(node) not in docstrings]


INVARIANT = re.compile(r"\bI\d{1,2}\b")


def test_no_message_has_the_number_of_an_invariant():
    """Readers of code and of the design know the numbers; users do not."""
    sample = ast.parse('"""[I1]"""\ndef f(name):\n    """[I2]"""\n    return f"{name} breaks [I3]"\n')
    assert [text for text in texts(sample) if INVARIANT.search(text)] == [" breaks [I3]"]
    found = {
        path: [text for text in texts(tree) if INVARIANT.search(text)]
        for path, tree in house.sources().items()
    }
    assert not {path: lines for path, lines in found.items() if lines}
    assert not INVARIANT.search(error_table.document())
