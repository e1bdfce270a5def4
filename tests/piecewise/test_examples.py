"""Every example runs, and what it says about itself is true; so does the README's quick start."""

from __future__ import annotations

import importlib.util
import re
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


def test_the_quick_start_replays():
    block, *others = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(block.splitlines()) <= 25
    downloaded = 'transformers.AutoModelForCausalLM.from_pretrained("path/to/a/llama")'
    small = (
        "transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4000, hidden_size=32,"
        " intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,"
        " num_key_value_heads=2, head_dim=8))"
    )
    assert block.count(downloaded) == 1
    names: dict = {}
    exec(compile(block.replace(downloaded, small), "README.md", "exec"), names)
    assert names["graphed"].stats.replays == 1 and names["graphed"].stats.eager_calls == 0
    assert names["next_tokens"].shape == (2,)
    for other in others:  # each goes on from the quick start
        exec(compile(other, "README.md", "exec"), names)
