"""The rules of the house hold, and each of them finds what breaks it."""

from __future__ import annotations

import ast

import house
import pytest


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_no_rule_is_broken(rule):
    assert rule() == []


PLANTED = {
    "circles": {
        "piecewise/a.py": "if TYPE_CHECKING:\n    from piecewise.b import B",
        "piecewise/b.py": "import piecewise.c",
        "piecewise/c.py": "from piecewise import a",
    },
    "late_imports": {"piecewise/a.py": "def f():\n    from piecewise import b", "piecewise/b.py": ""},
    "private_torch": {"piecewise/a.py": "import torch\nx = torch._C._thing()"},
    "devices_by_name": {
        "piecewise/a.py": "if device.type == 'cuda':\n    pass",
        "runners/cuda/graph.py": "class Engine(GraphEngine):\n    device_type = 'cuda'",
    },
    "engines_apart": {
        "runners/cuda/graph.py": "import runners.tape.tape\nclass A(GraphEngine): pass",
        "runners/tape/tape.py": "class B(GraphEngine): pass",
    },
    "classes_of_one_name": {"piecewise/a.py": "class A: pass", "runners/b.py": "class A: pass"},
    "errors_in_place": {"piecewise/a.py": "raise ConfigError('x', rule='y')"},
}


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_what_breaks_it(rule, monkeypatch):
    planted = {path: ast.parse(text) for path, text in PLANTED[rule.__name__].items()}
    monkeypatch.setattr(house, "sources", lambda: planted)
    monkeypatch.setattr(house, "engines", house.engines.__wrapped__)
    assert len(rule()) == 1 or rule is house.private_torch
    assert rule()
