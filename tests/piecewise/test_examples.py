"""Every example runs, and what it says about itself is true."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_examples_are_numbered_without_gaps():
    assert [path.name[:2] for path in EXAMPLES] == [f"{number:02}" for number in range(1, len(EXAMPLES) + 1)]
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("01_split_only.py", "7 segments; the uncaptured call equals the model's"),
        ("02_own_model_own_op.py", "3 chunks replayed; results and KV cache equal the model's"),
        ("03_transformers_model.py", "2 packed steps replayed; results equal the unmodified model's"),
    ],
)
def test_an_example_ends_with_its_claim(name, last_line, capsys, monkeypatch):
    (path,) = (path for path in EXAMPLES if path.name == name)
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    example = importlib.util.module_from_spec(spec)
    # Dynamo imports the module of a traced function by its name.
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    example.main()
    assert capsys.readouterr().out.rstrip().splitlines()[-1] == last_line


def test_no_example_is_left_out():
    source = Path(__file__).read_text()
    assert all(f'"{path.name}"' in source for path in EXAMPLES)
